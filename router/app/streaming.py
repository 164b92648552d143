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
from osd.types import FinishReason
from router.app.json_response import dumps
from router.app.openai_answer import AnswerShape
from router.app.problems import NotReadyError, error_body
from router.bodies.api import Completion, Delta, Handle


async def pieces(handle: Handle) -> AsyncIterator[Delta]:
    """The pieces of an answer without blocking the event loop.

    A thread waits on the handle and hands every piece to the loop in order; an error of the request
    is raised here, and so is a cancellation that the client did not ask for.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    def put(item: Delta | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def pump() -> None:
        try:
            for delta in handle.stream():
                put(delta)
        except Exception as error:
            put(error)
        else:
            put(None)

    threading.Thread(target=pump, name=f"stream-{handle.request_id}", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        if item.completion is not None and item.completion.finish_reason == FinishReason.CANCELLED:
            raise NotReadyError("the request was cancelled: the server is shutting down")
        yield item


async def finished(handle: Handle) -> Completion:
    """The whole answer, waited for without blocking the event loop."""
    completion: Completion | None = None
    async for piece in pieces(handle):
        completion = piece.completion or completion
    if completion is None:
        raise PolydraftError(f"request {handle.request_id} ended without an answer")
    return completion


async def finished_or_left(request: Request, handle: Handle) -> Completion | None:
    """The answer, or ``None`` when the client hung up first; the request is cancelled then."""
    answer = asyncio.ensure_future(finished(handle))
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        handle.cancel()
        leaving.cancel()
        answer.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class TokenStream(EventSourceResponse):
    """Server-sent events of one answer; however the response ends, the request ends with it.

    Cancelling in the generator alone is not enough: a client that leaves before the first byte ends
    the response before the generator has begun, and the request would run on unseen.

    Args:
        handle: The request.
        shape: Builds the pieces.
        on_done: Told of the completed answer.
        on_error: Told the code of an error that ended it.
        drain: Seconds it may go on after the server was told to stop.
        headers: Response headers.
    """

    def __init__(
        self,
        handle: Handle,
        shape: AnswerShape,
        *,
        on_done: Callable[[Completion], None],
        on_error: Callable[[str], None],
        drain: float,
        headers: dict[str, str],
    ) -> None:
        self._handle = handle
        super().__init__(
            _events(handle, shape, on_done, on_error),
            headers=headers,
            sep="\n",
            shutdown_grace_period=drain,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and cancel the request if it is still running afterwards."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._handle.cancel()


async def _events(
    handle: Handle,
    shape: AnswerShape,
    on_done: Callable[[Completion], None],
    on_error: Callable[[str], None],
) -> AsyncIterator[dict[str, str]]:
    first = shape.first()
    if first is not None:
        yield _event(first)
    try:
        async for piece in pieces(handle):
            if piece.text:
                yield _event(shape.piece(piece.text))
            if piece.completion is not None:
                on_done(piece.completion)
                yield _event(shape.last(piece.completion))
                if shape.include_usage:
                    yield _event(shape.counts(piece.completion))
    except Exception as error:
        body = error_body(error)[1]
        on_error(str(body["error"]["code"]))
        yield _event(body)
    yield {"data": "[DONE]"}


def _event(content: dict[str, object]) -> dict[str, str]:
    return {"data": dumps(content).decode()}
