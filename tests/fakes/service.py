"""A service process on a real socket for tests: started, asked, killed; nothing of it may stay behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER_KEY = "key-one-for-tests", "key-two-for-tests"
WAIT_S = 60.0  # a busy machine of two slow cores


def until(check: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """First true value of `check`, asked again and again."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := check():
            return value
        time.sleep(0.01)
    raise AssertionError(f"did not happen in {timeout_s:g} s: {what}")


class ServiceProcess:
    """One `coldframe serve` with the fake worker.

    Args:
        directory: for bundle, state, gates and logs; the state survives `kill`, so that a second process can take over.
        env: further variables (`COLDFRAME_SERVE_…`, `FAKE_…`).
    """

    def __init__(self, directory: Path, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.gate = directory / "gate"
        self.worker_log = directory / "worker.log"
        bundle = directory / "bundle"
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "manifest.json").write_text("{}")
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            self.command(bundle),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(env or {}),
            cwd=ROOT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(until(self._listening, "the socket opens")["port"])
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)

    def command(self, bundle: Path) -> list[str]:
        program = [sys.executable, str(ROOT / "tests/fakes/family.py")]
        return [*program, "--bundle", str(bundle), "--state", str(self.state)]

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("COLDFRAME_", "FAKE_"))
        }
        return {
            **kept,
            "COLDFRAME_API_KEYS": f"{KEY},{OTHER_KEY}",
            "COLDFRAME_SERVE_WORKER_COMMAND": f"{sys.executable} {ROOT / 'tests/fakes/worker.py'}",
            "COLDFRAME_SERVE_PORT": "0",
            "COLDFRAME_SERVE_RESTART_BACKOFF_S": "0.05",
            "COLDFRAME_SERVE_REQUESTS_PER_MINUTE": "0",
            "COLDFRAME_SERVE_LOG": "json",
            "COLDFRAME_SERVE_POLL_AFTER_MS": "20",
            "FAKE_GATE": str(self.gate),
            "FAKE_LOG": str(self.worker_log),
            "FAKE_TIMELINE": str(self.directory / "timeline.json"),
            **extra,
        }

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def _listening(self) -> dict[str, Any] | None:
        if self.process.poll() is not None:
            self._end_reader()
            raise AssertionError("the service ended:\n" + self.log())
        return next((entry for entry in self.entries() if entry.get("event") == "listening"), None)

    def _end_reader(self) -> None:
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    # ---- what it said and did

    def log(self) -> str:
        return "".join(self._lines)

    def entries(self) -> list[dict[str, Any]]:
        found = []
        for line in list(self._lines):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [entry for entry in found if isinstance(entry, dict)]

    def worker_lines(self) -> list[str]:
        return self.worker_log.read_text().splitlines() if self.worker_log.exists() else []

    def worker_pid(self) -> int:
        started = until(
            lambda: [line for line in self.worker_lines() if line.startswith("start ")], "a worker starts"
        )
        return int(started[-1].split()[1])

    def limit_files(self, size_bytes: int) -> None:
        """From now on no file of the service grows beyond this: a disk that has filled up."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    # ---- asking

    def create(self, prompt: str = "a harbor", **fields: Any) -> dict[str, Any]:
        response = self.client.post("/v1/videos", json={"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def get(self, video_id: str) -> dict[str, Any]:
        response = self.client.get(f"/v1/videos/{video_id}")
        assert response.status_code == 200, response.text
        return dict(response.json())

    def finished(self, video_id: str) -> dict[str, Any]:
        return dict(
            until(
                lambda: (job := self.get(video_id))["status"] in ("completed", "failed") and job,
                "the job ends",
            )
        )

    def at_step(self, video_id: str, step: int) -> None:
        """Wait until the worker has finished this many steps of the job."""
        progress = 7 + 81 * step // 8
        until(lambda: self.get(video_id)["progress"] >= progress, f"step {step}")

    def ready(self) -> ServiceProcess:
        until(lambda: self.client.get("/ready").status_code == 200, "the worker is ready")
        return self

    # ---- ending

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """Stop, and check that no process of this service is left."""
        self.client.close()
        self.gate.touch()
        if self.process.poll() is None:
            self.terminate()
        self._end_reader()
        for line in self.worker_lines():
            if line.startswith("start "):
                pid = int(line.split()[1])
                until(lambda pid=pid: not is_running(pid), f"worker {pid} ends")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextlib.contextmanager
def running(directory: Path, env: dict[str, str] | None = None) -> Iterator[ServiceProcess]:
    service = ServiceProcess(directory, env)
    try:
        yield service
    finally:
        service.close()


def raw_exchange(port: int, request: bytes, timeout_s: float = 10.0) -> bytes:
    """Bytes in, bytes out, until the server closes or the time is over."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.sendall(request)
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while chunk := connection.recv(65536):
                received += chunk
    return received
