"""Policies that learn from idle gaps how long to keep a worker: by pool (`Hybrid`), by concurrency level (`Level`)."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.replay.arithmetic import break_even_retention
from scripts.replay.policy import Controller, Keep, Quiet, Setup

DAY_S = 86400.0


@dataclass
class Levels:
    """Idle gaps by concurrency level: from the fall below a level to the next rise to it. Independent of retention."""

    fell: dict[tuple[int, int], float] = field(default_factory=dict)

    def rise(self, pool: int, level: int, t: float) -> float | None:
        """Gap that ends now, or None at the level's first use."""
        since = self.fell.pop((pool, level), None)
        return None if since is None else t - since

    def fall(self, pool: int, level: int, t: float) -> None:
        self.fell[pool, level] = t


@dataclass(frozen=True)
class Hybrid:
    """Histogram of idle times per pool (Serverless in the Wild, ATC '20), in bins suited to GPU workers.

    Keeps until the `tail` percentile bin times 1 + margin; if even the `head` percentile leaves room for a start,
    releases at once and pre-starts at that percentile times 1 − margin. A flat histogram (CV of the bin counts below
    `cv`) keeps for the whole range; if half of the idle times are out of range, the median of the last 20 forecasts.
    """

    text: str
    range_s: float | None = None  # default 20 startups
    bin_s: float | None = None  # default half a startup
    head: float = 5.0
    tail: float = 99.0
    cv: float = 2.0
    oob: float = 0.5
    margin: float = 0.1

    def retention(self, startup_s: float, pool: str) -> None:
        return None

    def controller(self, setup: Setup) -> Controller:
        bin_s = self.bin_s or max(setup.startup_s / 2, 0.5)
        return HybridController(
            policy=self,
            startup_s=setup.startup_s,
            bin_s=bin_s,
            bins=max(int((self.range_s or 40 * bin_s) / bin_s), 1),
        )


@dataclass
class HybridController(Quiet):
    """One histogram per pool, fed by the level gaps."""

    policy: Hybrid = field(default_factory=lambda: Hybrid("hybrid"))
    startup_s: float = 0.0
    bin_s: float = 1.0
    bins: int = 1
    width_s: float = 0.0
    levels: Levels = field(default_factory=Levels)
    counts: dict[int, list[int]] = field(default_factory=dict)
    beyond: dict[int, deque[float]] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)

    def arrival(self, pool: int, level: int, t: float) -> None:
        gap = self.levels.rise(pool, level, t)
        if gap is None:
            return
        counts = self.counts.setdefault(pool, [0] * self.bins)
        if gap < self.bins * self.bin_s:
            counts[int(gap / self.bin_s)] += 1
        else:
            self.outside[pool] = self.outside.get(pool, 0) + 1
        self.beyond.setdefault(pool, deque(maxlen=20)).append(gap)

    def idle(self, pool: int, level: int, t: float) -> Keep:
        if level:
            self.levels.fall(pool, level, t)
        kept = self._decide(pool)
        if level == 0 and kept.restart_s is not None:
            # This is the worker that was started for the expected use: it stays for the width of the expectation.
            return Keep(self.width_s)
        return kept

    def _decide(self, pool: int) -> Keep:
        counts = self.counts.get(pool)
        inside, outside = sum(counts or ()), self.outside.get(pool, 0)
        whole = self.bins * self.bin_s
        if counts is None or inside + outside < 10:
            return Keep(whole)
        if outside >= self.policy.oob * (inside + outside):
            recent = sorted(self.beyond[pool])
            return self._around(recent[len(recent) // 2], recent[len(recent) // 2])
        mean = inside / self.bins
        spread = math.sqrt(sum((count - mean) ** 2 for count in counts) / self.bins) / mean
        if spread < self.policy.cv:
            return Keep(whole)
        return self._around(
            self._quantile(counts, self.policy.head), self._quantile(counts, self.policy.tail, upper=True)
        )

    def _quantile(self, counts: list[int], percent: float, *, upper: bool = False) -> float:
        need, total = percent / 100 * sum(counts), 0
        for index, count in enumerate(counts):
            total += count
            if total >= need:
                return (index + (1 if upper else 0)) * self.bin_s
        return self.bins * self.bin_s

    def _around(self, early: float, late: float) -> Keep:
        """Keep until `late`, or release now and be back before `early` if that saves more than the start costs."""
        margin = self.policy.margin
        back_at = early * (1 - margin) - self.startup_s
        until = late * (1 + margin)
        if back_at > self.startup_s:
            self.width_s = until - early * (1 - margin)
            return Keep(0.0, back_at)
        return Keep(until)


@dataclass(frozen=True)
class Level:
    """Per concurrency level, the retention that would have been cheapest over the last day.

    Minimises Σ min(gap, R) + S·(1 + w)·[gap > R] over the level's recent gaps; break-even until 20 are known.
    """

    wait_value: float
    text: str

    def retention(self, startup_s: float, pool: str) -> None:
        return None

    def controller(self, setup: Setup) -> Controller:
        return LevelController(start_cost_s=break_even_retention(setup.startup_s, self.wait_value))


@dataclass
class LevelController(Quiet):
    """Sorted gaps per level within a sliding day; the best retention is refreshed every 32 new gaps."""

    start_cost_s: float = 0.0
    levels: Levels = field(default_factory=Levels)
    recent: dict[tuple[int, int], deque[tuple[float, float]]] = field(default_factory=dict)
    ordered: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    best: dict[tuple[int, int], float] = field(default_factory=dict)
    news: dict[tuple[int, int], int] = field(default_factory=dict)

    def arrival(self, pool: int, level: int, t: float) -> None:
        gap = self.levels.rise(pool, level, t)
        if gap is None:
            return
        key = (pool, level)
        recent = self.recent.setdefault(key, deque())
        ordered = self.ordered.setdefault(key, [])
        recent.append((t, gap))
        insort(ordered, gap)
        while recent[0][0] < t - DAY_S:
            ordered.remove(recent.popleft()[1])
        self.news[key] = self.news.get(key, 0) + 1
        if len(ordered) >= 20 and (key not in self.best or self.news[key] >= 32):
            self.best[key] = best_retention(ordered, self.start_cost_s)
            self.news[key] = 0

    def idle(self, pool: int, level: int, t: float) -> Keep:
        if level:
            self.levels.fall(pool, level, t)
        return Keep(self.best.get((pool, level), self.start_cost_s))


def best_retention(ordered: Sequence[float], start_cost_s: float) -> float:
    """R that minimises Σ min(gap, R) + cost·#{gap > R} over sorted gaps; candidates are 0 and the gaps."""
    best_r, best_cost = 0.0, start_cost_s * len(ordered)
    below = 0.0
    for rank, gap in enumerate(ordered, 1):
        below += gap
        cost = below + (len(ordered) - rank) * (gap + start_cost_s)
        if cost < best_cost:
            best_r, best_cost = gap, cost
    return best_r
