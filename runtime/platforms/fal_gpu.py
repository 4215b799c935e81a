"""The GPU runner on fal: request ids to jobs, fal's kinds of failure. Standard library only; fal itself stays in fal_app."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loader.errors import InternalError
from runtime.platforms.child import COMMAND, JobFailed
from runtime.platforms.gpu import GpuRuntime


class Cancelled(Exception):
    """The job was stopped on request."""


class Refused(Exception):
    """The request is at fault (`field` where one is), or this machine cannot serve it."""

    def __init__(self, message: str, status: int, field: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.field = message, status, field


class FalRuntime:
    """One worker; a second request waits for the first (fal sends one at a time unless told otherwise)."""

    def __init__(self, bundle: Path, outputs: Path, *, started_ns: int, command: Sequence[str] = ()) -> None:
        self._outputs = outputs
        self._gpu = GpuRuntime(bundle, outputs, started_ns=started_ns, command=tuple(command) or COMMAND)
        self._turn = threading.Lock()
        self._jobs: dict[str, str] = {}  # fal's request id → our job id

    def run(self, request: Mapping[str, Any], request_id: str | None) -> tuple[dict[str, Any], Path]:
        """Answer and file of one job. Raises: Cancelled, Refused."""
        job_id = f"video_{os.urandom(16).hex()}"
        if request_id is not None:
            self._jobs[request_id] = job_id
        try:
            with self._turn:
                answer = self._gpu.run({"id": job_id, "request": dict(request)})
        except (JobFailed, InternalError) as failure:
            raise Refused("generation failed; see the log of the runner", 500) from failure
        finally:
            self._jobs.pop(request_id or "", None)
        if error := answer.get("error"):
            self.discard(self._path(job_id))
            if error.get("kind") == "cancelled":
                raise Cancelled
            where = error.get("where")
            raise Refused(
                str(error.get("message")), int(error.get("http_status") or 422), str(where) if where else None
            )
        return answer, self._path(job_id)

    def cancel(self, request_id: str | None) -> bool:
        """Stop the job of a request, running or waiting for its turn; False if there is none."""
        job_id = self._jobs.get(request_id or "")
        if job_id is not None:
            self._gpu.child.cancel(job_id)
        return job_id is not None

    def health(self) -> dict[str, Any]:
        """Phase and bytes. Raises: Refused 503 if the worker cannot run here, so that fal replaces the runner."""
        state = self._gpu.child.state
        if state["phase"] == "failed":
            raise Refused("the worker cannot run here", 503)
        return {"status": "ok", **{name: state[name] for name in ("phase", "loaded_bytes", "total_bytes")}}

    def discard(self, path: Path) -> None:
        """Remove the directory of a job whose file has been handed on."""
        shutil.rmtree(path.parent, ignore_errors=True)

    def close(self) -> None:
        self._gpu.close()
        shutil.rmtree(self._outputs, ignore_errors=True)

    def _path(self, job_id: str) -> Path:
        return self._outputs / job_id / "video.mp4"
