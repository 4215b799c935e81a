"""A started worker of several ranks: rank 0 takes requests, the others do what it says until it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from loader.errors import ArtifactError, InternalError, WorkerError
from loader.progress import StreamClosed
from runtime.engine import Engine
from runtime.family import Job, Prepared
from runtime.parallel.connect import Connection
from runtime.parallel.family import RankJob, RankPrepared
from runtime.pipeline import Cancelled, Hooks, denoise
from runtime.timeline import Timeline

_LOAD_LOOK_S = 0.1

log = logging.getLogger(__name__)


class RankEngine(Engine):
    """See `Engine`. On rank 0 `run` is the same as on one rank; the others call `follow`.

    A request that rank 0 gives up between two steps or units (cancelled, disk full) leaves the ranks ready for the
    next. Any other failure is everybody's: `run` and `follow` raise the same error on all ranks, which then end.
    """

    def __init__(self, *arguments: Any, connection: Connection) -> None:
        super().__init__(*arguments)
        self.connection = connection
        self._job: RankJob | None = None
        self._waiting: Prepared | None = None

    def start_job(self, prepared: Prepared) -> RankJob:
        job: Any = super().start_job(prepared)
        self._job = job
        return self._job

    def run(self, prepared: Prepared, output: Path, **options: Any) -> dict[str, object]:
        assert isinstance(prepared, RankPrepared), "made by this engine's prepare"
        control = self.connection.control
        with self._guarded():
            control.exchange({"op": "generate", "body": prepared.body})
            try:
                with control.request():
                    return super().run(prepared, output, **options)
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._job = None

    def cancellable_waits(self, cancelled: threading.Event) -> AbstractContextManager[None]:
        """Of several ranks none may leave a section that the others are in."""
        return nullcontext()

    def wait_resident(self, on_progress: Callable[[int, int], None], every_s: float) -> None:
        """On every rank: what fails on one ends all. Returns when all ranks have what the start asked for."""
        guard = self.connection.guard
        if guard is None:
            super().wait_resident(on_progress, every_s)
            return

        def report(done: int, total: int) -> None:
            guard.check()
            on_progress(done, total)

        try:
            super().wait_resident(report, every_s)
        except StreamClosed:
            raise
        except WorkerError as error:
            raise self._everybodys(error) from error
        guard.loaded()
        while not guard.is_loaded_everywhere:
            guard.check()
            guard.hurry()
            time.sleep(_LOAD_LOOK_S)

    def follow(self, waiting: Prepared | None = None) -> None:
        """On the other ranks: requests until rank 0 ends. Raises: WorkerError: a rank failed.

        Args: waiting: the first request, if it was prepared in the start.
        """
        self._waiting = waiting
        threading.Thread(target=self._watch_load, name="watch load", daemon=True).start()
        while True:
            command = self.connection.control.exchange()
            if command["op"] == "end":
                return
            with self._guarded():
                try:
                    with self.connection.control.request():
                        self._take_part(command)
                except Cancelled:
                    continue
                except Exception as error:
                    raise self._everybodys(error) from error
                finally:
                    self._job = None

    def close(self) -> None:
        """Let the other ranks end, leave the run, free the weights. After a failure nobody is waited for.

        Raises: InternalError: a rank failed; this process is of no more use.
        """
        guard = self.connection.guard
        try:
            if guard is not None and guard.failure is None and self.connection.control.leads:
                self.connection.control.exchange({"op": "end"})
        finally:
            self.connection.close()
            super().close()
        if guard is not None and guard.failure is not None:
            raise guard.failure

    def measure(self, prepared: Prepared, steps: int) -> list[float]:
        """On rank 0, for benches: condition and take some steps on all ranks, decode nothing; seconds of each step."""
        assert isinstance(prepared, RankPrepared), "made by this engine's prepare"
        with self._guarded():
            self.connection.control.exchange({"op": "measure", "body": prepared.body, "steps": steps})
            try:
                with self.connection.control.request():
                    return take_steps(self, self.start_job(prepared), steps)
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._job = None

    def _watch_load(self) -> None:
        """A load that fails is everybody's failure also while no request waits for it."""
        with suppress(WorkerError):  # the guard ends this rank
            self.wait_resident(lambda done, total: None, _LOAD_LOOK_S)

    def _take_part(self, command: dict[str, Any]) -> None:
        job = self.start_job(self._prepared(command["body"]))
        if command["op"] == "measure":
            take_steps(self, job, command["steps"])
            return
        job.condition()
        hooks = Hooks(Timeline(), threading.Event(), synchronize=self.synchronize)
        latents = denoise(job, hooks)
        for _ in job.decoders()["video"].units(latents):
            raise InternalError("a rank other than 0 was handed a unit", where="ranks")

    def _prepared(self, body: dict[str, Any]) -> Prepared:
        """The waiting request if it is this one, else made from the body."""
        waiting, self._waiting = self._waiting, None
        is_it = isinstance(waiting, RankPrepared) and waiting.body == body
        log.debug("the request was %sprepared in the start", "" if is_it else "not ")
        return waiting if waiting is not None and is_it else self.prepare(body)

    def _give_up(self, error: BaseException) -> None:
        """Leave the others at a border; where that is impossible, raise the error as everybody's."""
        guard = self.connection.guard
        if guard is not None and guard.failure is not None:
            raise guard.failure from error  # nobody is told anything any more
        if self._job is not None and guard is not None:
            self._job.close()
        if isinstance(error, Cancelled | WorkerError) and self.connection.control.can_stop:
            self.connection.control.stop()
            return
        everybodys = self._everybodys(error)
        if isinstance(error, Exception):
            raise everybodys from error

    def _everybodys(self, error: BaseException) -> BaseException:
        guard = self.connection.guard
        if guard is None:
            return error
        kind = error.kind if isinstance(error, ArtifactError) else InternalError.kind
        return guard.report(str(error) or type(error).__name__, kind)

    def _guarded(self) -> Any:
        return nullcontext() if self.connection.guard is None else self.connection.guard.job()


def take_steps(engine: Engine, job: Job, steps: int) -> list[float]:
    """Condition and take some steps; seconds of each, the device synchronised. Marks as of a request."""
    job.condition()
    engine.synchronize()
    engine.timeline.mark("conditioner_done")
    stage = job.stages()[0]
    latents = stage.start(None)
    engine.synchronize()
    engine.timeline.mark("first_dit_entry")
    seconds = []
    for step in stage.steps[:steps]:
        start = time.monotonic()
        latents = stage.sampler(latents, stage.denoiser(latents, step), step)
        engine.synchronize()
        engine.timeline.mark("first_step_done")
        seconds.append(time.monotonic() - start)
    return seconds
