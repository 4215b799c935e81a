"""What a simulation leaves behind: per-request columns, totals, and intervals when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
SERVED, REFUSED, ABANDONED = 0, 1, 2


@dataclass
class Intervals:
    """Begin and end of every stretch of worker life by kind, [2, k] each; workers [k] where known.

    Kinds: generating, starting, idle, lost (work undone by a preemption).
    """

    spans: dict[str, Floats]
    workers: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def clipped(self, begin: float, end: float) -> Intervals:
        """The parts inside [begin, end)."""
        spans: dict[str, Floats] = {}
        workers: dict[str, NDArray[np.int64]] = {}
        for kind, span in self.spans.items():
            cut = np.clip(span, begin, end)
            kept = cut[1] > cut[0]
            spans[kind] = cut[:, kept]
            if kind in self.workers:
                workers[kind] = self.workers[kind][kept]
        return Intervals(spans, workers)

    def seconds(self, kind: str) -> float:
        """Total length of one kind."""
        span = self.spans[kind]
        return float((span[1] - span[0]).sum())


@dataclass
class Outcome:
    """One trace under one startup and one policy.

    Args:
        waits: [N] float64 seconds from arrival to service; NaN if never served.
        cold: [N] 1 if the request was served by a worker that had just started.
        status: [N] SERVED, REFUSED or ABANDONED.
        generating_s, starting_s, idle_s, lost_s: worker-seconds; multiply by GPUs per worker for GPU-seconds.
        useless: workers that never served a request.
        alive_peak: most workers of one kind at once, summed over pools as a lower bound only if `peak_is_bound`.
    """

    waits: Floats
    cold: Flags
    status: Flags
    generating_s: float
    starting_s: float
    idle_s: float
    starts: int
    lost_s: float = 0.0
    useless: int = 0
    peak_workers: int = 0
    prewarmed: int = 0
    cancelled: int = 0
    failed_starts: int = 0
    preempted: int = 0
    evicted: int = 0
    intervals: Intervals | None = None
    engine: str = "python"
    notes: list[str] = field(default_factory=list)

    @property
    def allocated_s(self) -> float:
        """Worker-seconds from start orders to releases."""
        return self.generating_s + self.starting_s + self.idle_s + self.lost_s


def peak_overlap(intervals: Intervals) -> int:
    """Most workers alive at once; stretches that touch count as one worker."""
    spans = np.concatenate([intervals.spans[kind] for kind in intervals.spans], axis=1)
    return most_at_once(spans[:, spans[1] > spans[0]])


def most_at_once(spans: Floats) -> int:
    """Largest number of overlapping half-open intervals [begin, end), spans [2, k]."""
    if spans.shape[1] == 0:
        return 0
    begins, ends = np.sort(spans[0]), np.sort(spans[1])
    open_after = np.searchsorted(begins, begins, side="right") - np.searchsorted(ends, begins, side="right")
    return int(open_after.max())
