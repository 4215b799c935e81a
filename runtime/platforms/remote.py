"""Jobs of the HTTP service run as calls of a platform's GPU function: `RemoteEngine` takes the place of the dispatcher.

The platform queues, so every queued job is handed over at once. A call survives this process: its id is stored with the
job, and a new gateway follows it on. Records are mirrored into a store of the platform, for the same reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from runtime.server.errors import job_error, worker_job_error
from runtime.server.jobs import QUEUED, RUNNING, Job, document_of
from runtime.server.mp4 import check_container, file_digest
from runtime.server.progress import Progress
from runtime.server.service import Service
from runtime.server.supervisor import READY, WorkerStatus

FOLLOW_PERIOD_S = 1.0
CANCELLED = job_error("cancelled", "cancelled by the client", None, 400)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallState:
    """Where a call stands: `running`, `done` (with the worker's answer), `cancelled`, `lost` (with a reason)."""

    kind: str
    answer: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


class Calls(Protocol):
    """A platform's GPU function and the places beside it. `payload` and `answer` are JSON-like, pictures are bytes."""

    async def spawn(self, payload: Mapping[str, Any]) -> str:
        """Hand a job over; returns the call's id."""
        ...

    async def state(self, call_id: str) -> CallState: ...

    async def cancel(self, call_id: str) -> None: ...

    async def progress(self, job_id: str) -> Mapping[str, Any]:
        """Last message of each kind (`accepted`, `phase`, `step`) that the worker has published for the job."""
        ...

    def download(self, job_id: str) -> AsyncIterator[bytes]:
        """The finished file."""
        ...

    async def records(self) -> list[Mapping[str, Any]]:
        """Documents of jobs that earlier gateways stored."""
        ...

    async def put_record(self, job_id: str, document: Mapping[str, Any] | None) -> None:
        """Store or (None) remove the document of a job."""
        ...


class RemoteEngine:
    """Follows calls for a service. All methods run on the event loop."""

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service = service
        self._calls = calls
        self._draining = False
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._mirror: dict[str, Mapping[str, Any] | None] = {}
        self._mirror_changed = asyncio.Event()
        self._mirror_task: asyncio.Task[None] | None = None
        self._worker = WorkerStatus(READY)  # the platform accepts calls at any time: loading is its business

    @property
    def worker(self) -> WorkerStatus:
        return self._worker

    @property
    def is_draining(self) -> bool:
        return self._draining

    async def start(self) -> None:
        """Take over the records of earlier gateways and follow their calls."""
        store = self._service.store
        for document in await self._calls.records():
            store.adopt(document)
        store.listeners.append(self._note)
        store.on_delete.append(self._note_deleted)
        self._mirror_task = asyncio.create_task(self._mirror_records())
        for job in store.active():
            self._follow(job)

    def pump(self) -> None:
        """Hand over whatever is queued."""
        for job in self._service.store.active():
            if job.status == QUEUED and not self._draining:
                self._follow(job)

    async def cancel(self, job_id: str) -> Job | None:
        store = self._service.store
        job = store.get(job_id)
        if job is not None and job.is_active and not job.cancel_requested:
            job = store.update(job_id, cancel_requested=True)
            if job is not None and job.call_id:
                await self._calls.cancel(job.call_id)
        return store.get(job_id)

    async def restore_result(self, job: Job) -> None:
        """Fetch a finished file that an earlier gateway had."""
        with contextlib.suppress(OSError):
            await self._fetch(job.id)

    async def drain(self, timeout_s: float) -> None:
        """Calls go on without this gateway: only new ones are refused."""
        self._draining = True

    async def close(self, timeout_s: float = 10.0) -> None:
        for task in list(self._followers.values()):
            task.cancel()
        if self._mirror_task is not None:
            self._mirror_task.cancel()
            await self._push_records()

    # ---- calls

    def _follow(self, job: Job) -> None:
        if job.id not in self._followers:
            task = asyncio.create_task(self._run(job.id))
            self._followers[job.id] = task
            task.add_done_callback(lambda _: self._followers.pop(job.id, None))

    async def _run(self, job_id: str) -> None:
        store = self._service.store
        try:
            job = store.get(job_id)
            if job is not None and not job.call_id:
                call_id = await self._calls.spawn(self._payload(job))
                job = store.update(
                    job_id, call_id=call_id, status=RUNNING, phase="loading", progress=1, attempts=job.attempts + 1,
                    started_at=store.clock(),
                )  # fmt: skip
                if job is not None and job.cancel_requested:
                    await self._calls.cancel(call_id)
            if job is not None:
                await self._until_ended(job)
        except Exception as error:  # border: a platform's client may raise anything
            log.exception("a call failed", extra={"job_id": job_id})
            self._finish(
                job_id, job_error("platform", f"the platform failed: {type(error).__name__}", None, 503)
            )

    def _payload(self, job: Job) -> dict[str, Any]:
        pictures = {name: self._service.store.picture(job, name) for name in job.pictures}
        kinds = {name: Path(file).suffix.lstrip(".") for name, file in job.pictures.items()}
        return {"id": job.id, "request": job.request, "pictures": pictures, "kinds": kinds}

    async def _until_ended(self, job: Job) -> None:
        progress = Progress(self._service.store)
        seen: dict[str, Any] = {}
        while True:
            state = await self._calls.state(job.call_id)
            for kind, event in (await self._calls.progress(job.id)).items():
                if seen.get(kind) != event:
                    seen[kind] = event
                    progress.apply(job.id, {"event": kind, **event})
            if state.kind != "running":
                return await self._end(job.id, state, progress)
            await asyncio.sleep(FOLLOW_PERIOD_S)

    async def _end(self, job_id: str, state: CallState, progress: Progress) -> None:
        job = self._service.store.get(job_id)
        if job is None:
            return
        if state.kind == "cancelled" or (job.cancel_requested and state.kind != "done"):
            return self._finish(job_id, CANCELLED)
        if state.kind == "lost":
            return self._finish(job_id, job_error("interrupted", state.reason, None, 503))
        if error := state.answer.get("error"):
            return self._finish(
                job_id, CANCELLED if error.get("kind") == "cancelled" else worker_job_error(error)
            )
        problem = await self._fetch(job_id)
        if problem is not None:
            return self._finish(
                job_id, job_error("invalid_output", f"the worker's file is not a playable MP4: {problem}")
            )
        digest, size = await asyncio.to_thread(file_digest, self._service.store.video_path(job_id))
        timings = dict(state.answer.get("timings") or {}) or progress.timings(job)
        result = {**(state.answer.get("result") or {}), "sha256": digest, "bytes": size}
        self._finish(job_id, None, phase="mux", progress=100, timings=timings, result=result)
        if start := state.answer.get("start"):
            self._service.starts.add(start, self._worker)

    async def _fetch(self, job_id: str) -> str | None:
        """Copy the finished file here; returns what is wrong with it."""
        path = self._service.store.video_path(job_id)
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            async for chunk in self._calls.download(job_id):
                file.write(chunk)
        problem = await asyncio.to_thread(check_container, part)
        if problem is None:
            part.rename(path)
        return problem

    def _finish(self, job_id: str, error: dict[str, Any] | None, **changes: Any) -> None:
        service = self._service
        job = service.store.finish(job_id, ttl_s=service.config.result_ttl_s, error=error, **changes)
        if job is not None:
            service.metrics.job_ended(job, "completed" if error is None else str(error["code"]))

    # ---- records

    def _note(self, job: Job) -> None:
        self._mirror[job.id] = document_of(job)
        self._mirror_changed.set()

    def _note_deleted(self, job_id: str) -> None:
        self._mirror[job_id] = None
        self._mirror_changed.set()

    async def _mirror_records(self) -> None:
        while True:
            await self._mirror_changed.wait()
            self._mirror_changed.clear()
            await self._push_records()
            await asyncio.sleep(FOLLOW_PERIOD_S / 2)  # many changes of one job become one write

    async def _push_records(self) -> None:
        changed, self._mirror = self._mirror, {}
        for job_id, document in changed.items():
            try:
                await self._calls.put_record(job_id, document)
            except Exception:  # border: the platform's client; the next change of the job tries again
                log.exception("a record could not be mirrored", extra={"job_id": job_id})
