"""Attention whose result for a token depends on its own path alone, not on the pass it is part of.

A reduction rounds by how it is cut, and libraries cut it by the shapes they are given. Here the shapes
a token meets depend on its position only: keys lie in path order (committed text, ancestors in the
tree, the token itself) and are padded to whole blocks, queries go in groups of one fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from osd.serve.cache import SlotCache
from osd.serve.target import PassRow

QUERIES = 4
"""Tokens that attend together; a group with fewer is filled up with copies of its last one."""

KEYS = 64
"""Keys are padded to multiples of this with entries of weight 0."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Up to ``QUERIES`` tokens of one path that read equally many keys.

    Attributes:
        slot: Row of the cache.
        tokens: Their indices among the packed tokens of the pass.
        seen: Keys that each of them sees: its position plus 1.
        length: Keys read, a multiple of ``KEYS``.
        places: The cache places of the path in order, if they are not the first ``length`` as they lie.
    """

    slot: int
    tokens: tuple[int, ...]
    seen: tuple[int, ...]
    length: int
    places: tuple[int, ...] | None


def units(rows: Sequence[PassRow], first: Sequence[int], room: int) -> list[Unit]:
    """Every token of a pass in exactly one unit.

    Args:
        rows: The rows of the pass.
        first: First packed token of each row.
        room: Places in a row of the cache.
    """
    found: list[Unit] = []
    for row, at in zip(rows, first, strict=True):
        for path, begin in _paths(row):
            lies_in_order = path[-1] == len(path) - 1
            while begin < len(path):
                length = KEYS * (1 + (row.start + begin) // KEYS)
                end = min(len(path), begin + QUERIES, length - row.start)
                places: tuple[int, ...] | None = None
                if not lies_in_order or length > room:
                    places = (*range(row.start), *(row.start + offset for offset in path))[:length]
                    places += (0,) * (length - len(places))
                tokens = tuple(at + path[depth] for depth in range(begin, end))
                seen = tuple(row.start + depth + 1 for depth in range(begin, end))
                found.append(Unit(row.slot, tokens, seen, length, places))
                begin = end
    return found


def _paths(row: PassRow) -> Iterator[tuple[list[int], int]]:
    """Offsets from the root to every leaf, and how many of them an earlier path has served."""
    if row.parents is None:
        yield list(range(len(row.tokens))), 0
        return
    inner = {parent + 1 for parent in row.parents}
    served: set[int] = set()
    for leaf in range(len(row.tokens)):
        if leaf in inner:
            continue
        path = [leaf]
        while path[-1]:
            path.append(row.parents[path[-1] - 1] + 1)
        path.reverse()
        yield path, sum(offset in served for offset in path)
        served.update(path)


def attend(queries: Tensor, pair: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """One unit: queries ``[1, kv_heads, Q, d]``, pair ``[2, 1, kv_heads, L, d]``, mask ``[1, 1, Q, L]``."""
    return F.scaled_dot_product_attention(queries, pair[0], pair[1], mask, scale=scaling)


class StrictAttention:
    """The attention of one pass: what depends on the rows is prepared once for all layers.

    Args:
        cache: The slot cache.
        found: The units of the pass.
        count: Packed tokens.
        heads: Query heads.
        kv_heads: Key-value heads.
        scaling: Factor on the scores.
    """

    def __init__(
        self, cache: SlotCache, found: Sequence[Unit], count: int, heads: int, kv_heads: int, scaling: float
    ) -> None:
        self._cache = cache
        self._units = found
        self._kv_heads = kv_heads
        self._share = heads // kv_heads
        self._scaling = scaling
        pair = cache.pairs[0]
        asked = [_filled(unit.tokens) for unit in found]
        back = [0] * count
        for index, unit in enumerate(found):
            for offset, token in enumerate(unit.tokens):
                back[token] = index * QUERIES + offset
        self._asked = torch.tensor(asked, device=pair.device).flatten()
        self._back = torch.tensor(back, device=pair.device)
        self._masks = [mask_of(unit, self._share, pair.dtype).to(pair.device) for unit in found]
        self._places = [
            None if unit.places is None else torch.tensor(unit.places, device=pair.device) for unit in found
        ]

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """``[N, heads, head_dim]``, rotated, to ``[N, heads * head_dim]``; this layer's keys are written."""
        width = queries.shape[-1]
        pair = self._cache.pairs[layer]
        grouped = queries[self._asked].view(-1, QUERIES, self._kv_heads, self._share, width)
        folded = grouped.transpose(1, 2).reshape(-1, 1, self._kv_heads, QUERIES * self._share, width)
        out: list[Tensor] = []
        for unit, mask, places, query in zip(self._units, self._masks, self._places, folded, strict=True):
            row = pair[:, unit.slot : unit.slot + 1]
            row = row[..., : unit.length, :] if places is None else row.index_select(3, places)
            out.append(attend(query, row, mask, self._scaling))
        whole = torch.cat(out).view(-1, self._kv_heads, QUERIES, self._share, width).transpose(1, 2)
        return whole.reshape(-1, self._kv_heads * self._share * width)[self._back]


def mask_of(unit: Unit, share: int, dtype: torch.dtype) -> Tensor:
    """Additive mask ``[1, 1, QUERIES * share, length]``."""
    seen = torch.tensor(_filled(unit.seen)).repeat_interleave(share)[:, None]
    hidden = torch.arange(unit.length) >= seen
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]


def _filled(values: Sequence[int]) -> list[int]:
    return [*values, *[values[-1]] * (QUERIES - len(values))]
