"""A bound on request bodies, so that one client cannot fill the memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: a body of more than ``most`` bytes is answered with 413 by the error handler."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes that the application reads."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise HTTPException(
                    413, f"the body is larger than {self.most} bytes (server.max_request_bytes)"
                )
            return message

        await self.app(scope, counted, send)
