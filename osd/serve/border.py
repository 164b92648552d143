"""The border between two steps: work from other threads, new draft versions, learning, all of it held.

What fails here belongs to no request, so it is logged and no request ends by it.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from drafts.errors import PolydraftError, as_typed
from drafts.kinds.base import DraftRow
from drafts.proposal import Proposal
from osd.ports import Drafter, Worker
from osd.serve.row import Row
from osd.serve.verify import Verdict
from osd.types import BASE_DOMAIN, Event

log = logging.getLogger(__name__)


class Calls:
    """Work that other threads want done on the engine's thread, between two steps."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()

    def put(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue ``work``; its result or error comes through the future. Safe from any thread."""
        future: Future[Any] = Future()
        self._waiting.put((work, future))
        return future

    def run(self) -> None:
        """Do all that waits."""
        while not self._waiting.empty():
            work, future = self._waiting.get()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)


def adopt_versions(drafter: Drafter | None, rows: Sequence[Row], on_event: Callable[[Event], None]) -> None:
    """Take over newly published draft versions, and note them in the rows that they serve."""
    if drafter is None:
        return
    try:
        swaps = drafter.swap()
    except Exception:
        log.exception("adopting new draft versions failed; the present ones go on serving")
        return
    for swap in swaps:
        numbers = {**swap.numbers, "old": swap.old, "new": swap.new}
        on_event(Event("swap", swap.domain, swap.reason, numbers))
        for row in rows:
            if row.draft.domain == swap.domain and row.decoding:
                row.note_version(drafter.version(swap.domain))


def feed_back(
    drafter: Drafter | None,
    decoding: Sequence[Row],
    proposals: Sequence[Proposal],
    verdicts: Mapping[int, Verdict],
) -> None:
    """Feed back only the tokens that were kept, for every row that decoded in this step."""
    if drafter is None or not decoding:
        return
    rows: list[DraftRow] = []
    emitted: list[Sequence[int]] = []
    for index, row in enumerate(decoding):
        rows.append(row.draft)
        count = row.rounds[-1].emitted if index in verdicts and row.error is None else 0
        emitted.append(row.draft.tokens[len(row.draft.tokens) - count :] if count else ())
    guarded("learning from a step", lambda: drafter.observe(rows, proposals, emitted))


def work_in_gap(
    worker: Worker | None, busy: float, idle: bool, on_event: Callable[[Event], None]
) -> tuple[Worker | None, bool]:
    """One slice of background work, and the worker to go on with.

    Work that raises is stopped, so that it does not fail again at every step; serving goes on.
    """
    if worker is None:
        return None, False
    try:
        return worker, worker.work(busy, idle=idle)
    except Exception as error:
        log.exception("background work failed and is stopped; serving goes on")
        on_event(Event("work_stopped", BASE_DOMAIN, f"background work failed: {error!r}"))
        return None, False


def guarded(what: str, work: Callable[[], None]) -> PolydraftError | None:
    """Do ``work``; what it raises is logged and comes back as a typed error."""
    try:
        work()
    except Exception as error:
        log.exception("%s failed", what)
        return as_typed(error, f"{what} failed")
    return None
