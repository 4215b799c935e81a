"""Every retention at once: idle gaps by concurrency level.

Under newest-idle dispatch the idle workers form a stack, so each worker slot is a concurrency level. When the number
of busy workers falls from n + 1 to n, slot n + 1 becomes idle; it is used again at the next rise from n to n + 1. That
gap does not depend on the retention. One sort therefore gives starts and idle time for every retention: exactly for
startup 0, as an estimate otherwise (0.4 points of share up to 20 s on the reference workload).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scripts.replay.traces import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RetentionCurve:
    """Sorted gaps of all levels of all pools.

    Args:
        gaps: [k] float64 ascending, seconds between a level's fall and its next rise.
        sums: [k + 1] float64, cumulative sums of `gaps` from 0.
        slots: number of levels ever reached, summed over pools: starts that no retention avoids.
        requests, generation_s: of the trace.
        gap_levels: [k] int32, the level of each gap.
    """

    gaps: Floats
    sums: Floats
    slots: int
    requests: int
    generation_s: float
    gap_levels: NDArray[np.int32]

    def starts(self, retention: Floats | float) -> NDArray[np.int64]:
        """Workers started under each retention: gaps longer than it, plus the first use of each slot."""
        return len(self.gaps) - np.searchsorted(self.gaps, retention, side="right") + self.slots

    def idle_s(self, retention: Floats | float) -> Floats:
        """Idle seconds under each retention; every slot idles out once at the end."""
        kept = np.searchsorted(self.gaps, retention, side="right")
        return np.asarray(
            self.sums[kept] + (len(self.gaps) - kept + self.slots) * np.asarray(retention), dtype=np.float64
        )

    def share(self, retention: Floats | float, startup_s: float) -> Floats:
        """Estimated share of GPU time generating."""
        overhead = self.starts(retention) * startup_s + self.idle_s(retention)
        return np.asarray(self.generation_s / (self.generation_s + overhead), dtype=np.float64)

    def cost_s(self, retention: Floats | float, startup_s: float, wait_value: float) -> Floats:
        """Overhead plus priced waiting, GPU-seconds per request: (idle + S·(1 + w)·starts) / requests."""
        total = self.idle_s(retention) + self.starts(retention) * startup_s * (1 + wait_value)
        return np.asarray(total / self.requests, dtype=np.float64)

    def best(self, startup_s: float, wait_value: float) -> tuple[float, float]:
        """Cheapest retention in hindsight and its cost per request; only 0 and the gaps themselves can be optimal."""
        candidates = np.concatenate(([0.0], self.gaps))
        costs = self.cost_s(candidates, startup_s, wait_value)
        index = int(np.argmin(costs))
        return float(candidates[index]), float(costs[index])

    def clairvoyant_s(self, startup_s: float, wait_value: float) -> float:
        """Cost per request of keeping exactly the workers that are worth it: the lower bound under newest-idle."""
        price = startup_s * (1 + wait_value)
        total = np.minimum(self.gaps, price).sum() + self.slots * price
        return float(total / self.requests)

    def best_by_level(self, startup_s: float, wait_value: float) -> float:
        """Cost per request if each level had its own best retention (hindsight)."""
        price = startup_s * (1 + wait_value)
        total = self.slots * price
        order = np.argsort(self.gap_levels, kind="stable")
        borders = np.flatnonzero(np.diff(self.gap_levels[order])) + 1
        for gaps in np.split(self.gaps[order], borders):
            below = np.cumsum(gaps)
            above = np.arange(len(gaps) - 1, -1, -1)
            costs = below + above * (gaps + price)
            total += min(len(gaps) * price, float(costs.min())) if len(gaps) else 0.0
        return total / self.requests


def retention_curve(trace: Trace) -> RetentionCurve:
    """Gaps of a trace; exact for startup 0 and newest-idle dispatch."""
    parts = [_pool_gaps(trace.arrivals[rows], trace.durations[rows]) for rows in trace.pool_rows()]
    gaps = np.concatenate([gaps for gaps, _, _ in parts])
    offsets = np.cumsum([0] + [slots for _, _, slots in parts])
    levels = np.concatenate([levels + offset for (_, levels, _), offset in zip(parts, offsets, strict=False)])
    order = np.argsort(gaps, kind="stable")
    gaps = gaps[order]
    return RetentionCurve(
        gaps,
        np.concatenate(([0.0], np.cumsum(gaps))),
        int(offsets[-1]),
        len(trace),
        float(trace.durations.sum()),
        levels[order].astype(np.int32),
    )


def _pool_gaps(arrivals: Floats, durations: Floats) -> tuple[Floats, NDArray[np.int64], int]:
    """Gaps [k], their levels [k], and the highest level of one pool."""
    count = len(arrivals)
    if count == 0:
        return np.empty(0), np.empty(0, dtype=np.int64), 0
    ends = arrivals + durations
    times = np.concatenate((arrivals, ends))
    # Ties: completions before arrivals, but a zero-length request completes right after its own arrival.
    rank = np.concatenate((2 * np.arange(count), np.where(ends > arrivals, -1, 2 * np.arange(count) + 1)))
    order = np.lexsort((rank, times))
    is_arrival = order < count
    busy = np.cumsum(np.where(is_arrival, 1, -1))
    level = np.where(is_arrival, busy, busy + 1)
    by_level = np.argsort(level, kind="stable")
    moments, arrival, levels = times[order][by_level], is_arrival[by_level], level[by_level]
    closes = ~arrival[:-1] & arrival[1:] & (levels[:-1] == levels[1:])
    return (moments[1:] - moments[:-1])[closes], levels[1:][closes], int(levels[-1])
