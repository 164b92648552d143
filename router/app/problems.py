"""Errors as the OpenAI API shapes them, made from exceptions in exactly one place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from drafts.errors import PolydraftError
from router.app.json_response import Json

log = logging.getLogger(__name__)


class NotReadyError(PolydraftError):
    """The engine is still loading, or shutting down."""

    status = 503
    code = "not_ready"


class UnknownModelError(PolydraftError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"

    def __init__(self, name: str, served: str) -> None:
        self.field = "model"
        super().__init__(f"model: got {name!r}; this server serves {served!r}")


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI-shaped body for any exception.

    Unexpected ones say nothing of their inside; the log has it.
    """
    field: str | None = None
    if isinstance(error, PolydraftError):
        status, code, message = error.status, error.code, str(error)
        field = getattr(error, "field", None)
    elif isinstance(error, RequestValidationError):
        status, code = 400, "invalid_request"
        field, message = _first_problem(error)
    elif isinstance(error, HTTPException):
        status, code, message = error.status_code, "http_error", str(error.detail)
    else:
        status, code, message = 500, "internal_error", "the server failed; its log has the reason"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _first_problem(error: RequestValidationError) -> tuple[str | None, str]:
    problem = error.errors()[0]
    place = [part for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        return None, f"the body is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
    field = ".".join(str(part) for part in place) or None
    return field, f"{field or 'body'}: {problem['msg']}"


def install(app: FastAPI, on_error: Callable[[str], None] = lambda code: None) -> None:
    """Answer every exception of ``app`` by one handler; ``on_error`` is told the code of each."""

    async def handle_error(request: Request, error: Exception) -> Json:
        status, body = error_body(error)
        on_error(str(body["error"]["code"]))
        if status >= 500 and not isinstance(error, PolydraftError):
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Json(body, status_code=status, headers={"Retry-After": "1"} if status == 503 else None)

    for kind in (PolydraftError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle_error)
