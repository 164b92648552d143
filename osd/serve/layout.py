"""How the rows of a target pass lie in memory: packed tokens, positions, and attention groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from drafts.errors import IntegrityError
from osd.serve.cache import SlotCache
from osd.serve.target import PassRow

LONG_ROW = 32
"""Rows with more tokens than this attend alone, so that a prefill chunk never pads its neighbours."""

WASTE = 512
"""Cache entries read in vain that cost as much as attending in one group more."""


def check_rows(rows: Sequence[PassRow]) -> None:
    """What must hold of the rows of any pass.

    Raises:
        IntegrityError: A slot occurs twice, or a row has no tokens or not a parent for each but the first.
    """
    if len({row.slot for row in rows}) != len(rows):
        raise IntegrityError(f"a slot occurs twice in one pass: {[row.slot for row in rows]}")
    for row in rows:
        count = len(row.tokens)
        if not count or (row.parents is not None and len(row.parents) != count - 1):
            raise IntegrityError(f"slot {row.slot}: {count} tokens, parents {row.parents}")


def depths(row: PassRow) -> list[int]:
    """Depth of each of a row's tokens below ``tokens[0]``; a token's position is ``start + depth``."""
    if row.parents is None:
        return list(range(len(row.tokens)))
    found = [0]
    for parent in row.parents:
        found.append(found[parent + 1] + 1)
    return found


def ancestors(parents: Sequence[int]) -> Tensor:
    """bool ``[T, T]``: which tokens of a tree each token sees, itself and the root included."""
    seen = np.eye(len(parents) + 1, dtype=np.bool_)
    for index, parent in enumerate(parents, start=1):
        seen[index] |= seen[parent + 1]
    return torch.from_numpy(seen)


def visible(rows: Sequence[PassRow], width: int, length: int) -> Tensor:
    """bool ``[B, width, length]``: which cache entries each token of each row may see.

    Rows with fewer than ``width`` tokens are padded with copies of their last token.
    """
    starts = torch.tensor([row.start for row in rows])[:, None, None]
    last = torch.tensor([len(row.tokens) - 1 for row in rows])[:, None]
    offsets = torch.arange(width)[None].minimum(last)[..., None]
    mask = torch.arange(length)[None, None] <= starts + offsets
    for index, row in enumerate(rows):
        if row.parents is not None:
            size = len(row.tokens)
            mask[index, :size, row.start : row.start + size] = ancestors(row.parents)
            mask[index, size:] = mask[index, size - 1]
    return mask


@dataclass(frozen=True)
class Group:
    """Rows in consecutive slots that attend together.

    Attributes:
        rows: The rows, by ascending slot.
        packed: First packed token of each row.
        width: Most tokens of a row.
        length: Most cache entries that a row reads.
    """

    rows: tuple[PassRow, ...]
    packed: tuple[int, ...]
    width: int
    length: int

    @property
    def slot(self) -> int:
        """First slot; the others follow."""
        return self.rows[0].slot

    @property
    def is_plain(self) -> bool:
        """Whether every token sees the whole of ``length``, so that no mask is needed."""
        return self.width == 1 and all(row.start + 1 == self.length for row in self.rows)

    @cached_property
    def is_dense(self) -> bool:
        """Whether the packed tokens are one block of ``B * width``, so that nothing is gathered."""
        return all(len(row.tokens) == self.width for row in self.rows) and all(
            at == self.packed[0] + index * self.width for index, at in enumerate(self.packed)
        )

    @cached_property
    def gather(self) -> Tensor:
        """int64 ``[B * width]``: packed token of each padded place."""
        return torch.tensor(
            [
                at + min(offset, len(row.tokens) - 1)
                for row, at in zip(self.rows, self.packed, strict=True)
                for offset in range(self.width)
            ]
        )

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """int64 pair: packed tokens of the group, and the padded place of each."""
        pairs = [
            (at + offset, index * self.width + offset)
            for index, (row, at) in enumerate(zip(self.rows, self.packed, strict=True))
            for offset in range(len(row.tokens))
        ]
        packed, padded = zip(*pairs, strict=True)
        return torch.tensor(packed), torch.tensor(padded)

    def mask(self) -> Tensor:
        """bool ``[B, width, length]``, see :func:`visible`."""
        return visible(self.rows, self.width, self.length)

    def distances(self) -> Tensor:
        """int64 ``[B, width, length]``: how many positions each token lies behind each entry it reads.

        A tree's entries lie by depth, not by place, so that a window covers what it would on a chain.
        """
        entries = torch.arange(self.length).repeat(len(self.rows), 1)
        queries = torch.zeros(len(self.rows), self.width, dtype=torch.long)
        for index, row in enumerate(self.rows):
            found = torch.tensor(depths(row)) + row.start
            entries[index, row.start : row.start + len(found)] = found
            queries[index] = found[-1]
            queries[index, : len(found)] = found
        return queries[..., None] - entries[:, None]


class PassLayout:
    """The packed form of a pass: all rows' tokens one after the other, in the order given.

    Attributes:
        tokens: int64 ``[N]``.
        positions: int64 ``[N]``.
        slots: int64 ``[N]``, the cache row that each token is written to.
        places: int64 ``[N]``, the place in that row.
        logit_tokens: Packed tokens whose logits are wanted; ``None`` means all.
        offsets: First logit row of each pass row.
        span: Slot, begin and end of the tokens' places where the pass has one row; else empty.
    """

    def __init__(self, cache: SlotCache, rows: Sequence[PassRow], device: torch.device) -> None:
        check_rows(rows)
        self.rows = list(rows)
        self.starts: list[int] = []
        self.offsets: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        for row in rows:
            count = len(row.tokens)
            cache.reserve(row.slot, row.start, count)
            self.starts.append(len(tokens))
            self.offsets.append(len(wanted))
            wanted.extend(range(len(tokens) + row.logits_from, len(tokens) + count))
            tokens.extend(row.tokens)
            positions.extend(row.start + depth for depth in depths(row))
            slots.extend([row.slot] * count)
            places.extend(range(row.start, row.start + count))
        self.count = len(tokens)
        self.span = [slots[0], places[0], places[-1] + 1] if len(rows) == 1 else []
        self.logit_count = len(wanted)
        table = torch.tensor([tokens, positions, slots, places]).to(device)
        self.tokens, self.positions, self.slots, self.places = table.unbind()
        self.logit_tokens = (
            None if len(wanted) == len(tokens) else torch.tensor(wanted, dtype=torch.long, device=device)
        )

    def groups(self) -> list[Group]:
        """Rows grouped for attention: long rows alone, the others by runs of consecutive slots.

        A run ends where padding its rows to the longest would read far more than they hold.
        """
        pairs = sorted(zip(self.rows, self.starts, strict=True), key=lambda pair: pair[0].slot)
        found: list[Group] = []
        run: list[tuple[PassRow, int]] = []
        longest = 0
        for row, at in pairs:
            end = row.start + len(row.tokens)
            together = (len(run) + 1) * max(longest, end)
            if run and (
                row.slot != run[-1][0].slot + 1
                or len(row.tokens) > LONG_ROW
                or len(run[-1][0].tokens) > LONG_ROW
                or together > len(run) * longest + end + WASTE
            ):
                found.append(_group(run))
                run, longest = [], 0
            run.append((row, at))
            longest = max(longest, end)
        if run:
            found.append(_group(run))
        return found


def _group(run: Sequence[tuple[PassRow, int]]) -> Group:
    return Group(
        rows=tuple(row for row, _ in run),
        packed=tuple(at for _, at in run),
        width=max(len(row.tokens) for row, _ in run),
        length=max(row.start + len(row.tokens) for row, _ in run),
    )
