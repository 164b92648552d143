"""The engine's audit: running rows and the slot cache must tell the same story."""

from __future__ import annotations

from collections.abc import Sequence

from drafts.errors import IntegrityError
from osd.serve.cache import SlotCache
from osd.serve.row import Row


def check_books(cache: SlotCache, rows: Sequence[Row]) -> None:
    """Raise :class:`IntegrityError`, with both sides of the broken equation, unless the books balance."""
    cache.check()
    slots = sorted(row.slot for row in rows)
    if slots != list(range(len(rows))):
        raise IntegrityError(f"slots of running rows are {slots}, expected 0..{len(rows) - 1}")
    for row in rows:
        cached = cache.lengths[row.slot]
        if cached != row.processed:
            raise IntegrityError(f"slot {row.slot}: cache holds {cached}, row has {row.processed}")
        if row.decoding and row.processed != len(row.draft.tokens) - 1:
            raise IntegrityError(
                f"slot {row.slot}: {row.processed} processed, {len(row.draft.tokens)} committed"
            )
