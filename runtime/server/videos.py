"""Reading, listing, cancelling and deleting jobs."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtime.server.errors import ApiError
from runtime.server.jobs import Job
from runtime.server.service import Service
from runtime.server.stream import event_stream
from runtime.server.views import server_timing, video_object

DELETE_WAIT_S = 10.0


def _job(request: Request) -> Job:
    service: Service = request.app.state.service
    job = service.store.get(request.path_params["video_id"], request.scope["owner"])
    if job is None:
        raise ApiError("no such video", status=404, code="video_not_found")
    return job


def _object_response(service: Service, job: Job) -> Response:
    headers = {"Server-Timing": server_timing(job)}
    if job.is_active:
        headers["openai-poll-after-ms"] = str(service.config.poll_after_ms)
    return JSONResponse(video_object(job), headers=headers)


async def get_video(request: Request) -> Response:
    """Always 200 for a known id, also for a failed job: clients read `status`."""
    return _object_response(request.app.state.service, _job(request))


async def list_videos(request: Request) -> Response:
    """One page of the key's jobs."""
    service: Service = request.app.state.service
    query = request.query_params
    limit = _limit(query.get("limit", "20"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError("unknown order", where="order", code="invalid_value", expected="asc, desc")
    jobs, has_more = service.store.page(
        request.scope["owner"], query.get("after") or None, limit, order == "desc"
    )
    data = [video_object(job) for job in jobs]
    page: dict[str, Any] = {"object": "list", "data": data, "has_more": has_more}
    page |= {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JSONResponse(page)


async def cancel_video(request: Request) -> Response:
    """Stop a job. A finished one stays as it is."""
    service: Service = request.app.state.service
    job = await service.engine.cancel(_job(request).id)
    if job is None:
        raise ApiError("no such video", status=404, code="video_not_found")
    return _object_response(service, job)


async def delete_video(request: Request) -> Response:
    """Forget a job. An unfinished one is cancelled first; a worker that is slow to stop does not hold the answer."""
    service: Service = request.app.state.service
    job = _job(request)
    if job.is_active:
        waiting = asyncio.create_task(service.feeds.ended(job))
        try:
            await service.engine.cancel(job.id)
            await asyncio.wait([waiting], timeout=DELETE_WAIT_S)
        finally:
            waiting.cancel()
    service.store.delete(job.id)
    return JSONResponse({"id": job.id, "object": "video.deleted", "deleted": True})


async def video_events(request: Request) -> Response:
    """Server-sent events of a job, from `Last-Event-ID` on."""
    last = request.headers.get("last-event-id", "0")
    after = int(last) if last.isascii() and last.isdigit() and len(last) < 16 else 0
    return event_stream(request.app.state.service, _job(request), after)


async def not_offered(request: Request) -> Response:
    """Routes of OpenAI's SDK that this model has no counterpart for."""
    raise ApiError("this service has no such operation", status=404, code="unsupported_operation")


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= 100):
        raise ApiError(
            "is out of range", where="limit", code="invalid_value", found=repr(text[:20]), expected="1 to 100"
        )
    return int(text)
