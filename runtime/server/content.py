"""The file, finished or while it is made: ranges, conditional requests, and the answers for files that are not there."""

from __future__ import annotations

import json
import os

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from runtime.server.errors import ApiError
from runtime.server.jobs import COMPLETED, FAILED, Job
from runtime.server.live import HEADERS as LIVE_HEADERS
from runtime.server.live import LiveResponse, first_fragment
from runtime.server.service import Service
from runtime.server.views import inference_time_s, server_timing, stage_durations

LIVE = "live"
VARIANTS = (None, "video", "0", LIVE)


async def get_content(request: Request) -> Response:
    """`GET` and `HEAD /v1/videos/{id}/content`. The variant `live` of an unfinished job is what is made of it so far and
    all that follows; of a finished one it is the file."""
    service: Service = request.app.state.service
    variant = request.query_params.get("variant")
    if variant not in VARIANTS:
        raise ApiError("unknown variant", where="variant", code="unsupported_variant", expected="video, live")
    job = _known(service, request)
    if variant == LIVE and job.is_active:
        if request.method == "HEAD":
            return Response(headers=LIVE_HEADERS, media_type="video/mp4")
        request.scope["is_untimed"] = True  # a job's pace, not this service's
        reader = await first_fragment(service.live, job, request, service.config.sync_timeout_s)
        if reader is not None:
            return LiveResponse(reader, job)
        job = _known(service, request)
    if job.status == FAILED:
        message = (job.error or {}).get("message", "")
        raise ApiError(f"this video failed: {message}", status=422, code="video_failed")
    if job.expired:
        raise ApiError("this video has expired", status=410, code="video_expired")
    if job.status != COMPLETED:
        raise ApiError(
            "this video is not finished", status=404, code="video_not_ready", headers={"Retry-After": "5"}
        )
    if not service.store.video_path(job.id).exists():
        await service.engine.restore_result(job)
    headers = {**_file_headers(job), "Server-Timing": server_timing(job)}
    if _matches(request.headers.get("if-none-match"), headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return _Video(service, job, headers)


def _known(service: Service, request: Request) -> Job:
    job = service.store.get(request.path_params["video_id"], request.scope["owner"])
    if job is None:
        raise ApiError("no such video", status=404, code="video_not_found")
    return job


def sync_response(service: Service, job: Job, headers: dict[str, str]) -> Response:
    """The file as the answer of a blocking creation, facts in headers."""
    facts = {
        "X-Video-Id": job.id,
        "X-Model": job.model,
        "X-Inference-Time-S": str(inference_time_s(job)),
        "X-Stage-Durations": json.dumps(stage_durations(job)),
        "X-Peak-Memory-MB": str(job.result.get("peak_memory_mb") or 0),
        "X-Seed": str(job.video.get("seed")),
        "Server-Timing": server_timing(job),
    }
    return _Video(service, job, {**_file_headers(job), **facts, **headers})


class _Video(FileResponse):
    """A file response whose refusals of ranges have our error body.

    The file is opened here and served through its descriptor: expiry may remove the name while it is being sent.
    """

    def __init__(self, service: Service, job: Job, headers: dict[str, str]) -> None:
        try:
            self._descriptor = os.open(service.store.video_path(job.id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ApiError("this video has expired", status=410, code="video_expired") from None
        path = f"/proc/self/fd/{self._descriptor}"
        super().__init__(path, headers=headers, media_type="video/mp4", filename=f"{job.id}.mp4")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(scope, receive, send)
        finally:
            os.close(self._descriptor)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = os.fstat(self._descriptor).st_size
        value = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"range"), None)
        if value is not None and value.strip().lower().startswith("bytes="):
            ranges = self._parse_ranges(value.split("=", 1)[1], size)
            if ranges and any(not 0 <= start < size for start, _ in ranges):
                raise ApiError(
                    "the range lies outside of the file", status=416, code="range_not_satisfiable", where="Range",
                    headers={"Content-Range": f"bytes */{size}"},
                )  # fmt: skip
            if not ranges or any(start >= end for start, end in ranges):
                scope = _without_range(scope)  # malformed: ignored, as RFC 9110 allows
        elif value is not None:
            scope = _without_range(scope)
        await super().__call__(scope, receive, send)


def _without_range(scope: Scope) -> Scope:
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"range"]}


def _file_headers(job: Job) -> dict[str, str]:
    return {"ETag": f'"{job.result["sha256"]}"', "Cache-Control": "private, max-age=3600"}


def _matches(header: str | None, etag: str) -> bool:
    if header is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return "*" in tags or etag in tags
