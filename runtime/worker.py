"""`coldframe worker`: one engine behind newline-delimited JSON on stdin and stdout.

The protocol is in docs/architecture.md. Three threads: the main thread starts the engine and runs jobs; one reads
stdin, validates requests and prepares them while weights stream in; one reports loading. The first request is handed to the
start, if that still takes it: it prepares and warms up for it. Standard output belongs to the protocol: whatever else
prints there goes to stderr. Standard library only at the top.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from loader.errors import CapabilityError, InternalError, RequestError, WorkerError
from runtime import bootstrap  # t = 0
from runtime.first_request import FOLLOWS_FLAG, FirstRequest
from runtime.pipeline import Cancelled
from runtime.timeline import Timeline

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.family import Family, Prepared
    from runtime.media.receivers import FragmentFile

PROTOCOL = 1
_LOADING_REPORT_S = 0.5

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Entry of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    from runtime.settings import settings_from_environment

    worker = Worker(sys.stdin, _take_stdout(), FirstRequest(args.request_follows))
    try:
        settings = settings_from_environment(
            bundle=args.bundle,
            manifest_sha256=args.manifest_sha256,
            device=args.device,
            timeline=args.timeline,
        )
    except RequestError as error:
        return worker.refuse(error)
    logging.basicConfig(
        level=settings.log_level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    return worker.run(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coldframe worker",
        description="One worker process that speaks newline-delimited JSON on stdin and stdout.",
    )
    parser.add_argument("--bundle", required=True, help="prepared directory")
    parser.add_argument("--manifest-sha256", help="refuse a prepared directory with another manifest")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--timeline", metavar="FILE.json", help="write the start's timeline here")
    parser.add_argument(
        FOLLOWS_FLAG,
        action="store_true",
        help="a generate command comes at once: wait for it, for a moment, before choosing what to load",
    )
    return parser


def _take_stdout() -> IO[str]:
    """The protocol's own stream on file descriptor 1; later prints of anybody go to stderr."""
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return protocol


@dataclass
class _Job:
    """A request that was taken: prepared, or still to be. fragments: new file for the video while it is made."""

    name: str
    output: Path
    fragments: Path | None = None
    prepared: Prepared | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)


class Worker:
    """The process. `run` returns its exit code when stdin ends, on `shutdown`, or after a fatal error.

    Args: commands: None: standard input is closed, which ends the worker like its end.
    """

    def __init__(self, commands: IO[str] | None, events: IO[str], first: FirstRequest) -> None:
        self._commands = commands
        self._events = events
        self._first = first
        self._write_lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._family_known = threading.Event()
        self._family: Family | None = None
        self._abandoned = threading.Event()
        self._first_taken_ns: int | None = None
        self._fatal: WorkerError | None = None  # weights that cannot be had, or are damaged

    def run(self, settings: Any) -> int:
        self.send("hello", protocol=PROTOCOL, pid=os.getpid())
        try:
            self.read_commands_from_now_on()
            engine, _ = bootstrap.start(settings, on_family=self._set_family, first=self._first)
            with engine:
                reporter = threading.Thread(
                    target=self._report_loading, args=(engine,), name="progress", daemon=True
                )
                reporter.start()
                self._serve(engine)
            if self._fatal is not None:
                return self._fatal.exit_code  # it has been sent
        except WorkerError as error:
            self._fail(error)
            return error.exit_code
        except Exception as error:
            log.exception("worker failed")
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
            return InternalError.exit_code
        return 0

    def refuse(self, error: WorkerError) -> int:
        """It cannot even start: say why, as `run` does."""
        self.send("hello", protocol=PROTOCOL, pid=os.getpid())
        self._fail(error)
        return error.exit_code

    def stop(self) -> None:
        """Cancel everything and end, from any thread or a signal handler."""
        self._abandoned.set()
        for job in list(self._jobs.values()):
            job.cancelled.set()
        self._queue.put(None)

    def send(self, event: str, **values: object) -> None:
        line = json.dumps({"event": event, **values}, default=str) + "\n"
        with self._write_lock:
            try:
                self._events.write(line)
                self._events.flush()
            except (BrokenPipeError, ValueError):
                self._abandoned.set()

    def read_commands_from_now_on(self) -> None:
        """Start the thread that obeys commands, on rank 0. Raises: RequestError: the ranks' variables are wrong."""
        from runtime.parallel.environment import rank_environment

        if rank_environment().rank:
            return  # rank 0 says what there is to do
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()

    # --- commands, on their own thread ---

    def _read_commands(self) -> None:
        try:
            for line in self._commands or ():
                if line.strip():
                    self._obey_line(line)
        finally:  # also if what reads fails: nobody could end this process otherwise
            self._first.close()
            self.stop()

    def _obey_line(self, line: str) -> None:
        try:
            self._obey(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            problem = RequestError(f"unreadable command: {error}", where="protocol")
            self.send("error", job=None, error=problem.as_dict())

    def _obey(self, command: Mapping[str, Any]) -> None:
        operation = command["op"]
        if operation == "generate":
            fragments = command.get("fragments")
            taken = _Job(str(command["job"]), Path(command["output"]), Path(fragments) if fragments else None)
            self._take(taken, command["request"])
        elif operation == "cancel":
            job = self._jobs.get(str(command["job"]))
            if job is not None:
                job.cancelled.set()
        elif operation == "shutdown":
            self._queue.put(None)
        else:
            raise ValueError(f"op {operation!r}; allowed: generate, cancel, shutdown")

    def _take(self, job: _Job, body: Mapping[str, object]) -> None:
        self._first_taken_ns = self._first_taken_ns or time.monotonic_ns()
        self._jobs[job.name] = job
        try:
            job.prepared = self._prepare(body)
        except WorkerError as error:
            self._end(job, "error", error=error.as_dict())
            return
        if job.prepared is None:
            return  # the start failed; that error has been sent
        self.send("accepted", job=job.name, request=dict(job.prepared.report))
        self._queue.put(job)

    def _prepare(self, body: Mapping[str, object]) -> Prepared | None:
        """By the start, if it takes the request; else here, as soon as the family is known. None: the start failed."""
        if isinstance(body, Mapping) and self._first.offer(body):
            return self._first.result()
        self._family_known.wait()
        return self._family.prepare(self._family.parse(body)) if self._family is not None else None

    def _set_family(self, family: Family) -> None:
        self._family = family
        self._family_known.set()

    # --- jobs, on the main thread ---

    def _serve(self, engine: Engine) -> None:
        is_first = True
        while not self._abandoned.is_set():
            job = self._queue.get()
            if job is None:
                return
            if is_first:
                engine.timeline.mark("first_request", self._first_taken_ns)
            self._run(engine, job, engine.timeline if is_first else Timeline())
            if is_first:
                engine.write_timeline()  # again: now with the first request
                self._rehash_beside(engine)
            is_first = False

    def _run(self, engine: Engine, job: _Job, timeline: Timeline) -> None:
        if job.cancelled.is_set():
            self._end(job, "cancelled")
            return
        assert job.prepared is not None
        try:
            with self._fragments_of(job) as receiver:
                result = engine.run(
                    job.prepared,
                    job.output,
                    timeline=timeline,
                    cancelled=job.cancelled,
                    on_phase=lambda phase: self.send("phase", job=job.name, phase=phase),
                    on_step=lambda done, total: self.send("step", job=job.name, step=done, steps=total),
                    on_frames=lambda done, total: self.send("frames", job=job.name, frames=done, total=total),
                    receiver=receiver,
                )
        except Cancelled:
            if self._fatal is not None:
                self._end(job, "error", error=self._fatal.as_dict())
            else:
                self._end(job, "cancelled")
        except WorkerError as error:
            self._end(job, "error", error=error.as_dict())
        else:
            self._end(job, "done", result={**result, "headline": timeline.headline()})

    def _fragments_of(self, job: _Job) -> AbstractContextManager[FragmentFile | None]:
        """The file that the job's fragments go to; removed if the job does not come to its end."""
        if job.fragments is None:
            return nullcontext()
        from runtime.media.receivers import FragmentFile

        return FragmentFile(job.fragments, lambda size: self.send("fragment", job=job.name, bytes=size))

    def _end(self, job: _Job, event: str, **values: object) -> None:
        self._jobs.pop(job.name, None)
        self.send(event, job=job.name, **values)

    def _fail(self, error: WorkerError) -> None:
        self._first.abandon()
        self._family_known.set()
        self.send("error", job=None, error=error.as_dict())

    def _give_up_for(self, error: WorkerError) -> None:
        """The weights are no good: say so, give up the running job, take no other."""
        self._fatal = error
        self._fail(error)
        self.stop()

    # --- loading and hashing, on threads of their own ---

    def _report_loading(self, engine: Engine) -> None:
        from loader.progress import StreamClosed

        try:
            engine.wait_resident(
                lambda done, total: self.send("loading", bytes=done, total_bytes=total),
                every_s=_LOADING_REPORT_S,
            )
        except StreamClosed:
            return  # the worker ends, for a reason of its own
        except WorkerError as error:
            self._give_up_for(error)
            return
        path = engine.write_timeline()  # puts the load's marks into the headline
        self.send("ready", timeline={"headline": engine.timeline.headline(), "path": path})

    def _rehash_beside(self, engine: Engine) -> None:
        """After the first request, where the settings ask for it. What was computed with damaged weights may be wrong."""
        threads = engine.settings.rehash_threads
        if threads:
            threading.Thread(target=self._rehash, args=(engine, threads), name="rehash", daemon=True).start()

    def _rehash(self, engine: Engine, threads: int) -> None:
        from loader.progress import StreamClosed

        try:
            engine.rehash(threads)
        except StreamClosed:
            return  # the worker ends, for a reason of its own
        except CapabilityError as error:
            log.warning("the prepared directory is not hashed: %s", error)
        except WorkerError as error:
            self._give_up_for(error)
        else:
            log.info("every byte of the prepared directory is as its manifest says")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
