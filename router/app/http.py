"""The HTTP service: an OpenAI-compatible API over an engine that someone else made.

Extensions of the OpenAI API: the request field ``domain`` (or header ``X-Polydraft-Domain``) names the
domain, the answer's ``polydraft`` object says what routing and drafts did, and ``/v1/domains`` and
``/v1/stats`` show and change the domains.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from drafts.errors import InvalidValueError, UnknownNameError
from router.app import problems
from router.app.body_limit import BodyLimit
from router.app.buffer_routes import buffer_routes
from router.app.choices import Choices
from router.app.json_response import Json
from router.app.metrics import Metrics
from router.app.openai_answer import AnswerShape
from router.app.openai_schema import ChatRequest, CompletionFields, DomainRequest, TextRequest
from router.app.problems import NotReadyError, UnknownModelError
from router.app.streaming import TokenStream, finished_or_left
from router.app.version_routes import version_routes
from router.bodies.api import ServingEngine
from router.bodies.chat import normalise_messages
from router.config import ServerConfig

DOMAIN_HEADER = "X-Polydraft-Domain"
ALIAS = "polydraft"
"""A model name that always means the served target."""

NamedDomain = Annotated[str | None, Header(alias=DOMAIN_HEADER)]


def create_app(engine: ServingEngine, settings: ServerConfig | None = None) -> FastAPI:
    """The service over ``engine``; it neither makes nor closes it. ``settings`` gives the limits."""
    settings = settings or ServerConfig()
    app = FastAPI(
        title="polydraft", summary="Speculative decoding with drafts that specialise", redoc_url=None
    )
    service = Service(engine, settings)
    problems.install(app, service.metrics.failed)
    for part in (
        service.probes(),
        service.answers(),
        service.domains(),
        version_routes(engine),
        buffer_routes(engine),
    ):
        app.include_router(part)
    limits = {"most": settings.max_request_bytes, "most_import": settings.max_import_bytes}
    app.add_middleware(BodyLimit, **limits)
    return app


class Service:
    """The endpoints. Use :func:`create_app`."""

    def __init__(self, engine: ServingEngine, settings: ServerConfig) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics(engine)

    def probes(self) -> APIRouter:
        """Liveness, readiness, metrics and the model list."""
        api = APIRouter()

        @api.get("/health")
        async def health() -> Json:
            return Json({"status": "alive"})

        @api.get("/ready")
        async def ready() -> Json:
            if not self.engine.ready:
                return Json({"status": "loading", "model": self.engine.model_name}, status_code=503)
            return Json({"status": "ready", "model": self.engine.model_name})

        @api.get("/metrics")
        async def metrics() -> Response:
            return Response(await run_in_threadpool(self.metrics.page), media_type=CONTENT_TYPE_LATEST)

        @api.get("/v1/models")
        async def models() -> Json:
            card = {"id": self.engine.model_name, "object": "model", "created": 0, "owned_by": "polydraft"}
            return Json({"object": "list", "data": [card]})

        return api

    def answers(self) -> APIRouter:
        """Chat and text completions."""
        api = APIRouter()

        @api.post("/v1/chat/completions")
        async def chat(body: ChatRequest, request: Request, domain: NamedDomain = None) -> Response:
            messages = normalise_messages(body.messages)
            return await self._answer(request, body, "chatcmpl", domain, [{"messages": messages}])

        @api.post("/v1/completions")
        async def text(body: TextRequest, request: Request, domain: NamedDomain = None) -> Response:
            prompts = [{"prompt": prompt, "template": False} for prompt in body.prompts()]
            return await self._answer(request, body, "cmpl", domain, prompts)

        return api

    async def _answer(
        self,
        request: Request,
        body: CompletionFields,
        prefix: str,
        header: str | None,
        prompts: list[dict[str, Any]],
    ) -> Response:
        body.refuse_unsupported()
        options = {"store": body.store is not False, **body.sampling()}
        if not self.engine.ready:
            raise NotReadyError("the engine is not ready; ask /ready")
        if body.model not in (None, ALIAS, self.engine.model_name):
            raise UnknownModelError(str(body.model), self.engine.model_name)
        domain = _named_domain(body.domain, header)
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        shape = AnswerShape(
            request_id, self.engine.model_name, prefix == "chatcmpl", self.engine, body.include_usage
        )

        def submit() -> Choices:
            return Choices.submit(self.engine, prompts, body.choices, request_id, domain=domain, **options)

        choices = await run_in_threadpool(submit)
        if body.stream:
            headers = {DOMAIN_HEADER: domain} if domain else {}
            return CountedStream(
                choices,
                shape,
                on_done=self.metrics.take,
                on_error=self.metrics.failed,
                drain=self.settings.drain_seconds,
                headers=headers,
                metrics=self.metrics,
            )
        with self._in_flight():
            answers = await finished_or_left(request, choices)
        if answers is None:
            return Response(status_code=499)
        self.metrics.take(answers)
        return Json(shape.whole(answers), headers={DOMAIN_HEADER: answers.completions[0].domain})

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        with self.metrics.in_flight.track_inprogress():
            yield

    def domains(self) -> APIRouter:
        """Domains and statistics."""
        api = APIRouter()

        @api.get("/v1/stats")
        async def stats() -> Json:
            return Json(await run_in_threadpool(self.engine.stats))

        @api.get("/v1/domains")
        async def listed() -> Json:
            return Json({"object": "list", "data": await run_in_threadpool(self._domain_rows)})

        @api.post("/v1/domains")
        async def add(body: DomainRequest) -> Json:
            await run_in_threadpool(
                self.engine.add_domain,
                body.name,
                description=body.description,
                examples=body.examples,
                draft=body.draft,
            )
            return Json(await run_in_threadpool(self._domain_row, body.name), status_code=201)

        @api.delete("/v1/domains/{name}")
        async def remove(name: str) -> Json:
            await run_in_threadpool(self.engine.remove_domain, name)
            return Json({"name": name, "object": "domain", "deleted": True})

        return api

    def _domain_rows(self) -> list[dict[str, Any]]:
        """Registered domains with their statistics."""
        counters = self.engine.stats().get("domains", {})
        return [{"object": "domain", **counters.get(row["name"], {}), **row} for row in self.engine.domains()]

    def _domain_row(self, name: str) -> dict[str, Any]:
        rows = self._domain_rows()
        for row in rows:
            if row["name"] == name:
                return row
        raise UnknownNameError("domain", name, [str(row["name"]) for row in rows])


class CountedStream(TokenStream):
    """A stream that counts as a request in flight as long as it runs."""

    def __init__(self, *arguments: Any, metrics: Metrics, **options: Any) -> None:
        self._metrics = metrics
        super().__init__(*arguments, **options)

    async def __call__(self, *asgi: Any) -> None:
        """Send the events."""
        with self._metrics.in_flight.track_inprogress():
            await super().__call__(*asgi)


def _named_domain(field: str | None, header: str | None) -> str | None:
    """The domain that the client named, in the body or by header."""
    if field is not None and header is not None and field != header:
        raise InvalidValueError(
            "domain", field, f"the same as the {DOMAIN_HEADER} header ({header!r}), or only one"
        )
    return field if field is not None else header
