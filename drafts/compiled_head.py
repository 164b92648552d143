"""The draft head with a whole depth in one call of compiled code, see :mod:`drafts.native.head_pass`.

Its matrices are rounded to eight bits in blocks of 32 (``Q8_0``): a draft may round, since verification
decides, and a depth is bound by reading them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.compiled_experts import CompiledExperts
from drafts.compiled_memory import HeadMemory
from drafts.errors import InvalidValueError
from drafts.head_forward import HeadPath, LibraryHead, Pending, Predicted, merged
from drafts.native import head_pass as entry
from drafts.native.machine import wide_registers
from drafts.native.product_tables import ROWS_NARROW, ROWS_WIDE, chunk_table, sizes_obstacle
from drafts.native.team import Team, team
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
    return sizes_obstacle(shape.head_dim, widths)


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
        self._memory = HeadMemory(library, self.rows, MOST, self.experts.rank, self._threads, lent)

    def read(self, paths: Sequence[HeadPath], pending: Pending) -> Predicted:
        """See :meth:`HeadForward.read`; rows with many pairs, whole prompts, are the library's."""
        _check_features(pending.features, self.trunk.shape.feature_width)
        groups = list(_groups(pending.counts))
        if len(groups) == 1:
            return self._read_group(paths, pending)
        found: list[Predicted] = []
        for group in groups:
            part = self._read_group([paths[row] for row in group], pending.of(group))
            found.append(replace(part, logits=part.logits.clone()))
        return merged(found, groups)

    def _read_group(self, paths: Sequence[HeadPath], pending: Pending) -> Predicted:
        """Read rows whose pairs fit a pass, or one row whose pairs do not."""
        if sum(pending.counts) > MOST:
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
        found = self._run(paths, table, pending.tokens, pending.positions, features, self._memory.hidden)
        for path, pairs in zip(paths, pending.counts, strict=True):
            path.cache.commit(pairs)
        return found

    def step(self, paths: Sequence[HeadPath], hidden: Tensor, depth: int) -> Predicted:
        """See :meth:`HeadForward.step`."""
        if len(paths) > MOST:
            return self.library.step(paths, hidden, depth)
        expected = (len(paths), self.trunk.shape.hidden_size)
        if tuple(hidden.shape) != expected or hidden.dtype != torch.float32:
            raise InvalidValueError("hidden", _form(hidden), f"float32 {expected}")
        table = np.empty((len(paths), entry.ROW_WIDTH), dtype=np.int64)
        for index, (line, path) in enumerate(zip(table, paths, strict=True)):
            cache = path.cache
            end = cache.length + depth
            cache.reserve(end)
            line[:] = (*_address(path), end - 1, max(0, end - cache.window), 1, index)
        tokens = [path.token for path in paths]
        positions = [len(path.row.tokens) - 2 + depth for path in paths]
        return self._run(paths, table, tokens, positions, None, hidden.contiguous())

    def expert_bytes(self, slot: int) -> int:
        """See :meth:`HeadForward.expert_bytes`."""
        return self.experts.bytes(slot)

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
        state = torch.empty(len(rows), self.trunk.shape.hidden_size, dtype=torch.float32)
        table = self._memory.table
        for place, value in (
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
        logits, top = self._memory.outputs.take(len(rows))
        return Predicted(state, logits, top)

    def _turns_to(self, position: int) -> list[Tensor]:
        """Rotary factors, cosines and signed sines ``[positions, D]``, up to ``position`` at least."""
        if position >= len(self._turns[0]):
            count = max(512, 2 * position)
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self.trunk.frequencies
            cos, sin = angles.cos(), angles.sin()
            self._turns = [torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)]
        return self._turns


def _groups(counts: Sequence[int]) -> Iterator[list[int]]:
    """Rows that are read in one pass each: as many short ones as fit, in order; a long one alone."""
    group: list[int] = []
    pairs = 0
    for index, count in enumerate(counts):
        if count > MOST:
            yield [index]
            continue
        if pairs + count > MOST:
            yield group
            group, pairs = [], 0
        group.append(index)
        pairs += count
    if group:
        yield group


def _check_features(features: Sequence[Tensor], width: int) -> None:
    """Compiled code reads by address, so what it is given has to be of the size it takes for granted."""
    for given in features:
        if given.ndim != 2 or given.shape[1] != width:
            raise InvalidValueError("features", _form(given), f"(pairs, {width})")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _address(path: HeadPath) -> tuple[int, int, int]:
    """Keys, values, and bytes from head to head."""
    keys = path.cache.keys
    return keys.data_ptr(), path.cache.values.data_ptr(), keys.stride(0) * keys.element_size()
