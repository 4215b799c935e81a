"""Outcomes → figures: seconds, shares, cost, waits, counts; JSON-ready, percentiles by nearest rank on exact data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError
from scripts.replay.demand_policies import Target
from scripts.replay.laws import Law
from scripts.replay.options import Options
from scripts.replay.outcome import ABANDONED, REFUSED, SERVED, Intervals, Outcome, most_at_once
from scripts.replay.policy import Plan
from scripts.replay.stats import nearest_rank
from scripts.replay.traces import Trace

Floats = NDArray[np.float64]
PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))
MAX_BINS = 20_000  # a timeline longer than two weeks of minutes takes wider bins


@dataclass(frozen=True)
class Prices:
    """USD per GPU-second and per request; value of a second of waiting in GPU-seconds."""

    gpu_s: float | None = None
    request: float = 0.0
    wait_value: float = 0.0

    def __post_init__(self) -> None:
        prices = (
            ("--gpu-price", self.gpu_s or 0.0),
            ("--request-price", self.request),
            ("--wait-value", self.wait_value),
        )
        for option, price in prices:
            if not 0 <= price < math.inf:
                raise RequestError("not a price", where=option, found=price, expected="a number ≥ 0")


def measure(
    trace: Trace, startup: Law, plan: Plan, options: Options, outcome: Outcome, prices: Prices
) -> dict[str, object]:
    """Figures of one combination; see docs/replay.md for each key."""
    inside = _inside(trace, options)
    served = inside & (outcome.status == SERVED)
    waits = outcome.waits[served]
    gpus = options.gpus_per_worker
    allocated = outcome.allocated_s * gpus
    found: dict[str, object] = {
        "startup": startup.text,
        "startup_p50_s": startup.median(),
        "policy": plan.text,
        "retention_s": _finite(plan.policy.retention(startup.median(), trace.pool_names[0])),
        "options": options.as_dict(),
        "engine": outcome.engine,
        "requests": int(inside.sum()),
        "served": int(served.sum()),
        "refused": int((inside & (outcome.status == REFUSED)).sum()),
        "abandoned": int((inside & (outcome.status == ABANDONED)).sum()),
        "gpu_s": {
            "generating": outcome.generating_s * gpus,
            "starting": outcome.starting_s * gpus,
            "idle": outcome.idle_s * gpus,
            "lost": outcome.lost_s * gpus,
            "allocated": allocated,
        },
        "share": {
            kind: getattr(outcome, f"{kind}_s") / outcome.allocated_s if outcome.allocated_s else 0.0
            for kind in ("generating", "starting", "idle", "lost")
        },
        "gpu_hours": allocated / 3600,
        "starts": outcome.starts,
        "useless_starts": outcome.useless,
        "cold_fraction": float(outcome.cold[served].mean()) if len(waits) else 0.0,
        "waited_fraction": float((waits > 0).mean()) if len(waits) else 0.0,
        "wait_s": wait_figures(waits),
        "wait_of_waiters_s": wait_figures(waits[waits > 0]),
        "peak_workers": outcome.peak_workers,
        "queue_peak": queue_peak(trace, outcome, served),
    }
    found.update(
        {
            name: getattr(outcome, name)
            for name in ("prewarmed", "cancelled", "failed_starts", "preempted", "evicted")
        }
    )
    found.update(_money(found, outcome, waits, prices))
    found["flags"] = flags(startup, plan, options, trace) + outcome.notes
    return found


def _inside(trace: Trace, options: Options) -> NDArray[np.bool_]:
    begin, end = options.window or (0.0, math.inf)
    return np.asarray((trace.arrivals >= max(begin, options.warmup_s)) & (trace.arrivals < end))


def _finite(value: float | None) -> float | str | None:
    return "endless" if value == math.inf else value


def wait_figures(waits: Floats) -> dict[str, float]:
    """Mean, nearest-rank percentiles and worst of a set of waits; zeros for an empty set."""
    ordered = np.sort(waits)
    found = {"mean": float(waits.mean()) if len(waits) else 0.0}
    found.update({name: nearest_rank(ordered, share) for name, share in PERCENTILES})
    found["max"] = float(ordered[-1]) if len(ordered) else 0.0
    return found


def queue_peak(trace: Trace, outcome: Outcome, served: NDArray[np.bool_]) -> int:
    """Most requests waiting at one moment."""
    rows = served & (outcome.waits > 0)
    begin = trace.arrivals[rows]
    return most_at_once(np.array([begin, begin + outcome.waits[rows]]))


def _money(found: Mapping[str, Any], outcome: Outcome, waits: Floats, prices: Prices) -> dict[str, object]:
    gpu_s, served = found["gpu_s"], max(found["served"], 1)
    priced_wait = prices.wait_value * float(waits.sum())
    result: dict[str, object] = {
        "overhead_s_per_request": (gpu_s["allocated"] - gpu_s["generating"]) / served,
        "gpu_s_per_request": gpu_s["allocated"] / served,
        "score_s_per_request": (gpu_s["allocated"] - gpu_s["generating"] + priced_wait) / served,
    }
    if prices.gpu_s is not None:
        cost = gpu_s["allocated"] * prices.gpu_s + found["served"] * prices.request
        result.update(cost_usd=cost, requests_per_usd=found["served"] / cost if cost else 0.0)
    return result


def flags(startup: Law, plan: Plan, options: Options, trace: Trace) -> list[str]:
    """Settings that deserve a second look."""
    found: list[str] = []
    median = startup.median()
    retention = plan.policy.retention(median, trace.pool_names[0])
    if retention is not None and 0 < retention < median:
        found.append(f"retention {retention:g} s is shorter than the startup ({median:g} s)")
    if isinstance(plan.policy, Target):
        if plan.policy.grace_s < plan.policy.window_s:
            found.append(
                f"hold-down {plan.policy.grace_s:g} s is shorter than the metric window {plan.policy.window_s:g} s"
            )
        if median > plan.policy.window_s:
            found.append(f"startup {median:g} s is longer than the metric window {plan.policy.window_s:g} s")
    if options.is_shared and options.binding == "bound":
        found.append("a cap or limit makes cold requests share a queue")
    if plan.text.startswith("clairvoyant"):
        found.append("sees the future: a bound, not a policy")
    return found


def compare(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Cuts of overhead and GPU time from `first` to `other`, per request (1 = all of it)."""
    before, after = first["overhead_s_per_request"], other["overhead_s_per_request"]
    return {
        "overhead_cut": 1 - after / before if before else 0.0,
        "gpu_time_saved": 1 - other["gpu_s_per_request"] / first["gpu_s_per_request"]
        if first["gpu_s_per_request"]
        else 0.0,
        "idle_cut": 1 - other["gpu_s"]["idle"] / first["gpu_s"]["idle"] if first["gpu_s"]["idle"] else 0.0,
        "cold_change": other["cold_fraction"] - first["cold_fraction"],
        "wait_mean_change_s": other["wait_s"]["mean"] - first["wait_s"]["mean"],
        "wait_p50_change_s": other["wait_s"]["p50"] - first["wait_s"]["p50"],
    }


def bin_width(span_s: float) -> float:
    """A minute, or the smallest whole number of minutes that keeps a timeline within MAX_BINS."""
    return 60.0 * max(1, math.ceil(span_s / 60 / MAX_BINS))


def binned_seconds(span: Floats, width_s: float, count: int) -> Floats:
    """[count] seconds of the intervals [2, k] inside each bin; sums to their total length.

    Whole bins inside an interval are added through a difference array, its two ends directly.
    """
    begin, end = span
    first = np.minimum((begin / width_s).astype(np.int64), count - 1)
    last = np.minimum((end / width_s).astype(np.int64), count - 1)
    same = first == last
    inside = np.zeros(count)
    inside += np.bincount(first[same], weights=(end - begin)[same], minlength=count)
    a, b = first[~same], last[~same]
    inside += np.bincount(a, weights=(a + 1) * width_s - begin[~same], minlength=count)
    inside += np.bincount(b, weights=end[~same] - b * width_s, minlength=count)
    steps = (
        np.bincount(a + 1, minlength=count + 1)[: count + 1]
        - np.bincount(b, minlength=count + 1)[: count + 1]
    )
    return np.asarray(inside + np.cumsum(steps)[:count] * width_s, dtype=np.float64)


def timeline(trace: Trace, intervals: Intervals) -> dict[str, object]:
    """Arrivals and worker-seconds per bin: {"bin_s", "arrivals", "generating", "starting", "idle", "lost"}."""
    end = max((float(span[1].max()) for span in intervals.spans.values() if span.size), default=0.0)
    end = max(end, float(trace.arrivals[-1]))
    width = bin_width(end)
    count = int(end // width) + 1
    arrivals = np.bincount((trace.arrivals / width).astype(np.int64), minlength=count)
    found: dict[str, object] = {"bin_s": width, "arrivals": arrivals.tolist()}
    for kind, span in intervals.spans.items():
        found[kind] = np.round(binned_seconds(span, width, count), 6).tolist()
    return found
