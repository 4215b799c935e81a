"""The GPU side of a platform's function: a worker child, job payloads in, JSON answers out. Standard library at the top."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.platforms.child import COMMAND, JobFailed, WorkerChild

Publish = Callable[[str, dict[str, Any]], None]


class GpuRuntime:
    """What a platform's worker class holds.

    Args:
        bundle: prepared directory. outputs: directory that the gateway can read.
        publish: called in a thread with (job id, last message of each kind); slow and lossy is fine.
    """

    def __init__(
        self,
        bundle: Path,
        outputs: Path,
        *,
        started_ns: int,
        publish: Publish | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self._outputs = outputs
        self._publish = publish
        self._started_ns = started_ns
        self._first_call_s: float | None = None
        self.child = WorkerChild(bundle, command, started_ns)

    def run(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer of one job: `{result, start}` or, for a refused request, `{error}`.

        Raises: JobFailed, InternalError: failures that another attempt may cure (the platform retries them).
        """
        reached_s = (time.time_ns() - self._started_ns) / 1e9
        is_first, self._first_call_s = self._first_call_s is None, self._first_call_s or reached_s
        job_id = str(payload["id"])
        output = self._outputs / job_id / "video.mp4"
        output.parent.mkdir(parents=True, exist_ok=True)
        publisher = Publisher(job_id, self._publish)
        try:
            result = self.child.run(job_id, request_of(payload), output, publisher.note)
        except JobFailed as failure:
            if failure.is_refusal or failure.error.get("kind") == "cancelled":
                return {"error": failure.error}
            raise
        finally:
            publisher.close()
        answer: dict[str, Any] = {"result": result, "method_reached_s": round(reached_s, 6)}
        if is_first:
            answer["start"] = {"headline": self.child.state.get("headline", {})}
        return answer

    def close(self) -> None:
        self.child.close()


def request_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Request of the worker protocol: fields, and pictures as data URIs."""
    request = dict(payload["request"])
    for name, data in (payload.get("pictures") or {}).items():
        kind = payload["kinds"][name]
        request[name] = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return request


class Publisher:
    """Publishes the last message of each kind from a thread of its own: a slow network never holds a step up."""

    def __init__(self, job_id: str, publish: Publish | None) -> None:
        self._job_id = job_id
        self._publish = publish
        self._last: dict[str, Any] = {}
        self._changed = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        if publish is not None:
            self._thread = threading.Thread(target=self._work, name="progress", daemon=True)
            self._thread.start()

    def note(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("accepted", "phase", "step"):
            kept = {name: value for name, value in event.items() if name not in ("event", "job")}
            self._last = {**self._last, kind: kept}
            self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(5)

    def _work(self) -> None:
        assert self._publish is not None
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._closed:
                return
            try:
                self._publish(self._job_id, self._last)
            except Exception:  # noqa: BLE001 (border: progress is a courtesy, and the platform's client raises anything)
                continue
