"""The other side of the worker protocol: one real worker process, its commands and its events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUEST = {"prompt": "rain", "size": "64x64", "num_frames": 22, "seed": 3, "schedule": "base-3"}


class Client:
    """Speaks the protocol to one worker process."""

    def __init__(self, bundle: Path, *flags: str, **environment: str) -> None:
        line = [sys.executable, "-m", "runtime.worker", "--bundle", str(bundle), "--device", "cpu", *flags]
        self.process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **environment},
        )

    def close(self) -> int:
        """End the worker by ending its commands; its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.stdout.close()

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")

    def until(self, *names: str, job: str | None = None) -> list[dict[str, Any]]:
        """All events up to and with the first of these names (of this job)."""
        events = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] in names and (job is None or events[-1].get("job") == job):
                return events
        raise AssertionError(f"the worker ended before {names}: {events}")

    def rest(self) -> list[dict[str, Any]]:
        """All events that are still to come; the worker ends by itself."""
        assert self.process.stdout is not None
        return [json.loads(line) for line in self.process.stdout]
