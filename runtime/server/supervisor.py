"""One worker process: started, read line by line, restarted with growing pauses, told to leave, killed.

The supervisor knows nothing of jobs. It hands every message of the worker to `on_event` and every death to `on_exit`.
A worker that exits with the code of a wrong setting, a damaged prepared directory or a missing capability is not
restarted: the next one would fail the same way, and a crash loop on a platform only delays its replacement.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loader.errors import ArtifactError, CapabilityError, InternalError, RequestError
from runtime.first_request import FOLLOWS_FLAG
from runtime.server.config import ServerConfig, worker_environment
from runtime.server.ranks import GRACE_S as RANKS_GRACE_S

PROTOCOL = 1
LINE_LIMIT = 4 << 20
PERMANENT_EXIT_CODES = (RequestError.exit_code, ArtifactError.exit_code, CapabilityError.exit_code)
HEALTHY_AFTER_S = 60.0
EXIT_GRACE_S = 5.0  # from the end of a worker's output to its exit code

STARTING, LOADING, READY, RESTARTING, FAILED, STOPPED = (
    "starting",
    "loading",
    "ready",
    "restarting",
    "failed",
    "stopped",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerStatus:
    """What the service knows about its worker; `failure` is the last error object the worker sent about itself."""

    phase: str = STARTING
    pid: int | None = None
    starts: int = 0
    loaded_bytes: int = 0
    total_bytes: int = 0
    headline: dict[str, float] = field(default_factory=dict)
    failure: dict[str, Any] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether it has said hello and takes requests."""
        return self.phase in (LOADING, READY)


class Supervisor:
    """Keeps one worker alive. All methods run on the event loop.

    Args:
        on_event: called with every message of the worker, after `status` has been brought up to date.
        on_exit: called after a worker has ended for whatever reason, with its exit code.
        has_request: whether a job waits for a worker that is being started; it must be sent when that one says hello.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_event: Callable[[dict[str, Any]], None],
        on_exit: Callable[[int], None],
        has_request: Callable[[], bool],
    ) -> None:
        self.status = WorkerStatus()
        self._config = config
        self._on_event = on_event
        self._on_exit = on_exit
        self._has_request = has_request
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._pid_file = config.state / "worker.pid"
        # The output is rank 0's, the exit code that of the first rank that failed: the launcher has it when all have ended.
        self._exit_grace_s = EXIT_GRACE_S if config.ranks == 1 else RANKS_GRACE_S + EXIT_GRACE_S
        self._timeline = (config.state / "starts" / "timeline.json").absolute()

    def start(self) -> None:
        """Start the first worker; returns at once."""
        kill_leftover(self._pid_file)
        self._task = asyncio.create_task(self._run(), name="worker-supervisor")

    async def send(self, message: dict[str, Any]) -> None:
        """Queue one message. A dead worker swallows it: its end is reported through `on_exit`."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()

    def kill(self, reason: str) -> None:
        """End the present worker now; the next one is started."""
        if self._process is not None:
            log.warning("killing the worker", extra={"reason": reason, "pid": self._process.pid})
            _kill_group(self._process.pid)

    async def close(self, timeout_s: float) -> None:
        """Ask the worker to leave, wait, then kill it. Works twice."""
        self._closing.set()
        await self.send({"op": "shutdown"})
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        if self._task is not None:
            _, pending = await asyncio.wait([self._task], timeout=timeout_s)
            if pending:
                self.kill("did not leave in time")
                await self._task
        self.status = replace(self.status, phase=STOPPED, pid=None)

    async def _run(self) -> None:
        pause_s = self._config.restart_backoff_s
        while not self._closing.is_set():
            began = time.monotonic()
            code = await self._run_one()
            if code in PERMANENT_EXIT_CODES:
                self.status = replace(self.status, phase=FAILED, pid=None)
            elif not self._closing.is_set():
                self.status = replace(self.status, phase=RESTARTING, pid=None)
            self._on_exit(code)
            if self.status.phase == FAILED:
                log.error("the worker cannot run here and is not restarted", extra={"exit_code": code})
                return
            if time.monotonic() - began > HEALTHY_AFTER_S:
                pause_s = self._config.restart_backoff_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)
            pause_s = min(2 * pause_s, self._config.restart_backoff_max_s)

    async def _run_one(self) -> int:
        config = self._config
        command = (
            *config.command,
            "--bundle",
            str(config.bundle),
            "--timeline",
            str(self._timeline),
            *((FOLLOWS_FLAG,) if self._has_request() else ()),
            *config.worker_args,
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # so that its children die with it, and a terminal's ^C reaches us only
                limit=LINE_LIMIT,
                env=worker_environment(os.environ),
            )
        except OSError as error:
            log.exception("the worker cannot be started")
            failure = InternalError("the worker cannot be started", found=error.strerror).as_dict()
            self.status = replace(self.status, failure=failure)
            return 1
        self._process = process
        self.status = WorkerStatus(STARTING, process.pid, self.status.starts + 1, failure=self.status.failure)
        _write_pid(self._pid_file, process.pid)
        if self._closing.is_set():  # while it was being started, so that nobody has told it to leave
            self.kill("the service ends")
        log.info("worker started", extra={"pid": process.pid, "start": self.status.starts})
        try:
            await self._read(process)
        finally:
            _kill_group(process.pid)  # also children that outlived it, and a worker that closed its output
            code = await process.wait()
            self._process = None
            self._pid_file.unlink(missing_ok=True)
        log.info("worker ended", extra={"pid": process.pid, "exit_code": code})
        return code

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                return self.kill("sent an endless line")
            if not line:
                with contextlib.suppress(TimeoutError):  # a clean end gets time for its exit code
                    await asyncio.wait_for(process.wait(), self._exit_grace_s)
                return None
            event = _parse(line)
            if event is None:
                continue
            if event["event"] == "hello" and event.get("protocol") != PROTOCOL:
                log.error(
                    "worker speaks another protocol",
                    extra={"found": event.get("protocol"), "allowed": PROTOCOL},
                )
                return self.kill("speaks another protocol")
            try:
                self._note(event)
                self._on_event(event)
            except (ValueError, TypeError, KeyError, AttributeError):
                log.exception(
                    "worker sent a message that cannot be handled", extra={"event_kind": event["event"]}
                )
                return self.kill("sent a malformed message")

    def _note(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "hello":
                self.status = replace(self.status, phase=LOADING, failure=None)
            case "loading":
                done, total = int(event.get("bytes", 0)), int(event.get("total_bytes", 0))
                self.status = replace(self.status, loaded_bytes=done, total_bytes=total)
            case "ready":
                headline = dict((event.get("timeline") or {}).get("headline") or {})
                loaded = self.status.total_bytes
                self.status = replace(self.status, phase=READY, headline=headline, loaded_bytes=loaded)
            case "error" if event.get("job") is None:
                log.error("worker failed", extra={"worker_error": event.get("error")})
                self.status = replace(self.status, failure=event.get("error") or {})


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        log.warning("worker wrote something else than a message", extra={"bytes": len(line)})
        return None
    return event


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _start_ticks(pid: int) -> str | None:
    """Start time of a process in the kernel's units: with the pid, its identity."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _write_pid(path: Path, pid: int) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop the service
        path.write_text(json.dumps([pid, _start_ticks(pid)]))


def kill_leftover(path: Path) -> None:
    """Kill the worker of a service that died without ending it, if that very process still runs."""
    try:
        pid, ticks = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if isinstance(pid, int) and ticks is not None and _start_ticks(pid) == ticks:
        log.warning("killing the worker of a service that died", extra={"pid": pid})
        _kill_group(pid)
    path.unlink(missing_ok=True)
