"""The parts of one replica, put together: store, dispatcher, feeds, admission, bundle, metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from loader.errors import RequestError, WorkerError
from runtime.server.admission import Admission
from runtime.server.body import BodyBudget
from runtime.server.bundle import Bundle, OpenBundle, open_prepared_directory
from runtime.server.config import ServerConfig
from runtime.server.dispatch import Dispatcher
from runtime.server.errors import ApiError
from runtime.server.feeds import Feeds
from runtime.server.fetch import Fetcher
from runtime.server.jobs import COMPLETED, QUEUED, Job, JobStore
from runtime.server.live import LiveVideos
from runtime.server.metrics import Metrics
from runtime.server.starts import Starts, weights_read
from runtime.server.supervisor import FAILED, READY, WorkerStatus
from runtime.server.tracing import Tracing

VERSION = "2026.12.0"
CONCURRENT_ADMISSIONS = 4
BUNDLE_OPEN_DELAY_S = 0.1  # its imports would share the interpreter with the opening of the socket

log = logging.getLogger(__name__)


class Engine(Protocol):
    """Where jobs run: `Dispatcher` here, a platform's functions elsewhere."""

    @property
    def worker(self) -> WorkerStatus: ...
    @property
    def is_draining(self) -> bool: ...
    async def start(self) -> None: ...
    def pump(self) -> None: ...
    async def cancel(self, job_id: str) -> Job | None: ...
    async def restore_result(self, job: Job) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...
    async def close(self, timeout_s: float = 10.0) -> None: ...


class Service:
    """Everything that handlers share. Built before the socket opens; `start` and `close` on the event loop.

    Args:
        opener: how the prepared directory is opened.
        fetcher: how addresses are fetched; by default as the configuration says.
        make_engine: another place for jobs to run.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        opener: Callable[[Path], OpenBundle] = open_prepared_directory,
        fetcher: Fetcher | None = None,
        make_engine: Callable[[Service], Engine] | None = None,
    ) -> None:
        self.config = config
        self.store = JobStore(config.state)
        self.metrics = Metrics()
        self.starts = Starts(config.state / "starts")
        self.feeds = Feeds(self.store)
        self.live = LiveVideos(self.store)
        self.admission = Admission(config, self.store)
        self.bundle = Bundle(config.bundle, config.served_name, opener)
        self.fetcher = fetcher or Fetcher(config.allow_url_inputs, config.max_picture_bytes)
        self.body_budget = BodyBudget(config.body_budget_bytes)
        self.admissions = asyncio.Semaphore(CONCURRENT_ADMISSIONS)
        self.engine: Engine = (
            make_engine(self)
            if make_engine
            else Dispatcher(config, self.store, self.metrics, self.starts, self.live)
        )
        self.tracing = Tracing(VERSION)
        self.store.listeners += [self._learn, self.tracing.on_job]
        self.starts.listeners += [self._count_weights, self.tracing.on_start]
        self._opening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the worker, and read the manifest in the background."""
        await self.engine.start()
        self._opening = asyncio.create_task(self._open_bundle())

    async def close(self) -> None:
        """Stop the worker and release the state directory. Works twice."""
        await self.engine.close()
        await asyncio.to_thread(self.tracing.close)
        self.store.close()

    def refuse_if_unavailable(self) -> None:
        """Raises: ApiError 503: draining, or the worker cannot run at all. Loading is not a reason."""
        if self.engine.is_draining:
            raise ApiError(
                "the server is shutting down", status=503, code="draining", headers={"Retry-After": "10"}
            )
        if self.engine.worker.phase == FAILED:
            kind = str((self.engine.worker.failure or {}).get("kind") or RequestError.kind)
            code = "worker_misconfigured" if kind == RequestError.kind else kind
            raise ApiError(
                "the worker cannot run: its settings, its prepared directory or its machine are unusable", status=503,
                code=code, hint="the reason is in the server's log",
            )  # fmt: skip

    def gauges(self) -> None:
        """Bring gauges up to date before a scrape."""
        worker, metrics, active = self.engine.worker, self.metrics, self.store.active()
        queued = sum(job.status == QUEUED for job in active)
        metrics.set("h3_jobs_queued", queued)
        metrics.set("h3_jobs_running", len(active) - queued)
        metrics.set("h3_worker_ready", float(worker.phase == READY))
        metrics.set("h3_worker_starts_total", worker.starts)
        metrics.set("h3_weights_loaded_bytes", worker.loaded_bytes)
        metrics.set("h3_weights_total_bytes", worker.total_bytes)
        cold = self.starts.cold_seconds()
        metrics.replace("h3_cold_start_seconds", "phase", cold)
        if "first_dit_entry" in cold:
            metrics.set("h3_first_dit_forward_seconds", cold["first_dit_entry"])
        metrics.set("h3_build_info", 1, version=VERSION, bundle=self.bundle.identity)

    def _count_weights(self, start: Mapping[str, Any]) -> None:
        for component, (size, seconds) in weights_read(start).items():
            self.metrics.count("h3_weights_read_bytes_total", size, component=component)
            self.metrics.set("h3_weights_read_seconds", seconds, component=component)

    def _learn(self, job: Job) -> None:
        if job.status == COMPLETED and job.started_at is not None and job.completed_at is not None:
            self.admission.note_duration(job.completed_at - job.started_at)

    async def _open_bundle(self) -> None:
        await asyncio.sleep(BUNDLE_OPEN_DELAY_S)
        try:
            await asyncio.to_thread(self.bundle.open)
        except WorkerError:
            log.exception("the prepared directory cannot be opened")
