"""The intake: a bounded, thread-safe queue of submissions and cancellations for the engine's thread."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

from drafts.errors import BusyError
from osd.serve.row import Submission
from osd.types import GenerationRequest


class Intake:
    """Where other threads hand requests to the engine.

    Args:
        capacity: Most submissions that may wait; one more raises :class:`BusyError`.
        check: Raises for a request that can never run, on the thread of whoever submits it.
        timeout: Seconds after which a request without a limit of its own ends; ``None`` lets it run.
    """

    def __init__(
        self,
        capacity: int,
        check: Callable[[GenerationRequest], None] = lambda request: None,
        timeout: float | None = None,
    ) -> None:
        self._capacity = capacity
        self._check = check
        self._timeout = timeout
        self._waiting: deque[Submission] = deque()
        self._cancelled: set[str] = set()
        self._first_deadline = math.inf
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def put(self, submission: Submission) -> None:
        """Queue a submission.

        Raises:
            BusyError: The queue is full, or the engine is shutting down.
            InvalidValueError: It could never run; see :meth:`osd.serve.admission.Admission.check`.
        """
        request = submission.request
        self._check(request)
        timeout = request.sampling.timeout
        if timeout is None:
            timeout = self._timeout
        if timeout is not None:
            submission.deadline = request.arrived + timeout
        with self._changed:
            if self._closed:
                raise BusyError("the engine is shutting down and takes no new requests")
            if len(self._waiting) >= self._capacity:
                raise BusyError(
                    f"the queue is full ({self._capacity} requests wait); retry later or raise engine.queue"
                )
            self._waiting.append(submission)
            self._first_deadline = min(self._first_deadline, submission.deadline)
            self._changed.notify_all()

    def take(self, fits: Callable[[Submission], bool] = lambda submission: True) -> Submission | None:
        """The oldest waiting submission if it fits; ``None`` when it does not or nothing waits."""
        with self._changed:
            return self._waiting.popleft() if self._waiting and fits(self._waiting[0]) else None

    def cancel(self, request_id: str) -> None:
        """Ask for a request to be stopped at the next step border.

        An id that neither waits nor runs then is forgotten, so a cancellation must follow its submission.
        """
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def take_cancelled(self) -> tuple[set[str], list[Submission]]:
        """Ids to cancel among the running, and the submissions cancelled while they waited."""
        with self._changed:
            if not self._cancelled:
                return set(), []
            ids, self._cancelled = self._cancelled, set()
            return ids, self._withdraw(lambda item: item.request.request_id in ids)

    def take_expired(self, now: float) -> list[Submission]:
        """The submissions whose deadline passed while they waited; ``now`` is ``time.monotonic()``."""
        with self._changed:
            if now < self._first_deadline:
                return []
            gone = self._withdraw(lambda item: item.deadline <= now)
            self._first_deadline = min((item.deadline for item in self._waiting), default=math.inf)
            return gone

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

    def _withdraw(self, leaves: Callable[[Submission], bool]) -> list[Submission]:
        gone = [item for item in self._waiting if leaves(item)]
        if gone:
            self._waiting = deque(item for item in self._waiting if not leaves(item))
        return gone
