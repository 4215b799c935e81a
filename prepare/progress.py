"""How far prepare is: bytes, rate, time left. Drawn on a terminal, silent elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

_INTERVAL_S = 0.2
_BAR_WIDTH = 24


@dataclass(frozen=True)
class ProgressReport:
    """`done_bytes` of `total_bytes` are processed; `remaining_s` is None until a rate is known."""

    done_bytes: int
    total_bytes: int
    rate_gbps: float
    remaining_s: float | None


class Progress:
    """Counts bytes from several threads and calls `report` at most five times a second, and once at the end."""

    def __init__(
        self,
        total_bytes: int,
        report: Callable[[ProgressReport], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._report, self._clock = total_bytes, report, clock
        self._done = 0
        self._start = self._last = clock()
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        """More bytes are done."""
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if self._report is not None and (now - self._last >= _INTERVAL_S or self._done >= self._total):
                self._last = now
                self._report(self._describe(now))

    def _describe(self, now: float) -> ProgressReport:
        elapsed = now - self._start
        rate = self._done / elapsed if elapsed > 0 else 0.0
        remaining = (self._total - self._done) / rate if rate else None
        return ProgressReport(self._done, self._total, rate / 1e9, remaining)


def terminal_renderer(stream: TextIO) -> Callable[[ProgressReport], None] | None:
    """A function that redraws one line on `stream`, or None if `stream` is not a terminal."""
    return (lambda report: _draw(stream, report)) if stream.isatty() else None


def _draw(stream: TextIO, report: ProgressReport) -> None:
    stream.write(
        f"\r{progress_line(report)}\x1b[K" + ("\n" if report.done_bytes >= report.total_bytes else "")
    )
    stream.flush()


def progress_line(report: ProgressReport) -> str:
    """One line of text: bar, bytes, rate, time left."""
    share = report.done_bytes / report.total_bytes if report.total_bytes else 1.0
    bar = "#" * round(share * _BAR_WIDTH)
    left = "" if report.remaining_s is None else f", {format_seconds(report.remaining_s)} left"
    done, total = report.done_bytes / 1e9, report.total_bytes / 1e9
    return f"[{bar:<{_BAR_WIDTH}}] {share:4.0%}  {done:.1f}/{total:.1f} GB, {report.rate_gbps:.2f} GB/s{left}"


def format_seconds(seconds: float) -> str:
    """`75` → `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
