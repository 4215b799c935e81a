"""Prepare and validate one tree in a process of its own, so that peak memory is theirs. For `scripts.bench.prepare_full`.

    python -m scripts.bench.prepare_measured CHECKPOINT TARGET MAX_FILE_BYTES

A line of JSON on stdout after prepare and one after validate; progress with the time of day on stderr.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
from prepare.progress import ProgressReport, progress_line
from prepare.validate import require_valid, validate_directory

_SAID_EVERY_S = 10.0


class Watch:
    """Says how far prepare is, and remembers the least memory that the machine had left meanwhile."""

    def __init__(self) -> None:
        self.least_available = memory("/proc/meminfo", "MemAvailable")
        self._looked = self._said = time.monotonic()

    def __call__(self, report: ProgressReport) -> None:
        now = time.monotonic()
        if now - self._looked >= 1:
            self._looked = now
            self.look()
        if now - self._said >= _SAID_EVERY_S:
            self._said = now
            print(f"{time.strftime('%H:%M:%S')}  {progress_line(report)}", file=sys.stderr, flush=True)

    def look(self) -> None:
        self.least_available = min(self.least_available, memory("/proc/meminfo", "MemAvailable"))


def memory(path: str, key: str) -> int:
    """Bytes of one line of a file of /proc."""
    lines = dict(line.split(":", 1) for line in Path(path).read_text("utf-8").splitlines() if ":" in line)
    return int(lines[key].split()[0]) * 1024


def main(arguments: Sequence[str]) -> int:
    checkpoint, target, file_bytes = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    for name in ("numpy", "tokenizers", "torch"):  # their memory is not prepare's
        importlib.import_module(name)
    before, watch = memory("/proc/self/status", "VmRSS"), Watch()
    options = PrepareOptions(tasks=("t2va",), max_file_bytes=file_bytes)
    result = prepare_checkpoint(checkpoint, target, options, report=watch)
    watch.look()
    _print(
        prepare_s=result.seconds,
        bytes_out=result.num_bytes,
        peak=memory("/proc/self/status", "VmHWM") - before,
        least_available=watch.least_available,
    )
    started = time.monotonic()
    require_valid(validate_directory(target), target)
    _print(
        validate_s=time.monotonic() - started,
        peak_with_validate=memory("/proc/self/status", "VmHWM") - before,
    )
    return 0


def _print(**figures: float) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
