"""Retention policies: how long an idle worker is kept, and how many are started beyond demand.

A policy is a small frozen class. One with a constant answer implements `retention`; one that looks at the past
returns a `Controller` from `controller`, and is then run by `fleet.py`. To add a policy, write the class and its line
in `POLICIES`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from loader.errors import RequestError
from scripts.replay.arithmetic import break_even_retention, poisson_quantile
from scripts.replay.specs import Spec, parse_number, parse_spec

MINUTE_S, HOUR_S, DAY_S, WEEK_S = 60.0, 3600.0, 86400.0, 604800.0


class Keep(NamedTuple):
    """What happens to a worker that became idle: kept for `for_s`; started anew `restart_s` after (None: not)."""

    for_s: float
    restart_s: float | None = None


class Setup(NamedTuple):
    """What a controller may know before the trace begins."""

    startup_s: float  # median
    pools: Sequence[str]


class Controller(Protocol):
    """Decisions of one run; sees the past only. Levels count a pool's requests in service, from 1."""

    tick_s: float | None  # period of `tick` while the pool is active; None: never
    governs: bool  # True: `wanted` alone decides how many workers a pool has

    def idle(self, pool: int, level: int, t: float) -> Keep:
        """The request at `level` finished and its worker is idle; level 0: a worker that has not served yet."""

    def arrival(self, pool: int, level: int, t: float) -> None:
        """A request arrived and is the `level`-th in the pool."""

    def load(self, pool: int, t: float, load: int) -> None:
        """Requests queued or in service changed to `load`."""

    def wanted(self, pool: int, t: float, alive: int) -> int:
        """Workers the pool should have at least (or exactly, if `governs`)."""

    def next_tick(self, pool: int, t: float, active: bool) -> float | None:
        """When to ask `wanted` again, or None until the next arrival."""


class Policy(Protocol):
    """A retention policy; `text` is its specification."""

    @property
    def text(self) -> str: ...

    def retention(self, startup_s: float, pool: str) -> float | None:
        """Constant seconds to keep an idle worker, or None if it takes a controller."""

    def controller(self, setup: Setup) -> Controller: ...


@dataclass(frozen=True)
class Plan:
    """A retention policy together with a warm floor and a buffer of spare workers."""

    policy: Policy
    floor: int = 0
    buffer: int = 0
    buffer_percent: float = 0.0
    while_active: bool = False
    text: str = ""

    def spare(self, in_flight: int, waiting: int) -> int:
        """Idle or starting workers wanted beyond the busy ones."""
        if self.while_active and in_flight + waiting == 0:
            return 0
        return max(self.buffer, math.ceil(self.buffer_percent / 100 * in_flight - 1e-9))

    @property
    def is_plain(self) -> bool:
        """True without floor and buffer."""
        return self.floor == 0 and self.buffer == 0 and self.buffer_percent == 0


@dataclass
class Quiet:
    """Controller parts that most policies leave alone."""

    tick_s: float | None = None
    governs: bool = False

    def arrival(self, pool: int, level: int, t: float) -> None:
        return None

    def load(self, pool: int, t: float, load: int) -> None:
        return None

    def wanted(self, pool: int, t: float, alive: int) -> int:
        return 0

    def next_tick(self, pool: int, t: float, active: bool) -> float | None:
        return t + self.tick_s if self.tick_s and active else None


@dataclass
class ConstantController(Quiet):
    """One retention per pool."""

    keeps: list[Keep] = field(default_factory=list)

    def idle(self, pool: int, level: int, t: float) -> Keep:
        return self.keeps[pool]


# --- constant retention ------------------------------------------------------------------------------------------


class Constant(Protocol):
    def retention(self, startup_s: float, pool: str) -> float: ...


class _Fixed:
    """Shared by policies whose answer is a constant: the controller only repeats it."""

    def controller(self: Constant, setup: Setup) -> Controller:
        return ConstantController(keeps=[Keep(self.retention(setup.startup_s, name)) for name in setup.pools])


@dataclass(frozen=True)
class Multiple(_Fixed):
    """Keeps for `times` startups (the median one)."""

    times: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return self.times * startup_s


@dataclass(frozen=True)
class Seconds(_Fixed):
    """Keeps for a number of seconds: Modal's scaledown window, fal's keep_alive; 0 releases at completion."""

    seconds: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return self.seconds


@dataclass(frozen=True)
class BreakEven(_Fixed):
    """Keeps for as long as a start would cost, a second of waiting priced at `wait_value` GPU-seconds."""

    wait_value: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return break_even_retention(startup_s, self.wait_value)


@dataclass(frozen=True)
class PerPool(_Fixed):
    """Seconds by pool name, `other` for the rest."""

    seconds: tuple[tuple[str, float], ...]
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        table = dict(self.seconds)
        if pool not in table and "other" not in table:
            raise RequestError(
                "a pool without a retention", where=self.text, found=repr(pool), expected="its name or other"
            )
        return table.get(pool, table.get("other", 0.0))


@dataclass(frozen=True)
class Clairvoyant(_Fixed):
    """Keeps only workers whose next use comes within S·(1 + w). Sees the future: a bound, not a policy."""

    wait_value: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return break_even_retention(startup_s, self.wait_value)


# --- adaptive retention --------------------------------------------------------------------------------------------


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


# --- parsing -------------------------------------------------------------------------------------------------------


def _multiple(spec: Spec) -> Policy:
    spec.only({"m"}, positions=1)
    return Multiple(_at_least(spec, spec.number("m", 2.0, position=0)), spec.text)


def _fixed(spec: Spec) -> Policy:
    if spec.values == ("inf",):
        return Seconds(math.inf, spec.text)
    spec.only({"seconds"}, positions=1)
    return Seconds(_at_least(spec, spec.number("seconds", position=0)), spec.text)


def _zero(spec: Spec) -> Policy:
    spec.only(())
    return Seconds(0.0, spec.text)


def _break_even(spec: Spec) -> Policy:
    spec.only({"w"}, positions=1)
    return BreakEven(_at_least(spec, spec.number("w", 1.0, position=0)), spec.text)


def _clairvoyant(spec: Spec) -> Policy:
    spec.only({"w"}, positions=1)
    return Clairvoyant(_at_least(spec, spec.number("w", 1.0, position=0)), spec.text)


def _level(spec: Spec) -> Policy:
    spec.only({"w"}, positions=1)
    return Level(_at_least(spec, spec.number("w", 1.0, position=0)), spec.text)


def _pools(spec: Spec) -> Policy:
    return PerPool(
        tuple((name, parse_number(value, where=spec.text)) for name, value in spec.named), spec.text
    )


def _hybrid(spec: Spec) -> Policy:
    spec.only({"range", "bin", "head", "tail", "cv", "oob", "margin"})
    given = dict(spec.named)
    return Hybrid(
        spec.text,
        range_s=spec.number("range") if "range" in given else None,
        bin_s=spec.number("bin") if "bin" in given else None,
        head=spec.number("head", 5.0),
        tail=spec.number("tail", 99.0),
        cv=spec.number("cv", 2.0),
        oob=spec.number("oob", 0.5),
        margin=spec.number("margin", 0.1),
    )


def _forecast(spec: Spec) -> Policy:
    spec.only({"q", "alpha", "m"})
    quantile = spec.number("q", 0.9)
    if not 0 < quantile < 1:
        raise RequestError("a quantile", where=spec.text, found=quantile, expected="between 0 and 1")
    return Forecast(spec.text, quantile, spec.number("alpha", 0.03), spec.number("m", 2.0))


def _target(spec: Spec) -> Policy:
    spec.only({"u", "window", "panic", "grace", "tick", "panic_at"}, positions=1)
    policy = Target(
        spec.text,
        spec.number("u", 0.7, position=0),
        spec.number("window", 60.0),
        spec.number("panic", 0.1),
        spec.number("panic_at", 2.0),
        spec.number("grace", 30.0),
        spec.number("tick", 2.0),
    )
    if policy.target <= 0 or policy.window_s <= 0 or policy.tick_s <= 0 or not 0 < policy.panic_share <= 1:
        raise RequestError(
            "values out of range", where=spec.text, expected="u, window, tick > 0; 0 < panic ≤ 1"
        )
    return policy


def _schedule(spec: Spec) -> Policy:
    times = spec.number("m", 2.0)
    rows = [(name, value) for name, value in spec.named if name != "m"]
    table = sorted(
        (parse_number(hour, where=spec.text), int(parse_number(count, where=spec.text)))
        for hour, count in rows
    )
    if not table or any(not 0 <= hour < 24 or count < 0 for hour, count in table):
        raise RequestError(
            "a table of hours", where=spec.text, expected="schedule:0=1,9=6,18=2 with hours 0 … 24"
        )
    return Schedule(tuple(table), spec.text, times)


def _at_least(spec: Spec, value: float) -> float:
    if value < 0:
        raise RequestError("a negative value", where=spec.text, found=value, expected="≥ 0")
    return value


POLICIES: dict[str, Callable[[Spec], Policy]] = {
    "multiple": _multiple,
    "fixed": _fixed,
    "zero": _zero,
    "break_even": _break_even,
    "pools": _pools,
    "hybrid": _hybrid,
    "level": _level,
    "forecast": _forecast,
    "target": _target,
    "schedule": _schedule,
    "clairvoyant": _clairvoyant,
}


def parse_plan(text: str) -> Plan:
    """`multiple:2`, `fixed:60+floor:1`, `zero+buffer:2,percent=10,active=1`, … → Plan.

    Parts joined by `+`: one retention policy (default `multiple:2`), `floor:k`, `buffer:k`.
    """
    plan = Plan(Multiple(2.0, "multiple:2"), text=text)
    chosen = False
    for part in text.split("+"):
        spec = parse_spec(part)
        if spec.name == "floor":
            spec.only({"k"}, positions=1)
            plan = replace(plan, floor=spec.integer("k", 1, position=0))
        elif spec.name == "buffer":
            spec.only({"k", "percent", "active"}, positions=1)
            plan = replace(
                plan,
                buffer=spec.integer("k", 0 if "percent" in dict(spec.named) else 1, position=0),
                buffer_percent=spec.number("percent", 0.0),
                while_active=spec.number("active", 0.0) != 0,
            )
        elif spec.name in POLICIES and not chosen:
            plan, chosen = replace(plan, policy=POLICIES[spec.name](spec)), True
        else:
            raise RequestError(
                "a second retention policy" if chosen else "unknown policy",
                where="--policy",
                found=repr(part),
                expected=", ".join([*sorted(POLICIES), "floor", "buffer"]),
            )
    return plan
