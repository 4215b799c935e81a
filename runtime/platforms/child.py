"""A worker process driven by blocking calls, for platforms whose functions run one job at a time. Standard library only.

Starting returns at once, so that a platform's start hook can return while weights stream. `run` waits in short turns in
the calling thread: a platform's cancellation arrives there as an exception, which stops the job at its next step.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loader.errors import InternalError
from runtime.first_request import FOLLOWS_FLAG
from runtime.settings import OTHER_PROGRAMS

COMMAND = (sys.executable, "-m", "runtime.worker")
TURN_S = 0.2
CANCEL_GRACE_S = 60.0
CANCELLED = {"kind": "cancelled", "message": "cancelled"}

OnEvent = Callable[[dict[str, Any]], None]


class JobFailed(Exception):
    """The worker refused or failed a job; `error` is the error object of the worker protocol."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message", "the job failed")))
        self.error = dict(error)

    @property
    def is_refusal(self) -> bool:
        """Whether the request is at fault, so that trying again cannot help."""
        return self.error.get("kind") == "bad_request"


class WorkerChild:
    """One worker, restarted on the next `run` after it died.

    Args:
        bundle: prepared directory.
        command: program and arguments before `--bundle`.
        started_ns: `time.time_ns()` of the platform's first instruction, passed on for the timeline's origin.
    """

    def __init__(self, bundle: Path, command: Sequence[str] = COMMAND, started_ns: int | None = None) -> None:
        self._command = (*command, "--bundle", str(bundle))
        self._started_ns = started_ns
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._cancelled: set[str] = set()  # jobs to stop that have not ended
        self.state: dict[str, Any] = {
            "phase": "starting",
            "loaded_bytes": 0,
            "total_bytes": 0,
            "headline": {},
        }
        self.start()

    def start(self, *flags: str) -> None:
        """Spawn the process; milliseconds.

        A platform's start hook does not see the call that it is for, if there is one, and its worker waits for none: the
        call comes while the worker starts.
        """
        environ = {name: value for name, value in os.environ.items() if not name.startswith(OTHER_PROGRAMS)}
        self.state = {**self.state, "phase": "starting"}
        self._events = queue.SimpleQueue()
        self._process = subprocess.Popen(
            (*self._command, *flags),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        arguments = (self._process, self._events)
        self._reader = threading.Thread(target=self._read, args=arguments, name="worker-events", daemon=True)
        self._reader.start()

    def run(
        self, job: str, request: Mapping[str, Any], output: Path, on_event: OnEvent | None = None
    ) -> dict[str, Any]:
        """Make one video; blocks. Returns the worker's result.

        Raises: JobFailed: refused, failed or cancelled, also before it was its turn; InternalError: the worker died.
            Anything raised in this thread meanwhile (a platform's cancellation) stops the job first and then goes on.
        """
        if self._closed:
            raise InternalError("the worker is closed")
        try:
            return self._run(job, request, output, on_event)
        finally:
            self._cancelled.discard(job)

    def _run(
        self, job: str, request: Mapping[str, Any], output: Path, on_event: OnEvent | None
    ) -> dict[str, Any]:
        if job in self._cancelled:
            raise JobFailed(CANCELLED)
        if self._process is None or self._process.poll() is not None:
            self._end()
            self.start(FOLLOWS_FLAG)
        self._send({"op": "generate", "job": job, "request": dict(request), "output": str(output)})
        if job in self._cancelled:  # since it was looked at, and perhaps before the worker knew of the job
            self._send({"op": "cancel", "job": job})
        try:
            return self._wait(job, on_event)
        except (JobFailed, InternalError):
            raise
        except BaseException:
            self._stop(job)
            raise

    def cancel(self, job: str) -> None:
        """Stop a job from another thread, running or yet to come; its `run` raises JobFailed with the kind `cancelled`."""
        self._cancelled.add(job)
        self._send({"op": "cancel", "job": job})

    def close(self, timeout_s: float = 10.0) -> None:
        """End the process. Works twice, and leaves no thread."""
        self._closed = True
        process = self._process
        if process is not None and process.poll() is None:
            self._send({"op": "shutdown"})
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        self._end()

    def _wait(self, job: str, on_event: OnEvent | None) -> dict[str, Any]:
        while True:
            try:
                event = self._events.get(timeout=TURN_S)
            except queue.Empty:
                continue
            if event is None:
                code = self._process.wait() if self._process is not None else None
                raise InternalError("the worker died during the job", found=f"exit code {code}")
            if event.get("job") != job:
                continue
            match event["event"]:
                case "done":
                    return dict(event.get("result") or {})
                case "error":
                    raise JobFailed(event.get("error") or {})
                case "cancelled":
                    raise JobFailed(CANCELLED)
                case _ if on_event is not None:
                    on_event(event)

    def _stop(self, job: str) -> None:
        """After an interruption: the next job must find an idle worker, or a fresh one."""
        self.cancel(job)
        deadline = time.monotonic() + CANCEL_GRACE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=TURN_S)
                if event is None or (
                    event.get("job") == job and event["event"] in ("done", "error", "cancelled")
                ):
                    return
        self._end()

    def _send(self, message: Mapping[str, Any]) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # a dead worker is reported by its end
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()

    def _read(
        self, process: subprocess.Popen[bytes], events: queue.SimpleQueue[dict[str, Any] | None]
    ) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, TypeError, KeyError):
                continue
            if kind == "hello":
                self.state = {**self.state, "phase": "loading"}
            elif kind == "loading":
                self.state = {
                    **self.state,
                    "loaded_bytes": event.get("bytes", 0),
                    "total_bytes": event.get("total_bytes", 0),
                }
            elif kind == "ready":
                headline = (event.get("timeline") or {}).get("headline") or {}
                self.state = {
                    **self.state,
                    "phase": "ready",
                    "headline": headline,
                    "started_ns": self._started_ns,
                }
            elif kind == "error" and event.get("job") is None:
                self.state = {**self.state, "phase": "failed", "failure": event.get("error")}
            else:
                events.put(event)
        events.put(None)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._reader is not None:
            self._reader.join()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
