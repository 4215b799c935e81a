"""Progress of a job as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

from starlette.responses import StreamingResponse

from runtime.server.jobs import Job
from runtime.server.service import Service

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event_stream(
    service: Service, job: Job, after: int, headers: Mapping[str, str] | None = None
) -> StreamingResponse:
    """`id`, `event` and `data` lines from the event after number `after` to the last one of the job."""
    frames = _frames(service, job, after)
    return StreamingResponse(frames, media_type="text/event-stream", headers={**HEADERS, **(headers or {})})


async def _frames(service: Service, job: Job, after: int) -> AsyncIterator[str]:
    async for event in service.feeds.read(job, after):
        if event is None:
            yield ": ping\n\n"
        else:
            yield f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(event.data)}\n\n"
