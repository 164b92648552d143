"""Runs the HTTP service in this process: answers at once, becomes ready when the engine is warm."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from drafts.errors import InvalidValueError
from router.app.deferred import DeferredEngine
from router.app.http import create_app
from router.bodies.api import ServingEngine
from router.config import ServerConfig

log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that a taken port is told before minutes of loading.

    Raises:
        InvalidValueError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidValueError(
            "--host/--port", f"{host}:{port}", f"an address free to listen on ({reason})"
        ) from None
    return listener


def run(
    load: Callable[[], ServingEngine],
    settings: ServerConfig,
    *,
    model_name: str = "",
    log_level: str = "info",
) -> None:
    """Serve until SIGTERM or SIGINT; running streams finish, then the engine saves and stops.

    A second signal leaves at once.

    Args:
        load: Makes the engine, while the service answers already.
        settings: Address and limits.
        model_name: Name to show until the engine is there.
        log_level: Level of the access and error log.

    Raises:
        BaseException: whatever made loading fail.
    """
    listener = listen(settings.host, settings.port)
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    handlers = {number: signal.signal(number, _leave_on_second) for number in (signal.SIGTERM, signal.SIGINT)}
    engine = DeferredEngine(load, model_name=model_name, on_failure=failed)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, settings),
            log_level=log_level,
            timeout_graceful_shutdown=int(settings.drain_seconds) + 5,
            lifespan="off",
        )
    )
    engine.start()
    try:
        server.run(sockets=[listener])
    finally:
        engine.close()
        listener.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if failures:
        raise failures[0]


_signals = 0


def _leave_on_second(number: int, frame: FrameType | None) -> None:
    """The server raises the signal that stopped it once more when it has drained; that one is expected."""
    global _signals
    _signals += 1
    if _signals > 1:
        os._exit(128 + number)
