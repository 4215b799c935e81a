"""Queue to worker and back: sends the oldest queued job, turns the worker's messages into changes of jobs.

One job at a time. The only place that decides how a job ends.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from pathlib import Path
from typing import Any

from loader.errors import ArtifactError, InternalError
from runtime.server.config import ServerConfig
from runtime.server.errors import is_lost_rank, job_error, worker_job_error
from runtime.server.jobs import QUEUED, RUNNING, Job, JobStore
from runtime.server.live import LiveVideos
from runtime.server.metrics import Metrics
from runtime.server.mp4 import check_container, file_digest
from runtime.server.progress import Progress
from runtime.server.starts import Starts
from runtime.server.supervisor import FAILED, READY, Supervisor, WorkerStatus

WATCH_PERIOD_S = 0.5
CANCELLED = ("cancelled", "cancelled by the client", 400)

log = logging.getLogger(__name__)


class Dispatcher:
    """Runs jobs of a store on a supervised worker. All methods run on the event loop."""

    def __init__(
        self, config: ServerConfig, store: JobStore, metrics: Metrics, starts: Starts, live: LiveVideos
    ) -> None:
        self._config = config
        self._store = store
        self._metrics = metrics
        self._starts = starts
        self._live = live
        self._supervisor = Supervisor(config, self._on_event, self._on_exit, self._has_request)
        self._current: str | None = None  # job that the worker holds, also after its record was deleted
        self._since = self._heard = 0.0  # monotonic
        self._cancel_since: float | None = None
        self._end: tuple[str, str, int] | None = (
            None  # how the current job ends if the worker is stopped for it
        )
        self._progress = Progress(store)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def worker(self) -> WorkerStatus:
        return self._supervisor.status

    @property
    def is_draining(self) -> bool:
        return self._draining

    async def start(self) -> None:
        """Settle the jobs of the last life and start the worker; returns at once."""
        config = self._config
        self._store.recover(config.interrupted, config.max_attempts, config.result_ttl_s)
        self._supervisor.start()
        self._spawn(self._watch())

    def pump(self) -> None:
        """Give the worker the next job if it is free. Call after every creation."""
        if self._current is not None or self._draining or not self.worker.is_connected:
            return
        job = self._store.next_queued()
        if job is None:
            return
        self._current = job.id
        self._idle.clear()
        self._since = self._heard = time.monotonic()
        self._progress.begin()
        self._cancel_since, self._end = None, None
        phase = "preprocess" if self.worker.phase == READY else "loading"
        self._metrics.observe("h3_queue_wait_seconds", self._store.clock() - job.created_at)
        self._store.update(
            job.id, status=RUNNING, phase=phase, progress=max(job.progress, 1), attempts=job.attempts + 1,
            started_at=self._store.clock(),
        )  # fmt: skip
        self._spawn(self._send(job))

    def _has_request(self) -> bool:
        """Whether `pump` will send a job as soon as a worker is connected."""
        return not self._draining and self._store.next_queued() is not None

    async def _send(self, job: Job) -> None:
        try:
            request = {**job.request, **{name: self._data_uri(job, name) for name in job.pictures}}
        except OSError:
            log.exception("inputs of a job are gone", extra={"job_id": job.id})
            self._fail(job.id, *("inputs_lost", "the pictures of this job were lost", 500))
            return self._free()
        files = {"output": str(self._store.video_path(job.id)), "fragments": str(self._live.begin(job))}
        await self._supervisor.send({"op": "generate", "job": job.id, "request": request, **files})

    def _data_uri(self, job: Job, name: str) -> str:
        kind = Path(job.pictures[name]).suffix.lstrip(".")
        return f"data:image/{kind};base64,{base64.b64encode(self._store.picture(job, name)).decode()}"

    # ---- ending jobs

    async def cancel(self, job_id: str) -> Job | None:
        """Stop a job: a queued one at once, a running one at the worker's next step. Returns it as it is now."""
        job = self._store.get(job_id)
        if job is None or not job.is_active:
            return job
        if job.status == QUEUED:
            self._fail(job_id, *CANCELLED)
            return self._store.get(job_id)
        if not job.cancel_requested:
            self._store.update(job_id, cancel_requested=True)
            await self._stop(job_id, CANCELLED)
        return self._store.get(job_id)

    async def _stop(self, job_id: str, end: tuple[str, str, int]) -> None:
        if job_id == self._current and self._cancel_since is None:
            self._cancel_since, self._end = time.monotonic(), end
            await self._supervisor.send({"op": "cancel", "job": job_id})

    def _fail(self, job_id: str, code: str, message: str, status: int) -> None:
        self._finish(job_id, job_error(code, message, None, status))

    def _finish(self, job_id: str, error: dict[str, Any] | None, **changes: Any) -> None:
        job = self._store.finish(job_id, ttl_s=self._config.result_ttl_s, error=error, **changes)
        if job is None:
            return
        outcome = "completed" if error is None else str(error["code"])
        self._metrics.job_ended(job, outcome)
        duration_s = (job.completed_at or 0.0) - job.created_at
        extra = {
            "job_id": job.id,
            "outcome": outcome,
            "dur_ms": round(1e3 * duration_s),
            "request_id": job.request_id,
        }
        log.info("job ended", extra=extra)

    def _free(self) -> None:
        self._current = None
        self._idle.set()
        self.pump()

    # ---- messages of the worker

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("hello", "ready"):
            if kind == "ready":
                self._starts.add(event.get("timeline") or {}, self.worker)
            if kind == "ready" and self._current is not None:
                self._progress.loading(self._current, 1.0)
            return self.pump()
        if kind == "loading":
            return self._on_loading()
        job_id = event.get("job")
        if job_id is None or job_id != self._current:
            return None
        self._heard = time.monotonic()
        self._on_job_event(kind, job_id, event)
        return None

    def _on_loading(self) -> None:
        self._heard = time.monotonic()
        if self._current is not None and self.worker.total_bytes:
            self._progress.loading(self._current, self.worker.loaded_bytes / self.worker.total_bytes)

    def _on_job_event(self, kind: str, job_id: str, event: dict[str, Any]) -> None:
        match kind:
            case "accepted" | "phase" | "step" | "frames":
                self._progress.apply(job_id, event)
            case "fragment":
                self._live.note(job_id, int(event["bytes"]))
            case "done":
                job = self._store.get(job_id)
                timings = self._progress.timings(job) if job is not None else {}
                result = dict(event.get("result") or {})
                self._starts.complete(dict(result.get("headline") or {}))
                self._spawn(self._complete(job_id, result, timings))
                self._free()
            case "cancelled":
                if self._end is None and self._draining:  # nobody asked: the worker was told to leave
                    self._interrupt(job_id, "the service shut down")
                else:
                    self._fail(job_id, *(self._end or CANCELLED))
                self._free()
            case "error":
                error = dict(event.get("error") or {})
                log.error("job failed in the worker", extra={"job_id": job_id, "worker_error": error})
                if is_lost_rank(error):
                    return  # all ranks end now, whatever the job was: the worker's exit settles it
                self._finish(job_id, worker_job_error(error))
                self._free()

    async def _complete(self, job_id: str, result: dict[str, Any], timings: dict[str, float]) -> None:
        """Look at the file before anyone is told that it is there."""
        path = self._store.video_path(job_id)
        try:
            problem = await asyncio.to_thread(check_container, path)
            if problem is None:
                digest, size = await asyncio.to_thread(file_digest, path)
        except OSError:
            problem = "the file is missing"
        if problem is not None:
            log.error("result refused", extra={"job_id": job_id, "problem": problem})
            return self._fail(
                job_id, "invalid_output", f"the worker's file is not a playable MP4: {problem}", 500
            )
        self._finish(
            job_id,
            None,
            phase="mux",
            progress=100,
            timings=timings,
            result={**result, "sha256": digest, "bytes": size},
        )
        return None

    def _on_exit(self, code: int) -> None:
        """The worker ended: settle its job, and all jobs if there will be no other worker."""
        job_id, self._current = self._current, None
        failure = self._own_failure()
        if job_id is not None and self._end is not None:
            self._fail(job_id, *self._end)
        elif job_id is not None and failure is not None:
            self._finish(job_id, failure)
        elif job_id is not None:
            self._interrupt(job_id, f"the worker died (exit code {code})")
        if self.worker.phase == FAILED:
            for job in self._store.active():
                self._finish(job.id, failure)
        self._metrics.count("h3_worker_exits_total", code=str(code))
        if code == ArtifactError.exit_code:
            self._metrics.count("h3_checksum_failures_total")
        self._idle.set()

    def _own_failure(self) -> dict[str, Any] | None:
        """Error of a job whose worker said why no other worker will do better; None: it died, or failed inside."""
        failure = self.worker.failure
        if self.worker.phase == FAILED:
            return worker_job_error(failure or {})
        if failure is None or failure.get("kind") == InternalError.kind:
            return None
        return worker_job_error(failure)

    def _interrupt(self, job_id: str, reason: str) -> None:
        """Settle a job that ended through no fault of its own by the policy: failed, or queued again."""
        config = self._config
        job = self._store.interrupt(
            job_id, config.interrupted, config.max_attempts, config.result_ttl_s, reason
        )
        if job is not None and not job.is_active:
            self._metrics.job_ended(job, "interrupted")

    # ---- time

    async def _watch(self) -> None:
        """Ends what takes too long, and sweeps expired results."""
        swept = 0.0
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now = time.monotonic()
            if now - swept > 60:
                swept = now
                self._store.sweep()
            if self._current is None:
                continue
            config = self._config
            if self._cancel_since is not None and now - self._cancel_since > config.cancel_grace_s:
                self._supervisor.kill("did not stop a job in time")
            elif now - self._heard > config.stall_timeout_s:
                self._end = self._end or (
                    "worker_stalled",
                    "the worker stopped answering during this job",
                    500,
                )
                self._supervisor.kill("stopped answering")
            elif now - self._since > config.job_timeout_s:
                await self._stop(self._current, ("timeout", "the job took longer than the limit", 504))

    async def restore_result(self, job: Job) -> None:
        """Results are files of this machine: there is nowhere else to look."""

    async def drain(self, timeout_s: float) -> None:
        """Start no further job and wait for the running one; queued jobs stay stored for the next life."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("the running job outlasts the drain limit", extra={"job_id": self._current})

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stop the worker. A job that still runs is settled by the policy for interrupted jobs."""
        self._draining = True
        await self._supervisor.close(timeout_s if self._current is None else 0.0)
        completing = [task for task in self._tasks if task.get_name() == "_complete"]
        if completing:
            await asyncio.wait(completing, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[Any] = asyncio.create_task(coroutine, name=coroutine.__name__)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error, extra={"task": task.get_name()})
