"""Errors as the OpenAI API shapes them, made from exceptions in exactly one place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from drafts.errors import InvalidValueError, PolydraftError
from router.app.json_response import Json
from router.bodies.allowed import allowed_at

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


def error_body(error: Exception, model: type[BaseModel] | None = None) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI-shaped body for any exception.

    Unexpected ones say nothing of their inside; the log has it. ``model`` is what the request's body had to
    be; with it, a refused value is answered with all that its field takes.
    """
    field: str | None = None
    if isinstance(error, PolydraftError):
        status, code, message = error.status, error.code, str(error)
        field = getattr(error, "field", None)
    elif isinstance(error, RequestValidationError):
        status, code = 400, "invalid_request"
        field, message = _first_problem(error, model)
    elif isinstance(error, HTTPException):
        status, code, message = error.status_code, "http_error", str(error.detail)
    else:
        status, code, message = 500, "internal_error", "the server failed; its log has the reason"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _first_problem(error: RequestValidationError, model: type[BaseModel] | None) -> tuple[str | None, str]:
    problem = error.errors()[0]
    if problem["type"] == "json_invalid":
        return None, f"the body is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
    place = [part for part in problem["loc"] if part != "body"]
    missing = problem["type"] == "missing"
    path = place if missing else _within(error.body, place)
    if not path:
        return None, str(
            InvalidValueError("body", problem["input"], "a JSON object, sent as application/json")
        )
    field = ".".join(str(part) for part in path)
    allowed = (model and allowed_at(model, path)) or problem["msg"]
    if missing:
        return field, f"{field}: missing; {allowed}"
    return field, str(InvalidValueError(field, _value(error.body, path), allowed))


def _within(body: Any, place: Sequence[str | int]) -> list[str | int]:
    """The part of a problem's place that leads through the body; behind it pydantic names union members."""
    path: list[str | int] = []
    for part in place:
        known = part in body if isinstance(body, Mapping) else False
        if not known and not (isinstance(body, list) and isinstance(part, int)):
            break
        body = body[part]
        path.append(part)
    return path


def _value(body: Any, path: Sequence[str | int]) -> object:
    for part in path:
        body = body[part]
    return body


def _body_model(request: Request) -> type[BaseModel] | None:
    """The model of the endpoint's ``body``, where it takes one."""
    endpoint = request.scope.get("endpoint")
    model = get_type_hints(endpoint).get("body") if endpoint is not None else None
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def install(app: FastAPI, on_error: Callable[[str], None] = lambda code: None) -> None:
    """Answer every exception of ``app`` by one handler; ``on_error`` is told the code of each."""

    async def handle_error(request: Request, error: Exception) -> Json:
        model = _body_model(request) if isinstance(error, RequestValidationError) else None
        status, body = error_body(error, model)
        on_error(str(body["error"]["code"]))
        if status >= 500 and not isinstance(error, PolydraftError):
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Json(body, status_code=status, headers={"Retry-After": "1"} if status == 503 else None)

    for kind in (PolydraftError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle_error)
