"""The intake: a bounded, thread-safe queue of submissions and cancellations for the engine's thread."""

from __future__ import annotations

import threading
from collections import deque

from drafts.errors import BusyError
from osd.serve.row import Submission


class Intake:
    """Where other threads hand requests to the engine.

    Args:
        capacity: Most submissions that may wait; one more raises :class:`BusyError`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: deque[Submission] = deque()
        self._cancelled: set[str] = set()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def put(self, submission: Submission) -> None:
        """Queue a submission. Raises :class:`BusyError` when full or shutting down."""
        with self._changed:
            if self._closed:
                raise BusyError("the engine is shutting down and takes no new requests")
            if len(self._waiting) >= self._capacity:
                raise BusyError(
                    f"the queue is full ({self._capacity} requests wait); retry later or raise engine.queue"
                )
            self._waiting.append(submission)
            self._changed.notify_all()

    def take(self) -> Submission | None:
        """The oldest waiting submission, ``None`` when nothing waits."""
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def cancel(self, request_id: str) -> None:
        """Ask for a request to be stopped at the next step border."""
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def take_cancelled(self) -> tuple[set[str], list[Submission]]:
        """Ids to cancel among the running, and the submissions cancelled while they waited."""
        with self._changed:
            if not self._cancelled:
                return set(), []
            ids, self._cancelled = self._cancelled, set()
            gone = [item for item in self._waiting if item.request.request_id in ids]
            self._waiting = deque(item for item in self._waiting if item.request.request_id not in ids)
            return ids, gone

    def wake(self) -> None:
        """Wake the engine without adding work."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Sleep until something changes, at most ``timeout`` seconds."""
        with self._changed:
            if not self._waiting and not self._cancelled and not self._closed:
                self._changed.wait(timeout)

    def close(self) -> None:
        """Refuse new submissions from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
