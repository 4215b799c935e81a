"""What operators and orchestrators ask: alive, ready, metrics, starts, models, version; and the page."""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtime.server.errors import ApiError
from runtime.server.jobs import QUEUED, Job
from runtime.server.metrics import CONTENT_TYPE
from runtime.server.service import VERSION, Service
from runtime.server.starts import to_svg
from runtime.server.supervisor import FAILED, READY

PAGE = Path(__file__).with_name("page") / "index.html"
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


def _worker_state(service: Service) -> dict[str, Any]:
    worker = service.engine.worker
    return {
        "phase": "draining" if service.engine.is_draining else worker.phase,
        "loaded_bytes": worker.loaded_bytes,
        "total_bytes": worker.total_bytes,
    }


async def livez(request: Request) -> Response:
    """200 from the first moment to the last: the process runs."""
    return JSONResponse({"status": "ok"})


async def health(request: Request) -> Response:
    """200 while requests are accepted, loading included; 503 if the worker cannot run or the service drains."""
    service: Service = request.app.state.service
    is_well = service.engine.worker.phase != FAILED and not service.engine.is_draining
    return JSONResponse(
        {"status": "ok" if is_well else "unavailable", **_worker_state(service)}, 200 if is_well else 503
    )


async def ready(request: Request) -> Response:
    """200 only when the prepared plan can run without waiting for weights."""
    service: Service = request.app.state.service
    is_ready = service.engine.worker.phase == READY and not service.engine.is_draining
    body = {"status": "ready" if is_ready else "not ready", **_worker_state(service)}
    return JSONResponse(body, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    service.gauges()
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


async def version(request: Request) -> Response:
    return JSONResponse({"version": VERSION, "python": sys.version.split()[0]})


async def startup(request: Request) -> Response:
    """The last starts: a list as JSON, or one of them (`?id=`) as Perfetto trace or picture (`?format=`)."""
    service: Service = request.app.state.service
    form = request.query_params.get("format", "json")
    if form not in ("json", "trace", "svg"):
        raise ApiError("unknown format", where="format", code="invalid_value", expected="json, trace, svg")
    if form == "json":
        return JSONResponse({"object": "list", "data": service.starts.all()})
    start = service.starts.find(request.query_params.get("id"))
    if start is None:
        raise ApiError("no such start", status=404, code="start_not_found")
    if form == "trace":
        headers = {"Content-Disposition": f'attachment; filename="{start["id"]}.json"'}
        return JSONResponse(start["trace"], headers=headers)
    return Response(await asyncio.to_thread(to_svg, start), media_type="image/svg+xml")


async def status(request: Request) -> Response:
    """Worker and queue, as the page shows them. Of other keys' jobs only the number is told."""
    service: Service = request.app.state.service
    active = service.store.active()
    queued = [job for job in active if job.status == QUEUED]
    own = [_queue_entry(job, queued) for job in active if job.owner == request.scope["owner"]]
    queue = {
        "queued": len(queued),
        "running": len(active) - len(queued),
        "limit": service.config.max_queued,
        "own": own,
    }
    worker = {
        **_worker_state(service),
        "starts": service.engine.worker.starts,
        "headline": service.engine.worker.headline,
    }
    return JSONResponse({"worker": worker, "queue": queue})


def _queue_entry(job: Job, queued: list[Job]) -> dict[str, Any]:
    place = queued.index(job) + 1 if job in queued else 0
    return {"id": job.id, "status": job.status, "phase": job.phase, "progress": job.progress, "place": place}


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [await _model_card(service)]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    await asyncio.to_thread(service.bundle.check_model, request.path_params["model"])
    return JSONResponse(await _model_card(service))


async def _model_card(service: Service) -> dict[str, Any]:
    opened = await asyncio.to_thread(service.bundle.open)
    names = service.bundle.names()
    return {
        "id": names[0],
        "object": "model",
        "created": 0,
        "owned_by": "coldframe",
        "aliases": list(names[1:]),
        "bundle_id": opened.identity,
        **await asyncio.to_thread(service.bundle.offers),
        "state": "ready" if service.engine.worker.phase == READY else "loading",
    }


async def page(request: Request) -> Response:
    """The web page: one file, no outside resources."""
    headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"}
    return Response(_page_bytes(), media_type="text/html", headers=headers)


@functools.cache
def _page_bytes() -> bytes:
    return PAGE.read_bytes()


async def openapi(request: Request) -> Response:
    from runtime.server.schema import document

    return JSONResponse(document(VERSION))
