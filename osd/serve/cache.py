"""The slot cache: preallocated keys and values, one row per running request, rows kept compact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from drafts.errors import BusyError, IntegrityError, InvalidValueError
from drafts.transfer import sent
from osd.serve.moves import mover


class SlotCache:
    """Keys, values and features of the running requests, in rows ``0 .. active - 1``.

    Active rows stay compact, so that a layer's cache of the whole batch is a view and never a copy,
    and a row's end is a length, so that a rejected chain costs nothing to forget.

    Everything from ``lengths[row]`` on is scratch: a target pass writes its new keys there and only
    a commit makes them part of the text.

    Args:
        layers: Decoder layers.
        slots: Rows.
        kv_heads: Key-value heads per layer (one number, or one a layer).
        max_length: Tokens per row, the scratch of the last verification included.
        head_dim: Width of a head (one number, or one a layer).
        feature_width: Width of the kept hidden states, 0 to keep none.
        dtype: Of keys, values and features.
        device: Where they live.
        spare: Places behind each row that no text reaches, for the padding of static passes.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int | Sequence[int],
        max_length: int,
        head_dim: int | Sequence[int],
        feature_width: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        spare: int = 0,
    ) -> None:
        for field, value in (("slots", slots), ("max_length", max_length)):
            if value < 1:
                raise InvalidValueError(field, value, "at least 1")
        heads = [kv_heads] * layers if isinstance(kv_heads, int) else list(kv_heads)
        widths = [head_dim] * layers if isinstance(head_dim, int) else list(head_dim)
        self.slots = slots
        self.max_length = max_length
        self.spare = spare
        places = max_length + spare
        # Zeros, not empty: masked positions are read with weight 0, and 0 * NaN would be NaN.
        self.pairs: list[Tensor] = [
            torch.zeros(2, slots, h, places, d, dtype=dtype, device=device)
            for h, d in zip(heads, widths, strict=True)
        ]
        """Per layer ``[2, slots, kv_heads, max_length + spare, head_dim]``: keys, then values."""
        self._move = mover(self.pairs)
        self.keys = [pair[0] for pair in self.pairs]
        self.values = [pair[1] for pair in self.pairs]
        self.features: Tensor | None = None
        """``[slots, max_length + spare, feature_width]`` or ``None``."""
        if feature_width:
            self.features = torch.zeros(slots, places, feature_width, dtype=dtype, device=device)
        self.lengths: list[int] = []
        """Committed tokens of each active row."""
        self._written: list[int] = [0] * slots

    @property
    def active(self) -> int:
        """Number of active rows."""
        return len(self.lengths)

    @property
    def free(self) -> int:
        """Number of rows that :meth:`acquire` can still hand out."""
        return self.slots - len(self.lengths)

    def acquire(self) -> int:
        """Open a row at the end of the active ones and return its index.

        Raises:
            BusyError: All rows are taken.
        """
        if not self.free:
            raise BusyError(f"all {self.slots} cache slots are in use; retry when a request has ended")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def release(self, row: int) -> int | None:
        """Close ``row``; the last active row moves into the hole.

        Returns:
            The old index of the moved row, whose new index is ``row``; ``None`` if none had to move.
        """
        self._check_row(row)
        self._scrub(row)
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for pair in self.pairs:
                pair[:, row, :, :length] = pair[:, last, :, :length]
            if self.features is not None:
                self.features[row, :length] = self.features[last, :length]
            self._scrub(last)
            self.lengths[row] = self._written[row] = length
        self.lengths.pop()
        self._written[last] = 0
        return last if row != last else None

    def reserve(self, row: int, start: int, count: int) -> None:
        """Announce a write of ``count`` tokens at ``start``, which a target pass is about to make.

        Raises:
            IntegrityError: The row is not active, ``start`` is not its committed length, or the
                tokens do not fit.
        """
        self._check_row(row)
        if start != self.lengths[row]:
            raise IntegrityError(
                f"row {row}: pass starts at {start}, committed length is {self.lengths[row]}"
            )
        if start + count > self.max_length:
            raise IntegrityError(f"row {row}: {start} + {count} tokens exceed the row's {self.max_length}")
        self._written[row] = max(self._written[row], start + count)

    def commit(self, row: int, length: int) -> None:
        """Make the first ``length`` tokens of ``row`` the committed ones (a chain: a length moves)."""
        self._check_row(row)
        if not 0 <= length <= self._written[row]:
            raise IntegrityError(f"row {row}: commit to {length}, written so far {self._written[row]}")
        self.lengths[row] = length

    def commit_path(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Keep one path of a verified tree.

        Args:
            row: The row.
            start: ``start`` of the pass that verified the tree.
            kept: Offsets into that pass's ``tokens`` in path order, the root (0) first.
        """
        self._check_row(row)
        if any(b <= a for a, b in itertools.pairwise(kept)) or (kept and kept[0] < 0):
            raise IntegrityError(f"row {row}: kept offsets {list(kept)} do not ascend")
        if kept and start + kept[-1] >= self._written[row]:
            raise IntegrityError(f"row {row}: kept offset {kept[-1]} was never written")
        stays = 0
        while stays < len(kept) and kept[stays] == stays:
            stays += 1
        if stays < len(kept):
            places = [start + offset for offset in kept[stays:]]
            begin, end = start + stays, start + len(kept)
            if self._move is not None:
                self._move(row, places, begin)
            else:
                source = sent(torch.tensor(places), self.pairs[0].device)
                for pair in self.pairs:
                    pair[:, row, :, begin:end] = pair[:, row].index_select(2, source)
            if self.features is not None:
                self.features[row, begin:end] = self.features[
                    row, sent(torch.tensor(places), self.features.device)
                ]
        self.commit(row, start + len(kept))

    def check(self) -> None:
        """Audit the books.

        Raises:
            IntegrityError: With both sides of the broken equation.
        """
        if self.active + self.free != self.slots or self.free < 0:
            raise IntegrityError(f"{self.active} active + {self.free} free rows, {self.slots} slots")
        for row, length in enumerate(self.lengths):
            if not 0 <= length <= self._written[row] <= self.max_length:
                raise IntegrityError(
                    f"row {row}: length {length}, written {self._written[row]}, room {self.max_length}"
                )

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.lengths):
            raise IntegrityError(f"row {row} is not active; {len(self.lengths)} rows are")

    def _scrub(self, row: int) -> None:
        """Clear a row that a broken request filled with NaN, which no mask would hold back.

        A NaN in any layer's keys or values reaches the last layer's at the same position.
        """
        end = self._written[row]
        if end and not bool(torch.isfinite(self.pairs[-1][:, row, :, :end].sum())):
            for pair in self.pairs:
                pair[:, row, :, :end].zero_()
            if self.features is not None:
                self.features[row, :end].zero_()
