"""From the engine's threads to the event loop, and from a client that hangs up back to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from drafts.errors import PolydraftError
from osd.types import FinishReason, TokenLogprob
from router.app.choices import Answers, Choices
from router.app.json_response import dumps
from router.app.openai_answer import AnswerShape
from router.app.problems import NotReadyError, error_body
from router.bodies.api import Completion, Delta, Handle

Item = tuple[int, Delta | Exception | None]


async def pieces(choices: Choices) -> AsyncIterator[tuple[int, Delta]]:
    """The pieces of all choices with their index, as they come, without blocking the event loop.

    A thread a choice waits on its handle and hands every piece to the loop in order. The first error of
    any choice is raised here, and so is a cancellation that the client did not ask for.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Item] = asyncio.Queue()

    def put(item: Item) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def pump(index: int, handle: Handle) -> None:
        try:
            for delta in handle.stream():
                put((index, delta))
        except Exception as error:
            put((index, error))
        else:
            put((index, None))

    for index, handle in enumerate(choices.handles):
        name = f"stream-{handle.request_id}"
        threading.Thread(target=pump, args=(index, handle), name=name, daemon=True).start()
    running = len(choices.handles)
    while running:
        index, item = await queue.get()
        if item is None:
            running -= 1
            continue
        if isinstance(item, Exception):
            raise item
        if item.completion is not None and item.completion.finish_reason == FinishReason.CANCELLED:
            raise NotReadyError("the request was cancelled: the server is shutting down")
        yield index, item


async def finished(choices: Choices) -> Answers:
    """The whole answers, waited for without blocking the event loop."""
    completions: dict[int, Completion] = {}
    async for index, piece in pieces(choices):
        if piece.completion is not None:
            completions[index] = piece.completion
    return answers_of(choices, completions)


def answers_of(choices: Choices, completions: dict[int, Completion]) -> Answers:
    """The completions in the order of the choices. Raises if one is missing."""
    for index, handle in enumerate(choices.handles):
        if index not in completions:
            raise PolydraftError(f"request {handle.request_id} ended without an answer")
    return Answers(tuple(completions[index] for index in sorted(completions)), choices.per_prompt)


async def finished_or_left(request: Request, choices: Choices) -> Answers | None:
    """The answers, or ``None`` when the client hung up first; whatever still runs is cancelled then."""
    answer = asyncio.ensure_future(finished(choices))
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        choices.cancel()
        leaving.cancel()
        answer.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class TokenStream(EventSourceResponse):
    """Server-sent events of one answer; however the response ends, its requests end with it.

    Cancelling in the generator alone is not enough: a client that leaves before the first byte ends
    the response before the generator has begun, and the requests would run on unseen.

    Args:
        choices: The running choices.
        shape: Builds the pieces.
        on_done: Told of the completed answers.
        on_error: Told the code of an error that ended it.
        drain: Seconds it may go on after the server was told to stop.
        headers: Response headers.
    """

    def __init__(
        self,
        choices: Choices,
        shape: AnswerShape,
        *,
        on_done: Callable[[Answers], None],
        on_error: Callable[[str], None],
        drain: float,
        headers: dict[str, str],
    ) -> None:
        self._choices = choices
        super().__init__(
            _events(choices, shape, on_done, on_error),
            headers=headers,
            sep="\n",
            shutdown_grace_period=drain,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and cancel whatever is still running afterwards."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.cancel()


class ChoiceEvents:
    """The events of one choice.

    Tokens that show no text yet (half a character, a prefix of a stop string) wait with their
    log-probabilities for the piece that shows it, or for the last one.

    Args:
        index: Index of the choice.
        shape: Builds the pieces.
    """

    def __init__(self, index: int, shape: AnswerShape) -> None:
        self._index = index
        self._shape = shape
        self._logprobs = shape.logprobs()
        self._waiting: list[TokenLogprob] = []

    def take(self, piece: Delta) -> list[dict[str, object]]:
        """The events of a piece; none while it has nothing to show."""
        self._waiting.extend(piece.logprobs)
        events: list[dict[str, object]] = []
        if piece.text:
            events.append(self._shape.piece(self._index, piece.text, self._listed()))
        if piece.completion is not None:
            events.append(self._shape.last(self._index, piece.completion, self._listed()))
        return events

    def _listed(self) -> dict[str, object] | None:
        entries, self._waiting = self._waiting, []
        return self._logprobs.take(entries)


async def _events(
    choices: Choices,
    shape: AnswerShape,
    on_done: Callable[[Answers], None],
    on_error: Callable[[str], None],
) -> AsyncIterator[dict[str, str]]:
    parts = [ChoiceEvents(index, shape) for index in range(len(choices.handles))]
    completions: dict[int, Completion] = {}
    for index in range(len(parts)):
        first = shape.first(index)
        if first is not None:
            yield _event(first)
    try:
        async for index, piece in pieces(choices):
            if piece.completion is not None:
                completions[index] = piece.completion
                if len(completions) == len(parts):
                    on_done(answers_of(choices, completions))
            for event in parts[index].take(piece):
                yield _event(event)
        if shape.include_usage:
            yield _event(shape.counts(answers_of(choices, completions)))
    except Exception as error:
        choices.cancel()
        body = error_body(error)[1]
        on_error(str(body["error"]["code"]))
        yield _event(body)
    yield {"data": "[DONE]"}


def _event(content: dict[str, object]) -> dict[str, str]:
    return {"data": dumps(content).decode()}
