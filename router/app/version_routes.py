"""``/v1/domains/{name}/…``: the versions of a domain's expert over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from router.app.json_response import Json
from router.bodies.api import ServingEngine
from router.bodies.versions import domain_file

IMPORT_SUFFIX = "/import"

Kind = Annotated[
    str | None,
    Query(max_length=64, description="Kind of draft; the domain's first that has versions if not given."),
]


class RollbackRequest(BaseModel):
    """Body of ``POST /v1/domains/{name}/rollback``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    to: int | None = Field(None, ge=0, description="Version to serve; the parent of the served one if null.")


def version_routes(engine: ServingEngine) -> APIRouter:
    """The endpoints over ``engine``."""
    api = APIRouter(prefix="/v1/domains/{name}")

    @api.get("/versions")
    async def listed(name: str, kind: Kind = None) -> Json:
        return Json({"object": "list", "data": await run_in_threadpool(engine.versions.rows, name, kind)})

    @api.post("/rollback")
    async def rollback(name: str, body: RollbackRequest, kind: Kind = None) -> Json:
        return Json(await run_in_threadpool(engine.versions.rollback, name, body.to, kind))

    @api.get("/export")
    async def export(name: str, kind: Kind = None) -> Response:
        content = await run_in_threadpool(engine.versions.export, name, kind)
        shown = {"Content-Disposition": f'attachment; filename="{domain_file(name)}"'}
        return Response(content, media_type="application/octet-stream", headers=shown)

    @api.post(IMPORT_SUFFIX)
    async def import_file(
        name: str, request: Request, file: Annotated[str, Query(max_length=255)] = "", kind: Kind = None
    ) -> Json:
        content = await request.body()
        return Json(await run_in_threadpool(engine.versions.import_file, name, content, file, kind))

    return api
