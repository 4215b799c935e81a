"""What a trace says about a start of the worker and about a request, from what was recorded anyway. No tracing library.

Times are Unix nanoseconds, as OpenTelemetry wants them. The worker's timeline counts from its first instruction and tells
when that was (`origin_unix_ns`); a request's record has its creation, hand-over and end, and the time in every phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from runtime.server.jobs import Job

SUMMED_TRACK = "groups"
"""Lane of hundreds of short spans, one for each layer's bytes; `load <component>` sums them up."""
Attributes = Mapping[str, str | bool | int | float]


@dataclass(frozen=True)
class TraceSpan:
    """One piece of work; `events` are points in time in it, `error` is why it failed."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Trace:
    """A root and its children.

    Attributes:
        parent: W3C `traceparent` of the caller; empty: a trace of its own.
        waited_for_start: the request waited while a worker started.
    """

    root: TraceSpan
    children: tuple[TraceSpan, ...]
    parent: str = ""
    waited_for_start: bool = False


def trace_of_start(start: Mapping[str, Any]) -> Trace | None:
    """A start as `Starts` keeps it: the worker's spans under `worker.start`, its headline marks as events of that.

    None if the worker wrote no timeline or did not say when it began.
    """
    trace = start.get("trace") or {}
    origin_ns = trace.get("origin_unix_ns")
    if not isinstance(origin_ns, int):
        return None
    events = [event for event in trace.get("traceEvents", []) if isinstance(event, dict)]
    tracks = {e.get("tid"): (e.get("args") or {}).get("name", "") for e in events if e.get("ph") == "M"}
    children = tuple(
        _child(event, origin_ns, str(tracks.get(event.get("tid"), event.get("tid"))))
        for event in events
        if event.get("ph") == "X" and tracks.get(event.get("tid")) != SUMMED_TRACK
    )
    marks = sorted((start.get("headline") or {}).items(), key=lambda mark: mark[1])
    points = tuple((name, origin_ns + round(seconds * 1e9)) for name, seconds in marks)
    end_ns = max([origin_ns, *(child.end_ns for child in children), *(t_ns for _, t_ns in points)])
    attributes: Attributes = {
        "coldframe.start": str(start["id"]),
        "coldframe.bytes": int(start.get("total_bytes") or 0),
    }
    return Trace(TraceSpan("worker.start", origin_ns, end_ns, attributes, points), children)


def _child(event: Mapping[str, Any], origin_ns: int, track: str) -> TraceSpan:
    start_ns = origin_ns + round(event["ts"] * 1e3)
    args = event.get("args") or {}
    plain: dict[str, str | bool | int | float] = {
        f"coldframe.{name}": value for name, value in args.items() if isinstance(value, str | int | float)
    }
    return TraceSpan(
        str(event.get("name")),
        start_ns,
        start_ns + round(event.get("dur", 0) * 1e3),
        {"thread.name": track, **plain},
        error=str(args.get("failed") or ""),
    )


def trace_of_job(job: Job) -> Trace:
    """A request that has ended: `queue` and the phases, one after the other, under `video`.

    Of a job that ran more than once only the last hand-over is known, and the phases of all its attempts are summed up: it
    has no phases here.
    """
    created_ns, end_ns = _unix_ns(job.created_at), _unix_ns(job.completed_at or job.created_at)
    started_ns = end_ns if job.started_at is None else _unix_ns(job.started_at)
    children = [TraceSpan("queue", created_ns, started_ns)]
    if job.attempts == 1:
        borders = [started_ns]
        for seconds in job.timings.values():  # every phase begins where the one before ends
            borders.append(borders[-1] + round(seconds * 1e9))
        for phase, (since_ns, until_ns) in zip(job.timings, pairwise(borders), strict=True):
            children.append(TraceSpan(phase, since_ns, until_ns))
        if job.phase not in job.timings and borders[-1] < end_ns:  # what it was at when it ended
            children.append(TraceSpan(job.phase, borders[-1], end_ns))
    video = {name: job.video.get(name) for name in ("task", "width", "height", "num_frames", "schedule")}
    attributes = {
        "coldframe.job": job.id,
        "coldframe.request_id": job.request_id,
        "coldframe.model": job.model,
        "coldframe.bundle": job.bundle_id,
        "coldframe.attempts": job.attempts,
        **{f"coldframe.{name}": value for name, value in video.items() if isinstance(value, str | int)},
    }
    code = "" if job.error is None else str(job.error.get("code"))
    root = TraceSpan("video", created_ns, end_ns, attributes, error=code)
    return Trace(
        root, tuple(children), job.traceparent, waited_for_start="loading" in (*job.timings, job.phase)
    )


def _unix_ns(seconds: float) -> int:
    return round(seconds * 1e9)
