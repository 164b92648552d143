"""The handle of a submitted request: a bridge from the engine's thread to whoever waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from osd.serve.row import Outcome
from osd.types import TokenLogprob
from router.bodies.api import Completion, Delta


def completion_of(outcome: Outcome) -> Completion:
    """The public result of a finished request."""
    record = outcome.record
    return Completion(
        request_id=record.request.request_id,
        text=outcome.text,
        token_ids=record.output_ids,
        prompt_tokens=len(record.request.prompt_ids),
        finish_reason=record.finish,
        domain=record.domain,
        assignment=record.assignment,
        rounds=record.rounds,
        versions=record.versions,
        seconds=record.seconds,
        total_seconds=record.total_seconds,
        first_token_seconds=record.first_token_seconds,
        routing_wait=record.routing_wait,
        cached_tokens=record.cached_tokens,
        error=None if outcome.error is None else str(outcome.error),
        logprobs=record.logprobs,
    )


class RequestHandle:
    """Implements :class:`router.bodies.api.Handle` over a queue that the engine's thread fills.

    Args:
        request_id: Id of the request.
        cancel: Asks the engine to stop it.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._pieces: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._done = threading.Event()
        self._outcome: Outcome | None = None

    def push(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """Engine side: a piece of the answer."""
        self._pieces.put(Delta(text, token_ids, logprobs=logprobs))

    def finish(self, outcome: Outcome) -> None:
        """Engine side: the request has ended."""
        self._outcome = outcome
        self._pieces.put(Delta("", (), completion_of(outcome)))
        self._done.set()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the answer; raises the error it failed with, ``TimeoutError`` when late."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.request_id} has not finished within {timeout} s")
        assert self._outcome is not None
        if self._outcome.error is not None:
            raise self._outcome.error
        return completion_of(self._outcome)

    def stream(self) -> Iterator[Delta]:
        """Pieces as they come; the last carries the completion. Raises if the request failed."""
        while True:
            piece = self._pieces.get()
            if piece.completion is None:
                yield piece
                continue
            assert self._outcome is not None
            if self._outcome.error is not None:
                raise self._outcome.error
            yield piece
            return

    def cancel(self) -> None:
        """Stop the request at the next step border; harmless when it has finished."""
        if not self._done.is_set():
            self._cancel(self.request_id)
