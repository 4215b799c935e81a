"""What happened when, from the first instruction on: marks and spans of one start, cheap enough to be always on.

All times are `time.monotonic_ns()`, which every process of a host shares, so the reader child's spans need no
translation. Standard library only. `runtime.timeline_views` turns a timeline into Perfetto JSON and a picture.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

HEADLINE = (
    "first_request",
    "first_read",
    "context_ready",
    "torch_ready",
    "conditioner_done",
    "first_dit_entry",
    "first_step_done",
    "all_weights_resident",
    "first_frame_out",
    "mp4_complete",
)
"""Marks that a start reports, in the order in which they usually happen; `first_request` where a worker took one."""


@dataclass(frozen=True)
class Mark:
    """One point in time."""

    name: str
    t_ns: int
    thread: str
    args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """One piece of work on one thread (or in the reader process, named as a thread)."""

    name: str
    start_ns: int
    end_ns: int
    thread: str
    args: dict[str, object] = field(default_factory=dict)


class Timeline:
    """Marks and spans in the order in which they were recorded; safe to use from several threads.

    Args:
        origin_ns: `time.monotonic_ns()` of the first instruction; all reported seconds count from it.
    """

    def __init__(self, origin_ns: int | None = None) -> None:
        self.origin_ns = time.monotonic_ns() if origin_ns is None else origin_ns
        self.marks: list[Mark] = []
        self.spans: list[Span] = []
        self.facts: dict[str, object] = {}
        self._first: dict[str, int] = {}
        self._lock = threading.Lock()

    def mark(self, name: str, t_ns: int | None = None, **args: object) -> None:
        """Record a point in time; the first mark of a name is the one that `headline` reports."""
        t_ns = time.monotonic_ns() if t_ns is None else t_ns
        with self._lock:
            self.marks.append(Mark(name, t_ns, threading.current_thread().name, dict(args)))
            self._first.setdefault(name, t_ns)

    @contextlib.contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """Record the duration of a `with` block, also when it fails."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            span = Span(name, start_ns, time.monotonic_ns(), threading.current_thread().name, dict(args))
            with self._lock:
                self.spans.append(span)

    def add_span(
        self, name: str, start_ns: int, end_ns: int, *, thread: str | None = None, **args: object
    ) -> None:
        """Record work that was timed elsewhere."""
        thread = threading.current_thread().name if thread is None else thread
        with self._lock:
            self.spans.append(Span(name, start_ns, end_ns, thread, dict(args)))

    def note(self, **facts: object) -> None:
        """Record choices and their reasons (device, loader path, ring size, fallbacks)."""
        with self._lock:
            self.facts.update(facts)

    def seconds(self, name: str) -> float | None:
        """Seconds from the origin to the first mark of this name; None if it did not happen."""
        t_ns = self._first.get(name)
        return None if t_ns is None else (t_ns - self.origin_ns) / 1e9

    def headline(self) -> dict[str, float]:
        """The marks of `HEADLINE` that happened, in seconds from the origin."""
        found = ((name, self.seconds(name)) for name in HEADLINE)
        return {name: round(value, 6) for name, value in found if value is not None}


class Laps:
    """What each of some pieces of work took that come one after the other: `seconds`, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """One ends, and the next begins."""
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 4), now


def process_start_ns() -> int | None:
    """`time.monotonic_ns()` at which the kernel started this process (10 ms steps); None where /proc is absent."""
    try:
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 (pathlib is not imported on the cold path)
            start_ticks = int(file.read().rpartition(b")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.monotonic_ns() - int(age_s * 1e9)
