"""The last starts of the worker: their timelines as JSON, Perfetto trace or picture. Kept as files beside the jobs."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.server.supervisor import WorkerStatus
from runtime.timeline import Timeline

KEPT_STARTS = 10
MAX_TRACE_BYTES = 8 << 20

log = logging.getLogger(__name__)


class Starts:
    """Newest first. A timeline file is read once, when the worker names it.

    Args:
        directory: where the last `KEPT_STARTS` are kept, created where absent.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []
        self._starts: list[dict[str, Any]] = []
        for path in sorted(directory.glob("start-*.json"), reverse=True)[:KEPT_STARTS]:
            try:
                self._starts.append(json.loads(path.read_text()))
            except (OSError, ValueError):
                log.warning("a stored start cannot be read", extra={"file": path.name})

    def add(self, timeline: Mapping[str, Any], status: WorkerStatus) -> None:
        """Remember a start that has just become ready. Missing or broken timeline files cost the spans only."""
        start = {
            "id": f"start-{time.time_ns()}",
            "ready_at": round(time.time(), 3),
            "pid": status.pid,
            "total_bytes": status.total_bytes,
            "headline": dict(timeline.get("headline") or {}),
            "path": timeline.get("path"),
            "trace": _read_trace(timeline.get("path")),
        }
        self._starts.insert(0, start)
        del self._starts[KEPT_STARTS:]
        self._store(start)
        for listener in self.listeners:
            listener(start)

    def _store(self, start: Mapping[str, Any]) -> None:
        part = self._directory / "start.part"
        try:
            part.write_text(json.dumps(start))
            part.replace(self._directory / f"{start['id']}.json")
            for path in sorted(self._directory.glob("start-*.json"), reverse=True)[KEPT_STARTS:]:
                path.unlink()
        except OSError:
            log.warning("a start could not be stored", exc_info=True)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def complete(self, headline: Mapping[str, Any]) -> None:
        """The first job after a start is done: its marks belong to the start, and the worker may have written its timeline
        again. Later jobs change nothing."""
        if not self._starts or self._starts[0].get("is_complete"):
            return
        start = self._starts[0]
        start["is_complete"] = True
        start["headline"] = {**start["headline"], **headline}
        start["trace"] = _read_trace(start.get("path")) or start["trace"]
        self._store(start)

    def all(self) -> list[dict[str, Any]]:
        """`{id, ready_at, pid, total_bytes, headline, spans, marks, facts}` of each start, newest first."""
        return [_public(start) for start in self._starts]

    def find(self, start_id: str | None) -> dict[str, Any] | None:
        """A start by id, the newest without one."""
        matching = (start for start in self._starts if start_id in (None, start["id"]))
        return next(matching, None)

    def cold_seconds(self) -> dict[str, float]:
        """Marks of the newest start, without those of a request that came to a worker that had been ready: it was idle before."""
        headline = dict(self._starts[0]["headline"]) if self._starts else {}
        came, ready = headline.get("first_request", 0.0), headline.get("all_weights_resident", math.inf)
        return {name: seconds for name, seconds in headline.items() if came <= ready or seconds < came}


def weights_read(start: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    """Component → (bytes, seconds from its first byte to its last), from the spans `load <component>` of a start."""
    events = (start.get("trace") or {}).get("traceEvents", [])
    found = {}
    for event in events:
        name = str(event.get("name")) if isinstance(event, dict) else ""
        if name.startswith("load ") and event.get("ph") == "X":
            size, micros = (event.get("args") or {}).get("bytes"), event.get("dur")
            if isinstance(size, int) and isinstance(micros, int | float):
                found[name.removeprefix("load ")] = (size, micros / 1e6)
    return found


def to_svg(start: Mapping[str, Any]) -> str:
    """The waterfall picture of a start."""
    from runtime.timeline_views import to_svg as draw

    timeline = Timeline(origin_ns=0)
    public = _public(start)
    for span in public["spans"]:
        timeline.add_span(
            span["name"], int(span["start_s"] * 1e9), int(span["end_s"] * 1e9), thread=span["track"]
        )
    for name, seconds in public["headline"].items():
        timeline.mark(name, int(seconds * 1e9))
    return draw(timeline, "Start of the worker")


def _read_trace(path: object) -> dict[str, Any]:
    if not isinstance(path, str):
        return {}
    try:
        if Path(path).stat().st_size > MAX_TRACE_BYTES:
            return {}
        trace = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        log.warning("the worker's timeline cannot be read", exc_info=True)
        return {}
    return trace if isinstance(trace, dict) else {}


def _public(start: Mapping[str, Any]) -> dict[str, Any]:
    trace = start.get("trace") or {}
    events = [event for event in trace.get("traceEvents", []) if isinstance(event, dict)]
    lanes = {e.get("tid"): (e.get("args") or {}).get("name", "") for e in events if e.get("ph") == "M"}
    spans = [
        {
            "name": str(event.get("name")),
            "track": str(lanes.get(event.get("tid"), event.get("tid"))),
            "start_s": round(event["ts"] / 1e6, 6),
            "end_s": round((event["ts"] + event.get("dur", 0)) / 1e6, 6),
        }
        for event in events
        if event.get("ph") == "X"
    ]
    kept = {name: start.get(name) for name in ("id", "ready_at", "pid", "total_bytes", "headline")}
    return {**kept, "spans": spans, "facts": trace.get("facts", {})}
