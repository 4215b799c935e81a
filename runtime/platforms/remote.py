"""Jobs of the HTTP service run as calls of a platform's GPU function: `RemoteEngine` takes the place of the dispatcher.

The platform queues, so every queued job is handed over at once. A call survives this process: its id is stored with the
job, and a new gateway follows it on. Records are mirrored into a store of the platform, for the same reason. A file stays on
the platform as long as its job's file does here; a call whose job was deleted is followed to its end for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from runtime.server.errors import ApiError, job_error, worker_job_error
from runtime.server.jobs import QUEUED, RUNNING, Job, document_of, is_storage_error
from runtime.server.mp4 import check_container, file_digest
from runtime.server.progress import Progress
from runtime.server.service import Service
from runtime.server.supervisor import READY, WorkerStatus

FOLLOW_PERIOD_S = 1.0
SWEEP_PERIOD_S = 60.0
CANCELLED = job_error("cancelled", "cancelled by the client", None, 400)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallState:
    """Where a call stands: `running`, `done` (with the worker's answer), `cancelled`, or, with a reason, `lost` (another
    attempt may cure it), `timeout`, `failed`."""

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
        """The finished file. Raises: FileNotFoundError: the platform has none."""
        ...

    async def remove_output(self, job_id: str) -> None:
        """Remove whatever the worker wrote for a job; nothing there is fine."""
        ...

    async def records(self) -> list[Mapping[str, Any]]:
        """Documents of jobs that earlier gateways stored."""
        ...

    async def put_record(self, job_id: str, document: Mapping[str, Any] | None) -> None:
        """Store or (None) remove the document of a job."""
        ...


class _Copy(NamedTuple):
    path: Path
    sha256: str
    size_bytes: int


class RemoteEngine:
    """Follows calls for a service. All methods run on the event loop."""

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service = service
        self._calls = calls
        self._draining = False
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self._mirror: dict[str, Mapping[str, Any] | None] = {}
        self._mirror_changed = asyncio.Event()
        self._unwanted: set[str] = set()  # jobs whose output is to be removed from the platform
        self._upkeep: list[asyncio.Task[None]] = []
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
        self._upkeep = [asyncio.create_task(self._mirror_records()), asyncio.create_task(self._sweep())]
        for job in store.active():
            self._follow(job)

    def pump(self) -> None:
        """Hand over whatever is queued."""
        for job in self._service.store.active():
            if job.status == QUEUED and not self._draining:
                self._follow(job)

    async def cancel(self, job_id: str) -> Job | None:
        """Call a job off; its call ends some time later. Raises: ApiError 503: the platform does not take it now."""
        store = self._service.store
        job = store.get(job_id)
        if job is not None and job.is_active and not job.cancel_requested:
            job = store.update(job_id, cancel_requested=True)
            if job is not None and job.call_id:
                try:
                    await self._calls.cancel(job.call_id)
                except Exception as cause:  # border: a platform's client may raise anything
                    store.update(job_id, cancel_requested=False)  # so that the next request tries again
                    raise _unavailable("the platform cannot cancel this job now") from cause
        return store.get(job_id)

    async def restore_result(self, job: Job) -> None:
        """Fetch a finished file that an earlier gateway had. Requests for one job share one download.

        Raises: ApiError: 410 the platform has it no more; 503 it cannot be had now, or is not the file that was made.
        """
        task = self._restoring.get(job.id)
        if task is None:
            task = self._restoring[job.id] = asyncio.create_task(self._restore(job))
            task.add_done_callback(lambda ended: self._restored(job.id, ended))
        await asyncio.shield(task)  # a client that leaves does not take the file from the others

    async def drain(self, timeout_s: float) -> None:
        """Calls go on without this gateway: only new ones are refused."""
        self._draining = True

    async def close(self, timeout_s: float = 10.0) -> None:
        for task in (*self._followers.values(), *self._restoring.values()):
            task.cancel()
        for task in self._upkeep:
            task.cancel()
        if self._upkeep:
            await self._push_records()

    # ---- calls

    def _follow(self, job: Job) -> None:
        if job.id not in self._followers:
            task = asyncio.create_task(self._run(job.id))
            self._followers[job.id] = task
            task.add_done_callback(lambda _: self._followers.pop(job.id, None))

    async def _run(self, job_id: str) -> None:
        store = self._service.store
        seen: dict[str, Any] = {}  # messages of an earlier attempt are no progress of the next one
        try:
            while (job := store.get(job_id)) is not None and job.is_active:
                if not job.call_id and self._draining:
                    return  # the next gateway hands it over
                await self._until_ended(job if job.call_id else await self._hand_over(job), seen)
        except FileNotFoundError:
            log.exception("inputs of a job are gone", extra={"job_id": job_id})
            self._finish(job_id, job_error("inputs_lost", "the pictures of this job were lost"))
        except Exception as error:  # border: a platform's client may raise anything
            log.exception("a call failed", extra={"job_id": job_id})
            self._finish(
                job_id, job_error("platform", f"the platform failed: {type(error).__name__}", None, 503)
            )
        if store.get(job_id) is None:
            self._remove_output(job_id)

    async def _hand_over(self, job: Job) -> Job:
        """The job as a running call; that of a job that nobody wants any more is called off."""
        store = self._service.store
        call_id = await self._calls.spawn(self._payload(job))
        running = store.update(
            job.id, call_id=call_id, status=RUNNING, phase="loading", progress=max(job.progress, 1),
            attempts=job.attempts + 1, started_at=store.clock(),
        )  # fmt: skip
        if running is None or running.cancel_requested:
            await self._calls.cancel(call_id)
        return running or replace(job, call_id=call_id)

    def _payload(self, job: Job) -> dict[str, Any]:
        pictures = {name: self._service.store.picture(job, name) for name in job.pictures}
        kinds = {name: Path(file).suffix.lstrip(".") for name, file in job.pictures.items()}
        return {"id": job.id, "request": job.request, "pictures": pictures, "kinds": kinds}

    async def _until_ended(self, job: Job, seen: dict[str, Any]) -> None:
        progress = Progress(self._service.store)
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
            return self._interrupt(job_id, state.reason)
        if state.kind == "timeout":
            return self._finish(job_id, job_error("timeout", state.reason, None, 504))
        if state.kind == "failed":
            return self._finish(job_id, job_error("internal", state.reason))
        if error := state.answer.get("error"):
            return self._finish(
                job_id, CANCELLED if error.get("kind") == "cancelled" else worker_job_error(error)
            )
        try:
            async with self._copy(job_id) as copy:
                problem = await asyncio.to_thread(check_container, copy.path)
                if problem is None:
                    copy.path.rename(self._service.store.video_path(job_id))
        except FileNotFoundError:
            problem = "the file is missing"
        if problem is not None:
            return self._finish(
                job_id, job_error("invalid_output", f"the worker's file is not a playable MP4: {problem}")
            )
        timings = dict(state.answer.get("timings") or {}) or progress.timings(job)
        result = {**(state.answer.get("result") or {}), "sha256": copy.sha256, "bytes": copy.size_bytes}
        self._finish(job_id, None, phase="mux", progress=100, timings=timings, result=result)
        if start := state.answer.get("start"):
            self._service.starts.add(start, self._worker)

    def _interrupt(self, job_id: str, reason: str) -> None:
        """Settle the job of a lost call by the policy: failed, or queued again and without a call."""
        service = self._service
        config = service.config
        job = service.store.interrupt(
            job_id, config.interrupted, config.max_attempts, config.result_ttl_s, reason
        )
        if job is not None and job.is_active:
            service.store.update(job_id, call_id="")
        elif job is not None:
            service.metrics.job_ended(job, "interrupted")

    # ---- files

    @contextlib.asynccontextmanager
    async def _copy(self, job_id: str) -> AsyncIterator[_Copy]:
        """The finished file, here, under a name of its own; it is gone afterwards unless it was renamed.

        Raises: FileNotFoundError: the platform has none, or the job was deleted meanwhile.
        """
        directory = self._service.store.directory(job_id).absolute()
        directory.mkdir(exist_ok=True)
        part = directory / f"{os.urandom(8).hex()}.part"
        try:
            with part.open("xb") as file:
                async for chunk in self._calls.download(job_id):
                    file.write(chunk)
            digest, size_bytes = await asyncio.to_thread(file_digest, part)
            yield _Copy(part, digest, size_bytes)
        finally:
            part.unlink(missing_ok=True)

    async def _restore(self, job: Job) -> None:
        store = self._service.store
        if store.get(job.id) is None:  # deleted since it was asked for: its directory must not come back
            return
        try:
            async with self._copy(job.id) as copy:
                if copy.sha256 == job.result["sha256"]:
                    copy.path.rename(store.video_path(job.id))
                    return
        except FileNotFoundError as cause:
            raise ApiError("this video is gone", status=410, code="video_expired") from cause
        except Exception as cause:  # border: a platform's client may raise anything
            if is_storage_error(cause):
                raise
            raise _unavailable("the platform cannot give this file now") from cause
        raise ApiError(
            "the platform's copy of this file is not the one that was made", status=503, code="result_damaged"
        )

    def _restored(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._restoring.pop(job_id, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it; nobody may be left

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
        self._remove_output(job_id)

    def _remove_output(self, job_id: str) -> None:
        self._unwanted.add(job_id)
        self._mirror_changed.set()

    async def _sweep(self) -> None:
        """Let results expire, here and on the platform; a removal that failed is tried again."""
        while True:
            for job in self._service.store.sweep():
                self._remove_output(job.id)
            if self._unwanted:
                self._mirror_changed.set()
            await asyncio.sleep(SWEEP_PERIOD_S)

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
        for job_id in tuple(self._unwanted):
            try:
                await self._calls.remove_output(job_id)
                self._unwanted.discard(job_id)
            except Exception:  # border: the platform's client; the next sweep tries again
                log.exception("an output could not be removed", extra={"job_id": job_id})


def _unavailable(message: str) -> ApiError:
    return ApiError(message, status=503, code="platform", headers={"Retry-After": "5"})
