"""The GPU container on Modal: spawn the worker and publish progress. Standard library only, before and after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runtime.platforms.gpu import GpuRuntime

PROGRESS = "progress:"


def start_worker(bundle: Path, outputs: Path, started_ns: int, jobs: Any) -> GpuRuntime:
    """Spawn the worker and return: threads and a child process, no waiting.

    Args:
        jobs: `modal.Dict` for progress.
    """
    command = os.environ.get("COLDFRAME_MODAL_WORKER_COMMAND", "").split()

    def publish(job_id: str, last: dict[str, Any]) -> None:
        jobs.put(PROGRESS + job_id, last)

    extra: dict[str, Any] = {"command": tuple(command)} if command else {}
    return GpuRuntime(bundle, outputs, started_ns=started_ns, publish=publish, **extra)
