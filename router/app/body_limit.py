"""A bound on request bodies, so that one client cannot fill the memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.app.version_routes import IMPORT_SUFFIX


class BodyLimit:
    """ASGI middleware: a body of more than ``most`` bytes is answered with 413 by the error handler.

    Files of versions are larger than any request; paths that end in ``/import`` have a limit of their own.
    """

    def __init__(self, app: ASGIApp, most: int, most_import: int) -> None:
        self.app = app
        self.most = most
        self.most_import = most_import

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes that the application reads."""
        seen = 0
        imports = scope["type"] == "http" and scope["path"].endswith(IMPORT_SUFFIX)
        most = self.most_import if imports else self.most
        setting = "max_import_bytes" if imports else "max_request_bytes"

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise HTTPException(413, f"the body is larger than {most} bytes (server.{setting})")
            return message

        await self.app(scope, counted, send)
