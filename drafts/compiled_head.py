"""The draft head with a whole depth in one call of compiled code, see :mod:`drafts.native.head_pass`.

Its matrices are rounded to eight bits in blocks of 32 (``Q8_0``): a draft may round, since verification
decides, and a depth is bound by reading them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from drafts.compiled_experts import CompiledExperts
from drafts.head_forward import HeadPath, LibraryHead, Pending, Predicted
from drafts.native import head_pass as entry
from drafts.native import steps
from drafts.native.attention import (
    emit_gate,
    emit_scores,
    emit_softmax,
    emit_store,
    emit_values,
    queries_at_once,
)
from drafts.native.codes import Tiles, nearest_q8, tiles_of
from drafts.native.low_rank import emit_delta, emit_project
from drafts.native.machine import compiled, wide_registers
from drafts.native.product_tables import (
    ROWS_NARROW,
    ROWS_WIDE,
    chunk_table,
    describe_product,
    interleave,
    kernel_table,
    tile_name,
)
from drafts.native.team import Team, team
from drafts.native.tiles import GROUP, OUTPUTS, Format, emit_tile
from drafts.native.vectors import LANES
from drafts.trunk import Trunk

logger = logging.getLogger(__name__)

MOST = 64
"""More pairs than this, as of a prompt, are read by the library, whose products are made for many rows."""


def head_obstacle(trunk: Trunk, embedding: Tensor) -> str | None:
    """Why the head cannot run in compiled code here."""
    shape = trunk.shape
    if embedding.device.type != "cpu":
        return "not on a processor"
    if team() is None:
        return "torch does not lend its threads here"
    widths = (shape.hidden_size, shape.intermediate_size, shape.heads * shape.head_dim)
    if shape.head_dim % (2 * LANES) or any(width % GROUP for width in widths):
        return f"heads of {shape.head_dim} and widths {widths} do not come in whole vectors"
    return None


def compiled_head(library: LibraryHead) -> CompiledHead | None:
    """The compiled form of a head, where it can be had."""
    obstacle = head_obstacle(library.trunk, library.embedding)
    if obstacle is not None:
        logger.debug("the draft head is not compiled: %s", obstacle)
        return None
    return CompiledHead(library)


class CompiledHead:
    """Runs the head's depths in compiled code.

    Args:
        library: The same head by torch's operators; reads what is too long for this one.
    """

    def __init__(self, library: LibraryHead) -> None:
        self.library = library
        self.trunk = library.trunk
        self.embedding = library.embedding
        lent = team()
        assert lent is not None
        self._team: Team = lent
        self._threads = torch.get_num_threads()
        self.rows = ROWS_WIDE if wide_registers() else ROWS_NARROW
        self.experts = CompiledExperts(library.bank, MOST)
        self._turns = [torch.empty(0, self.trunk.shape.head_dim)] * 2
        self._alive: list[Any] = []
        self._outputs = _Outputs(library, self.rows)
        self._table = self._make_table()

    def read(self, paths: Sequence[HeadPath], pending: Pending) -> Predicted:
        """See :meth:`HeadForward.read`."""
        count = sum(pending.counts)
        if count > MOST:
            return self.library.read(paths, pending)
        features = torch.cat(pending.features).float().contiguous()
        table = np.empty((len(paths), entry.ROW_WIDTH), dtype=np.int64)
        first = 0
        for line, path, pairs in zip(table, paths, pending.counts, strict=True):
            cache = path.cache
            cache.reserve(cache.length + pairs)
            seen = max(0, cache.length + pairs - cache.window)
            line[:] = (*_address(path), cache.length, seen, pairs, first)
            first += pairs
        found = self._run(paths, table, pending.tokens, pending.positions, features, self._hidden)
        for path, pairs in zip(paths, pending.counts, strict=True):
            path.cache.commit(pairs)
        return found

    def step(self, paths: Sequence[HeadPath], hidden: Tensor, depth: int) -> Predicted:
        """See :meth:`HeadForward.step`."""
        table = np.empty((len(paths), entry.ROW_WIDTH), dtype=np.int64)
        for index, (line, path) in enumerate(zip(table, paths, strict=True)):
            cache = path.cache
            end = cache.length + depth
            cache.reserve(end)
            line[:] = (*_address(path), end - 1, max(0, end - cache.window), 1, index)
        tokens = [path.token for path in paths]
        positions = [len(path.row.tokens) - 2 + depth for path in paths]
        return self._run(paths, table, tokens, positions, None, hidden.contiguous())

    def _run(
        self,
        paths: Sequence[HeadPath],
        rows: np.ndarray,
        tokens: list[int],
        positions: list[int],
        features: Tensor | None,
        hidden: Tensor,
    ) -> Predicted:
        """One pass over packed pairs."""
        at = torch.tensor((tokens, positions))
        embeds = F.embedding(at[0], self.embedding).float()
        cos, sin = (side[at[1]] for side in self._turns_to(max(positions)))
        chunks, _ = chunk_table(len(tokens), self.rows)
        row_chunks, _ = chunk_table(len(rows), self.rows)
        experts = self.experts.tables([path.slot for path in paths])
        state = torch.empty(len(rows), self.trunk.shape.hidden_size)
        table = self._table
        for place, value in (
            (entry.TOKENS, len(tokens)),
            (entry.FEATURES, 0 if features is None else features.data_ptr()),
            (entry.EMBEDS, embeds.data_ptr()),
            (entry.COS, cos.data_ptr()),
            (entry.SIN, sin.data_ptr()),
            (entry.CHUNK_TABLE, chunks.ctypes.data),
            (entry.ROWS, len(rows)),
            (entry.ROW_TABLE, rows.ctypes.data),
            (entry.ROW_CHUNKS, row_chunks.ctypes.data),
            (entry.SHARED_HIDDEN, hidden.data_ptr()),
            (entry.HIDDEN_OUT, state.data_ptr()),
            (entry.DELTAS, 0 if experts is None else experts[0].ctypes.data),
            (entry.DELTA_A, 0 if experts is None else experts[1].ctypes.data),
        ):
            table[place] = value
        self._team.run(entry.run_head.address, table.ctypes.data, self._threads)
        logits, shares, picks = self._outputs.take(len(rows))
        return Predicted(state, logits, shares, picks)

    def _turns_to(self, position: int) -> list[Tensor]:
        """Rotary factors, cosines and signed sines ``[positions, D]``, up to ``position`` at least."""
        if position >= len(self._turns[0]):
            count = max(512, 2 * position)
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self.trunk.frequencies
            cos, sin = angles.cos(), angles.sin()
            self._turns = [torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)]
        return self._turns

    def _make_table(self) -> np.ndarray:
        """The entries that stay, and what they point to."""
        trunk, shape = self.trunk, self.trunk.shape
        share = shape.heads // shape.kv_heads
        tiles = _tiles(trunk, self.library.output)
        together = queries_at_once(share, shape.head_dim)
        formats = {tile.format for tile in tiles.values()}
        kernels = _kernels(formats, self.rows, together, shape.head_dim, self.experts.rank)
        shapes = np.zeros(len(tiles) * steps.SHAPE, dtype=np.int64)
        weights = np.zeros(entry.WEIGHT_COUNT, dtype=np.int64)
        for index, (place, tile) in enumerate(tiles.items()):
            by_rows = kernel_table(kernels, tile.format, self.rows)
            describe_product(shapes[index * steps.SHAPE :], tile, by_rows)
            weights[place] = tile.data.data_ptr()
            self._alive += [tile, by_rows]
        vocabulary = tiles[entry.OUTPUT].padded
        bias = F.pad(trunk.tensors["output_bias"].float(), (0, vocabulary - len(trunk.token_ids)))
        for place, tensor in (
            (entry.FEATURE_NORM, trunk.tensors["feature_norm"]),
            (entry.EMBED_NORM, trunk.tensors["embed_norm"]),
            (entry.HIDDEN_NORM, trunk.tensors["hidden_norm"]),
            (entry.MLP_NORM, trunk.tensors["mlp_norm"]),
            (entry.FINAL_NORM, trunk.tensors["final_norm"]),
            (entry.OUTPUT_BIAS, bias),
        ):
            kept = tensor.detach().float().contiguous().clone()
            weights[place] = kept.data_ptr()
            self._alive.append(kept)
        numbers = np.array([shape.norm_eps, shape.head_dim**-0.5], dtype=np.float32)
        room = MOST + 2 * self.rows[-1]
        self._hidden = torch.zeros(room, shape.hidden_size)
        shared = {
            entry.SHARED_QKV: torch.zeros(room, tiles[entry.QKV].padded),
            entry.SHARED_ATTENDED: torch.zeros(room, shape.heads * shape.head_dim),
            entry.SHARED_PROJECTED: torch.zeros(room, shape.hidden_size),
            entry.SHARED_ACTIVE: torch.zeros(room, shape.intermediate_size),
            entry.SHARED_DOWN: torch.zeros(room, shape.hidden_size),
        }
        scores = -(-(self.library.window + MOST) // LANES) * LANES + 2 * LANES
        sizes = {
            0: room * shape.hidden_size,
            steps.PRIVATE_X: room * max(shape.feature_width, 2 * shape.hidden_size),
            steps.PRIVATE_LINE: shape.hidden_size,
            steps.PRIVATE_GATE: 2 * OUTPUTS * steps.MOST_ROWS,
            steps.PRIVATE_SCRATCH: LANES,
            entry.PRIVATE_HEADS: share * shape.head_dim,
            entry.PRIVATE_SCORES: share * scores,
        }
        offsets, end = {}, 0
        for place, size in sizes.items():
            offsets[place] = end
            end += -(-size // LANES) * LANES + LANES
        del offsets[0]
        private = torch.zeros(self._threads, end)
        self._alive += [shapes, weights, numbers, private, *shared.values()]
        found = np.zeros(entry.ENTRIES + 1, dtype=np.int64)
        values = {
            steps.THREADS: self._threads,
            steps.BARRIER: self._team.barrier,
            steps.THREAD: self._team.thread,
            steps.HIDDEN: shape.hidden_size,
            steps.INNER: shape.intermediate_size,
            steps.SIZE: shape.head_dim,
            steps.NUMBERS: numbers.ctypes.data,
            steps.STORE: kernels["store"],
            steps.GATE: kernels["gate"],
            steps.DELTA: kernels["delta"],
            steps.PRIVATE: private.data_ptr(),
            steps.PRIVATE_STRIDE: end,
            **offsets,
            entry.HEADS: shape.heads,
            entry.KV_HEADS: shape.kv_heads,
            entry.LAYERS: len(shape.feature_layers),
            entry.SHAPES: shapes.ctypes.data,
            entry.WEIGHTS: weights.ctypes.data,
            entry.HIDDEN_STRIDE: shape.hidden_size,
            entry.QKV_STRIDE: tiles[entry.QKV].padded,
            entry.SCORES: kernels["scores"],
            entry.VALUES: kernels["values"],
            entry.SOFTMAX: kernels["softmax"],
            entry.PROJECT: kernels["project"],
            entry.TOGETHER: together,
            entry.RANK: self.experts.rank,
            entry.SCORES_STRIDE: scores,
            **{place: buffer.data_ptr() for place, buffer in shared.items()},
            **self._outputs.entries(),
        }
        for place, value in values.items():
            found[place] = value
        return found


class _Outputs:
    """Where a pass leaves logits and candidates."""

    def __init__(self, library: LibraryHead, rows: Sequence[int]) -> None:
        self._vocabulary = len(library.output)
        self._stride = -(-self._vocabulary // OUTPUTS) * OUTPUTS
        room = MOST + 2 * rows[-1]
        self._logits = torch.zeros(room, self._stride)
        self._chances = torch.zeros(room, self._stride + LANES)
        self._ids = np.zeros((room, library.width), dtype=np.int64)
        self._shares = np.zeros((room, library.width), dtype=np.float32)

    def take(self, rows: int) -> tuple[Tensor, list[list[float]], list[list[int]]]:
        """Logits ``[R, V]`` (valid until the next pass), candidates' probabilities and indices."""
        logits = self._logits[:rows, : self._vocabulary]
        return logits, self._shares[:rows].tolist(), self._ids[:rows].tolist()

    def entries(self) -> dict[int, int]:
        """What the pass's table says of them."""
        return {
            entry.OUT: self._logits.data_ptr(),
            entry.CHANCES: self._chances.data_ptr(),
            entry.VOCAB_STRIDE: self._stride,
            entry.VOCAB: self._vocabulary,
            entry.WIDTH: self._ids.shape[1],
            entry.TOP_IDS: self._ids.ctypes.data,
            entry.TOP_CHANCES: self._shares.ctypes.data,
        }


def _address(path: HeadPath) -> tuple[int, int, int]:
    """Keys, values, and bytes from head to head."""
    keys = path.cache.keys
    return keys.data_ptr(), path.cache.values.data_ptr(), keys.stride(0) * keys.element_size()


def _tiles(trunk: Trunk, output: Tensor) -> dict[int, Tiles]:
    """The products' weights in eight bits, in the order in which the pass names their shapes."""
    gate, up = trunk.tensors["gate_up"].chunk(2)
    matrices = {
        entry.FUSE: trunk.tensors["fc"],
        entry.QKV: trunk.tensors["qkv"],
        entry.ATTN_OUT: trunk.tensors["attention_out"],
        entry.GATE_UP: torch.cat(interleave((gate, up))),
        entry.DOWN: trunk.tensors["down"],
        entry.OUTPUT: output,
    }
    found: dict[int, Tiles] = {}
    for place, matrix in matrices.items():
        tiles = tiles_of([nearest_q8(matrix)])
        assert tiles is not None
        found[place] = tiles
    return found


def _kernels(
    formats: set[Format], rows: Sequence[int], together: int, size: int, rank: int
) -> dict[str, int]:
    """Addresses of all kernels that the head needs, by name."""

    def emit(module: ir.Module) -> None:
        for fmt in sorted(formats, key=lambda fmt: fmt.key):
            for count in rows:
                emit_tile(module, tile_name(fmt, count), fmt, count, wide_registers())
        emit_scores(module, "scores", size, "f32")
        emit_values(module, "values", together, size, "f32")
        emit_softmax(module, "softmax")
        emit_gate(module, "gate", rounded=False)
        emit_store(module, "store", "f32")
        emit_project(module, "project", rank)
        emit_delta(module, "delta")

    names = [tile_name(fmt, count) for fmt in formats for count in rows]
    return compiled(emit, [*names, "scores", "values", "softmax", "gate", "store", "project", "delta"])
