"""Cheapest settings for a trace under a limit on waiting, or for a price of waiting.

Three stages: the retention curve (`levels.py`) ranks every retention from one sort; the engine replays those around
the best; then caps, floors and buffers are tried on the best retention, floors and buffers as large as the goal needs. Hindsight on the data given: the held-out
figure says what the same choice costs on days it has not seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError
from scripts.replay.laws import Law, parse_law, stream
from scripts.replay.levels import RetentionCurve, retention_curve
from scripts.replay.measures import Prices, binned_seconds
from scripts.replay.options import Options
from scripts.replay.platforms import console_lines
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.stats import nearest_rank
from scripts.replay.sweep import Case, run_case
from scripts.replay.traces import Trace

Floats = NDArray[np.float64]
SEARCH_FORMAT = "coldframe-replay-search/1"
METRICS = ("mean", "p50", "p90", "p95", "p99", "max", "cold")
GRID = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
FLEET_MAX_ROWS = 300_000  # floors and buffers run at about 50,000 requests/s
RESAMPLES = 200


@dataclass(frozen=True)
class Goal:
    """Minimise GPU time with `metric` ≤ `limit`; or, without a limit, overhead + wait_value · waiting."""

    metric: str = "p95"
    limit: float | None = None
    wait_value: float = 1.0

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise RequestError(
                "unknown wait figure", where="goal", found=self.metric, expected=", ".join(METRICS)
            )
        highest = 1.0 if self.metric == "cold" else math.inf
        if self.limit is not None and not 0 <= self.limit <= highest:
            option = "--cold" if self.metric == "cold" else f"--{self.metric}-wait"
            raise RequestError("not a limit", where=option, found=self.limit, expected=f"0 … {highest:g}")

    def figure(self, row: dict[str, Any]) -> float:
        """The limited figure of one combination."""
        return float(row["cold_fraction"] if self.metric == "cold" else row["wait_s"][self.metric])

    def is_met(self, row: dict[str, Any]) -> bool:
        """Everything served, and the figure within the limit."""
        return row["served"] == row["requests"] and (self.limit is None or self.figure(row) <= self.limit)

    def cost(self, row: dict[str, Any]) -> float:
        """What is minimised, GPU-seconds per request."""
        return float(row["gpu_s_per_request"] if self.limit is not None else row["score_s_per_request"])


def search(trace: Trace, startup_text: str, goal: Goal, options: Options, prices: Prices) -> dict[str, Any]:
    """Finds the cheapest setting.

    Returns: JSON-ready: `chosen` (figures, or None if no setting meets the goal), `nearest`, `frontier`, `estimate`,
        `confidence`, `held_out`, `console`, `tried`, `notes`.
    """
    startup = parse_law(startup_text, where="--startup")
    curve = retention_curve(trace)
    prices = replace(prices, wait_value=0.0 if goal.limit is not None else goal.wait_value)
    notes: list[str] = []
    rows = _retentions(trace, curve, startup_text, startup, goal, options, prices)
    best = _best(rows, goal) or min(rows, key=goal.figure)
    retention = float(best["retention_s"])
    rows += _extras(trace, startup_text, retention, options, prices, best, notes)
    if _best(rows, goal) is None and len(trace) <= FLEET_MAX_ROWS:
        bases = dict.fromkeys((retention, 2 * startup.median()))
        peak = int(best["peak_workers"])
        rows += _escalated(trace, startup_text, list(bases), options, prices, peak, goal)
    chosen = _best(rows, goal)
    # Ordered by how far each misses the goal.
    nearest = min(rows, key=lambda row: (row["requests"] - row["served"], goal.figure(row), goal.cost(row)))
    found: dict[str, Any] = {
        "format": SEARCH_FORMAT,
        "goal": {"metric": goal.metric, "limit": goal.limit, "wait_value": goal.wait_value},
        "startup": startup_text,
        "chosen": chosen,
        "nearest": nearest,
        "frontier": frontier(rows, goal),
        "points": [_point(row) for row in rows if row["served"] == row["requests"]],
        "estimate": estimate(curve, startup.median(), goal.wait_value),
        "held_out": held_out(trace, startup.median(), goal.wait_value),
        "tried": len(rows),
        "notes": notes,
    }
    if chosen is not None:
        found["confidence"] = confidence(trace, startup, chosen, options, goal)
        plan = parse_plan(chosen["policy"])
        cap = chosen["options"].get("max_workers")
        found["console"] = console_lines(
            chosen["retention_s"], floor=plan.floor, buffer=plan.buffer, max_workers=cap
        )
    return found


def _retentions(
    trace: Trace, curve: RetentionCurve, text: str, startup: Law, goal: Goal, options: Options, prices: Prices
) -> list[dict[str, Any]]:
    """Replays a grid of retentions and the neighbourhood of the curve's optimum."""
    median = startup.median()
    values = {multiple * median for multiple in GRID}
    centre, _ = curve.best(median, goal.wait_value if goal.limit is None else 0.0)
    values |= {centre * factor for factor in (0.5, 0.7, 1.0, 1.4, 2.0)}
    rows = [_replay(trace, text, f"fixed:{_short(value)}", options, prices) for value in sorted(values)]
    best = _best(rows, goal)
    if best is not None and best["retention_s"] > 0:
        near = float(best["retention_s"])
        finer = {near * factor for factor in (0.8, 0.9, 1.1, 1.2)} - values
        rows += [_replay(trace, text, f"fixed:{_short(value)}", options, prices) for value in sorted(finer)]
    return rows


def _extras(
    trace: Trace,
    text: str,
    retention: float,
    options: Options,
    prices: Prices,
    best: dict[str, Any],
    notes: list[str],
) -> list[dict[str, Any]]:
    """Caps on the best retention, then floors and buffers if the trace is small enough for the general loop."""
    base = f"fixed:{_short(retention)}"
    peak = int(best["peak_workers"])
    rows: list[dict[str, Any]] = []
    if options.max_workers is None:
        caps = sorted({max(1, int(peak * share)) for share in (0.5, 0.75, 0.9)})
        rows += [_replay(trace, text, base, replace(options, max_workers=cap), prices) for cap in caps]
    if len(trace) > FLEET_MAX_ROWS:
        notes.append(f"floors and buffers were not tried: more than {FLEET_MAX_ROWS} requests")
        return rows
    for extra in ("floor:1", "floor:2", "floor:4", "buffer:1", "buffer:2", "buffer:4", "buffer:0,percent=20"):
        rows.append(_replay(trace, text, f"{base}+{extra}", options, prices))
    return rows


def _escalated(
    trace: Trace, text: str, bases: Sequence[float], options: Options, prices: Prices, peak: int, goal: Goal
) -> list[dict[str, Any]]:
    """Floors and buffers of more than 4 workers on each retention of `bases`: four times as many until the goal is met,
    then down to within a tenth of the fewest that meet it."""
    rows: list[dict[str, Any]] = []

    def is_met(policy: str) -> bool:
        rows.append(_replay(trace, text, policy, options, prices))
        return goal.is_met(rows[-1])

    top = max(1, min(peak, options.max_workers or peak))
    for base, kind in itertools.product(bases, ("floor", "buffer")):
        policy = f"fixed:{_short(base)}+{kind}"
        failing, meeting = min(4, top - 1), min(16, top)
        while not is_met(f"{policy}:{meeting}") and meeting < top:
            failing, meeting = meeting, min(4 * meeting, top)
        if not goal.is_met(rows[-1]):
            continue
        while meeting - failing > max(1, meeting // 10):
            middle = (failing + meeting) // 2
            failing, meeting = (failing, middle) if is_met(f"{policy}:{middle}") else (middle, meeting)
    return rows


def _replay(trace: Trace, startup: str, policy: str, options: Options, prices: Prices) -> dict[str, Any]:
    return run_case(trace, Case(startup, policy, options, prices))


def _short(value: float) -> str:
    """Seconds with a resolution that a console could take."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _best(rows: Sequence[dict[str, Any]], goal: Goal) -> dict[str, Any] | None:
    met = [row for row in rows if goal.is_met(row)]
    return min(met, key=goal.cost) if met else None


def frontier(rows: Sequence[dict[str, Any]], goal: Goal) -> list[dict[str, Any]]:
    """Settings that no other beats in both GPU time and waiting, cheapest first."""
    found: list[dict[str, Any]] = []
    lowest = np.inf
    for row in sorted(rows, key=lambda row: (row["gpu_s_per_request"], goal.figure(row))):
        if row["served"] == row["requests"] and goal.figure(row) < lowest:
            lowest = goal.figure(row)
            found.append(_point(row))
    return found


def _point(row: dict[str, Any]) -> dict[str, Any]:
    """What a table or a picture needs of one setting."""
    return {
        "policy": row["policy"],
        "max_workers": row["options"].get("max_workers"),
        "gpu_hours": row["gpu_hours"],
        "share": row["share"]["generating"],
        "cold_fraction": row["cold_fraction"],
        **{f"wait_{name}_s": row["wait_s"][name] for name in METRICS if name != "cold"},
    }


def estimate(curve: RetentionCurve, startup_s: float, wait_value: float) -> dict[str, float]:
    """Cheapest retention by the curve, in hindsight, beside twice the startup and the bounds."""
    retention, cost = curve.best(startup_s, wait_value)
    return {
        "wait_value": wait_value,
        "retention_s": retention,
        "cost_s": cost,
        "cost_at_twice_s": float(curve.cost_s(2 * startup_s, startup_s, wait_value)),
        "cost_at_zero_s": float(curve.cost_s(0.0, startup_s, wait_value)),
        "cost_by_level_s": curve.best_by_level(startup_s, wait_value),
        "cost_clairvoyant_s": curve.clairvoyant_s(startup_s, wait_value),
    }


def _blocks(trace: Trace) -> tuple[float, str, int]:
    """Block length for resampling: days, or hours for traces under three days."""
    span = float(trace.arrivals[-1])
    length, name = (86400.0, "days") if span >= 3 * 86400 else (3600.0, "hours")
    return length, name, int(span // length) + 1


def held_out(trace: Trace, startup_s: float, wait_value: float) -> dict[str, float] | None:
    """Retention chosen on every other block, judged on the rest; None for fewer than four blocks."""
    length, _, count = _blocks(trace)
    if count < 4:
        return None
    even = (trace.arrivals // length).astype(np.int64) % 2 == 0
    if even.all() or not even.any():
        return None
    train, test = retention_curve(trace.take(even)), retention_curve(trace.take(~even))
    chosen, _ = train.best(startup_s, wait_value)
    _, best = test.best(startup_s, wait_value)
    cost = float(test.cost_s(chosen, startup_s, wait_value))
    return {
        "retention_s": chosen,
        "cost_s": cost,
        "best_possible_s": best,
        "cost_at_twice_s": float(test.cost_s(2 * startup_s, startup_s, wait_value)),
    }


def confidence(
    trace: Trace, startup: Law, chosen: dict[str, Any], options: Options, goal: Goal
) -> dict[str, Any]:
    """90 % intervals of GPU-hours and the limited figure from a bootstrap over blocks of time."""
    cap = chosen["options"].get("max_workers")
    outcome = simulate(
        trace, startup, parse_plan(chosen["policy"]), replace(options, max_workers=cap), record=True
    )
    length, name, count = _blocks(trace)
    assert outcome.intervals is not None
    spans = np.concatenate(list(outcome.intervals.spans.values()), axis=1)
    gpu_s = binned_seconds(spans, length, count) * options.gpus_per_worker
    order = np.argsort(outcome.waits, kind="stable")
    waits, cold = outcome.waits[order], outcome.cold[order].astype(np.float64)
    block = np.minimum((trace.arrivals[order] // length).astype(np.int64), count - 1)
    rng = stream(options.seed, "bootstrap")
    hours, figures = [], []
    for _ in range(RESAMPLES):
        times = np.bincount(rng.integers(0, count, count), minlength=count)
        hours.append(float((gpu_s * times).sum() / 3600))
        figures.append(_weighted_figure(goal.metric, waits, cold, times[block].astype(np.float64)))
    return {
        "blocks": f"{count} {name}",
        "gpu_hours_90": [nearest_rank(np.sort(hours), 0.05), nearest_rank(np.sort(hours), 0.95)],
        f"{goal.metric}_90": [nearest_rank(np.sort(figures), 0.05), nearest_rank(np.sort(figures), 0.95)],
    }


def _weighted_figure(metric: str, waits: Floats, cold: Floats, weights: Floats) -> float:
    """A wait figure with each request counted `weights` times; waits ascending."""
    total = weights.sum()
    if total == 0:
        return 0.0
    if metric in {"mean", "cold"}:
        return float((weights * (waits if metric == "mean" else cold)).sum() / total)
    if metric == "max":
        return float(waits[weights > 0][-1])
    reached = np.cumsum(weights)
    share = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}[metric]
    return float(waits[int(np.searchsorted(reached, share * total - 1e-9))])
