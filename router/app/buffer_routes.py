"""``/v1/domains/{name}/buffer``: what is kept of a domain's answers, over HTTP."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from router.app.json_response import Json
from router.app.version_routes import Kind
from router.bodies.api import ServingEngine


def buffer_routes(engine: ServingEngine) -> APIRouter:
    """The endpoints over ``engine``."""
    api = APIRouter(prefix="/v1/domains/{name}/buffer")

    @api.get("")
    async def show(name: str) -> Json:
        return Json(await run_in_threadpool(engine.buffers.show, name))

    @api.get("/export")
    async def export(name: str, kind: Kind = None) -> Response:
        content = await run_in_threadpool(engine.buffers.export, name, kind)
        shown = {"Content-Disposition": f'attachment; filename="{name}.buffer.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=shown)

    @api.delete("")
    async def purge(name: str) -> Json:
        return Json(await run_in_threadpool(engine.buffers.purge, name))

    return api
