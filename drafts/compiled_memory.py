"""What a compiled head's passes read and write: weights in tiles, kernels, buffers, a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from drafts.head_forward import LibraryHead
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
from drafts.native.product_tables import describe_product, interleave, kernel_table, laid_out, tile_name
from drafts.native.team import Team
from drafts.native.tiles import OUTPUTS, Format, emit_tile
from drafts.native.vectors import LANES
from drafts.trunk import Trunk


class HeadMemory:
    """The memory of a compiled head.

    Args:
        library: The head by torch's operators, whose weights are rounded here.
        rows: Rows that product kernels are made for.
        most: Most pairs of a pass.
        rank: Of the experts' deltas, in whole vectors.
        threads: Threads that run a pass.
        team: Which ones.

    Attributes:
        table: int64, see :mod:`drafts.native.head_pass`; a pass fills in the entries that change.
        hidden: float32 ``[pairs, H]`` for what is made of features.
        outputs: Logits and candidates of the last pass.
    """

    def __init__(
        self, library: LibraryHead, rows: Sequence[int], most: int, rank: int, threads: int, team: Team
    ) -> None:
        trunk, shape = library.trunk, library.trunk.shape
        room = most + 2 * rows[-1]
        self.hidden = torch.zeros(room, shape.hidden_size, dtype=torch.float32)
        self.outputs = Outputs(library, room)
        self._alive: list[Any] = []
        share = shape.heads // shape.kv_heads
        tiles = _tiles(trunk, library.output)
        together = queries_at_once(share, shape.head_dim)
        kernels = _kernels({tile.format for tile in tiles.values()}, rows, together, shape.head_dim, rank)
        scores = -(-(library.window + most) // LANES) * LANES + 2 * LANES
        numbers = np.array([shape.norm_eps, shape.head_dim**-0.5], dtype=np.float32)
        self._alive.append(numbers)
        self.table = np.zeros(entry.ENTRIES + 1, dtype=np.int64)
        values = {
            steps.TEAM: team.size,
            steps.BARRIER: team.barrier,
            steps.THREAD: team.thread,
            steps.HIDDEN: shape.hidden_size,
            steps.INNER: shape.intermediate_size,
            steps.SIZE: shape.head_dim,
            steps.NUMBERS: numbers.ctypes.data,
            steps.STORE: kernels["store"],
            steps.GATE: kernels["gate"],
            steps.DELTA: kernels["delta"],
            entry.HEADS: shape.heads,
            entry.KV_HEADS: shape.kv_heads,
            entry.LAYERS: len(shape.feature_layers),
            entry.HIDDEN_STRIDE: shape.hidden_size,
            entry.QKV_STRIDE: tiles[entry.QKV].padded,
            entry.SCORES: kernels["scores"],
            entry.VALUES: kernels["values"],
            entry.SOFTMAX: kernels["softmax"],
            entry.PROJECT: kernels["project"],
            entry.TOGETHER: together,
            entry.SCORES_STRIDE: scores,
            **self._weights(trunk, tiles, kernels, rows),
            **self._shared(trunk, tiles, room),
            **self._private(trunk, room, scores, threads),
            **self.outputs.entries(),
        }
        for place, value in values.items():
            self.table[place] = value

    def _weights(
        self, trunk: Trunk, tiles: dict[int, Tiles], kernels: dict[str, int], rows: Sequence[int]
    ) -> dict[int, int]:
        """Addresses of weights, and what is said of the products."""
        shapes = np.zeros(len(tiles) * steps.SHAPE, dtype=np.int64)
        weights = np.zeros(entry.WEIGHT_COUNT, dtype=np.int64)
        for index, (place, tile) in enumerate(tiles.items()):
            by_rows = kernel_table(kernels, tile.format, rows)
            describe_product(shapes[index * steps.SHAPE :], tile, by_rows)
            weights[place] = tile.data.data_ptr()
            self._alive += [tile, by_rows]
        bias = trunk.tensors["output_bias"]
        vectors = {
            entry.FEATURE_NORM: trunk.tensors["feature_norm"],
            entry.EMBED_NORM: trunk.tensors["embed_norm"],
            entry.HIDDEN_NORM: trunk.tensors["hidden_norm"],
            entry.MLP_NORM: trunk.tensors["mlp_norm"],
            entry.FINAL_NORM: trunk.tensors["final_norm"],
            entry.OUTPUT_BIAS: F.pad(bias, (0, tiles[entry.OUTPUT].padded - len(bias))),
        }
        for place, vector in vectors.items():
            kept = vector.detach().float().contiguous().clone()
            weights[place] = kept.data_ptr()
            self._alive.append(kept)
        self._alive += [shapes, weights]
        return {entry.SHAPES: shapes.ctypes.data, entry.WEIGHTS: weights.ctypes.data}

    def _shared(self, trunk: Trunk, tiles: dict[int, Tiles], room: int) -> dict[int, int]:
        """Buffers that the threads share."""
        shape = trunk.shape
        widths = {
            entry.SHARED_QKV: tiles[entry.QKV].padded,
            entry.SHARED_ATTENDED: shape.heads * shape.head_dim,
            entry.SHARED_PROJECTED: shape.hidden_size,
            entry.SHARED_ACTIVE: shape.intermediate_size,
            entry.SHARED_DOWN: shape.hidden_size,
        }
        buffers = {place: torch.zeros(room, width, dtype=torch.float32) for place, width in widths.items()}
        self._alive += buffers.values()
        return {place: buffer.data_ptr() for place, buffer in buffers.items()}

    def _private(self, trunk: Trunk, room: int, scores: int, threads: int) -> dict[int, int]:
        """Buffers that each thread has for itself; the hidden states come first."""
        shape = trunk.shape
        share = shape.heads // shape.kv_heads
        sizes = {
            steps.PRIVATE_X: room * max(shape.feature_width, 2 * shape.hidden_size),
            steps.PRIVATE_LINE: shape.hidden_size,
            steps.PRIVATE_GATE: 2 * OUTPUTS * steps.MOST_ROWS,
            steps.PRIVATE_SCRATCH: LANES,
            steps.PRIVATE_SECOND: LANES,
            entry.PRIVATE_HEADS: share * shape.head_dim,
            entry.PRIVATE_SCORES: share * scores,
        }
        found, end = laid_out(sizes, room * shape.hidden_size)
        private = torch.zeros(threads, end, dtype=torch.float32)
        self._alive.append(private)
        return {**found, steps.PRIVATE: private.data_ptr(), steps.PRIVATE_STRIDE: end}


class Outputs:
    """Where a pass leaves logits and candidates."""

    def __init__(self, library: LibraryHead, room: int) -> None:
        self._vocabulary = len(library.output)
        self._stride = -(-self._vocabulary // OUTPUTS) * OUTPUTS
        self._logits = torch.zeros(room, self._stride, dtype=torch.float32)
        self._chances = torch.zeros(room, self._stride + LANES, dtype=torch.float32)
        self._ids = np.zeros((room, library.width), dtype=np.int64)
        self._shares = np.zeros((room, library.width), dtype=np.float32)

    def take(self, rows: int) -> tuple[Tensor, list[list[float]]]:
        """Logits ``[R, V]`` (valid until the next pass); per row candidates' probabilities, then indices."""
        logits = self._logits[:rows, : self._vocabulary]
        lines = zip(self._shares[:rows].tolist(), self._ids[:rows].tolist(), strict=True)
        return logits, [shares + picks for shares, picks in lines]

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

    return compiled(emit)
