"""The fake worker with fragments: at `[live@3]` it appends `FAKE_FRAGMENT_BYTES` bytes to the job's fragments at step 3.

The bytes of fragment i are all i. They are no video: the service passes them on as they are.
"""

from __future__ import annotations

import os
import queue
import re
import sys
from pathlib import Path
from typing import Any

from worker import FakeWorker, emit, note  # beside this file, which runs as a program


class Jobs(queue.Queue[Any]):
    """Remembers where the fragments of every job go."""

    def __init__(self) -> None:
        super().__init__()
        self.fragments: dict[str, Path] = {}

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if item is not None:
            self.fragments[item["job"]] = Path(item["fragments"])
        super().put(item, block, timeout)


class LiveWorker(FakeWorker):
    jobs: Jobs

    def __init__(self) -> None:
        super().__init__()
        self.jobs = Jobs()

    def step(self, job: str, prompt: str, step: int) -> bool:
        marks = [int(at) for at in re.findall(r"\[live@(\d+)\]", prompt)]
        if step in marks:
            index = marks.index(step)
            with self.jobs.fragments[job].open("ab" if index else "xb") as file:
                file.write(bytes([index + 1]) * int(os.environ["FAKE_FRAGMENT_BYTES"]))
            emit(event="fragment", job=job, bytes=self.jobs.fragments[job].stat().st_size)
        return super().step(job, prompt, step)


def main() -> int:
    emit(event="hello", protocol=1, pid=os.getpid())
    note(f"start {os.getpid()}")
    LiveWorker().run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
