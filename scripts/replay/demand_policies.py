"""Policies that start workers ahead of demand: by a forecast, by a concurrency target, by the time of day."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from scripts.replay.arithmetic import poisson_quantile
from scripts.replay.policy import Controller, Keep, Quiet, Setup

MINUTE_S, HOUR_S, DAY_S, WEEK_S = 60.0, 3600.0, 86400.0, 604800.0


@dataclass(frozen=True)
class Forecast:
    """Pre-starts to the q-quantile of demand one startup ahead, from smoothed minute rates by hour of week."""

    text: str
    quantile: float = 0.9
    smoothing: float = 0.03  # per minute: an hour moves the mean most of the way
    times: float = 2.0  # retention in startups

    def retention(self, startup_s: float, pool: str) -> None:
        return None

    def controller(self, setup: Setup) -> Controller:
        return ForecastController(tick_s=MINUTE_S, policy=self, setup=setup)


@dataclass
class ForecastController(Quiet):
    """Exponentially weighted requests per second for each (pool, hour of week), seeded by the current hour."""

    policy: Forecast = field(default_factory=lambda: Forecast("forecast"))
    setup: Setup = field(default_factory=lambda: Setup(0.0, ()))
    steps: dict[int, tuple[float, int]] = field(default_factory=dict)  # pool → since when, load
    work_s: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    current: dict[int, tuple[int, int]] = field(default_factory=dict)  # pool → minute, requests in it
    last: dict[int, float] = field(default_factory=dict)

    def load(self, pool: int, t: float, load: int) -> None:
        since, before = self.steps.get(pool, (t, 0))
        self.work_s[pool] = self.work_s.get(pool, 0.0) + before * (t - since)
        self.steps[pool] = (t, load)

    def arrival(self, pool: int, level: int, t: float) -> None:
        self.last[pool] = t
        self.seen[pool] = self.seen.get(pool, 0) + 1
        self._roll(pool, t)
        minute, count = self.current[pool]
        self.current[pool] = (minute, count + 1)

    def _roll(self, pool: int, t: float) -> None:
        """Moves finished minutes into the averages; at most a week of empty ones."""
        now = int(t // MINUTE_S)
        minute, count = self.current.get(pool, (now, 0))
        for finished in range(max(minute, now - int(WEEK_S / MINUTE_S)), now):
            key = (pool, self._hour(finished * MINUTE_S))
            observed = (count if finished == minute else 0) / MINUTE_S
            before = self.rates.get(key, observed)
            self.rates[key] = before + self.policy.smoothing * (observed - before)
        if now != minute:
            count = 0
        self.current[pool] = (now, count)

    @staticmethod
    def _hour(t: float) -> int:
        return int(t % WEEK_S // HOUR_S)

    def idle(self, pool: int, level: int, t: float) -> Keep:
        return Keep(self.policy.times * self.setup.startup_s)

    def wanted(self, pool: int, t: float, alive: int) -> int:
        self._roll(pool, t)
        rate = self.rates.get((pool, self._hour(t + self.setup.startup_s)))
        if rate is None:
            rate = self.rates.get((pool, self._hour(t)), 0.0)
        # Little's law: time in the system per request, from the load so far.
        expected = rate * self.work_s.get(pool, 0.0) / max(self.seen.get(pool, 0), 1)
        return 0 if expected < 1e-3 else poisson_quantile(expected, self.policy.quantile)

    def next_tick(self, pool: int, t: float, active: bool) -> float | None:
        silent = t - self.last.get(pool, 0.0) > WEEK_S
        return None if silent else (t // MINUTE_S + 1) * MINUTE_S


@dataclass(frozen=True)
class Target:
    """Knative-like: workers = ⌈average concurrency / target⌉ over a stable window, a panic window when it doubles."""

    text: str
    target: float = 0.7
    window_s: float = 60.0
    panic_share: float = 0.1
    panic_at: float = 2.0
    grace_s: float = 30.0
    tick_s: float = 2.0
    down_rate: float = 2.0

    def retention(self, startup_s: float, pool: str) -> None:
        return None

    def controller(self, setup: Setup) -> Controller:
        return TargetController(tick_s=self.tick_s, governs=True, policy=self)


@dataclass
class TargetController(Quiet):
    """Load over time as steps; averages over the two windows at each tick."""

    policy: Target = field(default_factory=lambda: Target("target"))
    steps: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    panic_until: dict[int, float] = field(default_factory=dict)
    empty_since: dict[int, float] = field(default_factory=dict)

    def idle(self, pool: int, level: int, t: float) -> Keep:
        return Keep(math.inf)

    def load(self, pool: int, t: float, load: int) -> None:
        steps = self.steps.setdefault(pool, deque([(-math.inf, 0)]))
        steps.append((t, load))
        while len(steps) > 1 and steps[1][0] <= t - self.policy.window_s:
            steps.popleft()

    def _average(self, pool: int, t: float, window_s: float) -> float:
        begin, total, until = t - window_s, 0.0, t
        for since, load in reversed(self.steps.get(pool, ())):
            total += load * (until - max(since, begin))
            until = since
            if since <= begin:
                break
        return total / window_s

    def wanted(self, pool: int, t: float, alive: int) -> int:
        policy = self.policy
        stable = math.ceil(self._average(pool, t, policy.window_s) / policy.target - 1e-9)
        panic = math.ceil(self._average(pool, t, policy.window_s * policy.panic_share) / policy.target - 1e-9)
        if panic >= policy.panic_at * max(alive, 1):
            self.panic_until[pool] = t + policy.window_s
        if t < self.panic_until.get(pool, -math.inf):
            return max(stable, panic, alive)
        if stable > 0:
            self.empty_since.pop(pool, None)
            return max(stable, math.floor(alive / policy.down_rate))
        since = self.empty_since.setdefault(pool, t)
        return 0 if t - since >= policy.grace_s else min(alive, 1)


@dataclass(frozen=True)
class Schedule:
    """Warm floor by time of day: `schedule:0=1,9=6,18=2` from those hours on; retention in startups besides."""

    table: tuple[tuple[float, int], ...]
    text: str
    times: float = 2.0

    def retention(self, startup_s: float, pool: str) -> None:
        return None

    def controller(self, setup: Setup) -> Controller:
        return ScheduleController(tick_s=HOUR_S, policy=self, keep_s=self.times * setup.startup_s)


@dataclass
class ScheduleController(Quiet):
    """Ticks at the table's borders, also while nothing arrives, for at most a week of silence."""

    policy: Schedule = field(default_factory=lambda: Schedule((), "schedule"))
    keep_s: float = 0.0
    last: dict[int, float] = field(default_factory=dict)

    def arrival(self, pool: int, level: int, t: float) -> None:
        self.last[pool] = t

    def idle(self, pool: int, level: int, t: float) -> Keep:
        return Keep(self.keep_s)

    def wanted(self, pool: int, t: float, alive: int) -> int:
        if t - self.last.get(pool, 0.0) > WEEK_S:
            return 0
        hour = t % DAY_S / HOUR_S
        found = self.policy.table[-1][1]
        for since, count in self.policy.table:
            if since <= hour:
                found = count
        return found

    def next_tick(self, pool: int, t: float, active: bool) -> float | None:
        if t - self.last.get(pool, 0.0) > WEEK_S:
            return None
        day = t - t % DAY_S
        borders = [day + hour * HOUR_S for hour, _ in self.policy.table]
        borders += [border + DAY_S for border in borders]
        return next(border for border in borders if border > t)
