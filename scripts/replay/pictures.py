"""Data behind the plots, gathered while the simulation is at hand; JSON-ready, drawn by `plots.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scripts.replay.laws import parse_law
from scripts.replay.levels import RetentionCurve, retention_curve
from scripts.replay.measures import Prices
from scripts.replay.options import Options
from scripts.replay.outcome import Outcome
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.stats import CROSSING, find_runs, minute_counts
from scripts.replay.sweep import Case, run_case
from scripts.replay.traces import Trace

MULTIPLES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
ZOOM_S = 600.0
ZOOM_WORKERS = 60
ZOOM_MAX_ROWS = 300_000  # the zoom needs worker numbers, which only the general loop keeps
WAIT_STEP = 0.06  # width of a bin in decades, the same for every startup


def wait_histogram(outcome: Outcome) -> dict[str, Any]:
    """Counts of positive waits in logarithmic bins, cold requests apart, and how many did not wait."""
    served = outcome.status == 0
    waits, cold = outcome.waits[served], outcome.cold[served] == 1
    positive = waits > 0
    if not positive.any():
        return {"none": int(served.sum()), "edges": [], "cold": [], "queued": []}
    # The shortest hundredth shares the first bin: a few tiny waits would stretch the axis over decades.
    low, high = float(np.quantile(waits[positive], 0.01)), float(waits[positive].max())
    first, last = np.floor(np.log10(low / 2) / WAIT_STEP), np.ceil(np.log10(high * 2) / WAIT_STEP)
    edges = 10 ** (WAIT_STEP * np.arange(first, last + 1))
    clipped = np.clip(waits, edges[0], edges[-1])
    return {
        "none": int((~positive).sum()),
        "edges": edges.tolist(),
        "cold": np.histogram(clipped[positive & cold], edges)[0].tolist(),
        "queued": np.histogram(clipped[positive & ~cold], edges)[0].tolist(),
    }


def bursts(trace: Trace) -> dict[str, Any]:
    """Minute counts over the mean of their clock hour, for the six hours around the largest burst, and all peaks."""
    counts = minute_counts(trace)
    hours = len(counts) // 60
    if hours < 2:
        return {"minutes": counts.tolist(), "ratios": [], "peaks": [], "from_hour": 0}
    by_hour = counts[: hours * 60].reshape(hours, 60)
    means = by_hour.mean(axis=1, keepdims=True)
    ratios = np.where(means > 0, by_hour / np.maximum(means, 1e-12), 0.0).ravel()
    busy = by_hour.sum(axis=1) >= by_hour.sum(axis=1).mean()
    masked = np.where(np.repeat(busy, 60), ratios, np.nan)
    runs = find_runs(masked)
    busiest = int(np.argmax(by_hour.max(axis=1)))
    begin = max(min(busiest - 3, hours - 6), 0)
    window = slice(begin * 60, min(begin + 6, hours) * 60)
    inside = (runs.first >= window.start) & (runs.first < window.stop)
    return {
        "ratios": np.round(ratios[window], 4).tolist(),
        "crossings": (runs.first[inside] - window.start).tolist(),
        "peaks": np.round(runs.peak, 4).tolist(),
        "from_hour": begin,
        "busy": busy[begin : begin + 6].tolist(),
        "limit": CROSSING,
    }


def zoom(trace: Trace, startup: str, policy: str, options: Options) -> dict[str, Any] | None:
    """Ten minutes around the largest burst: spans of at most ZOOM_WORKERS workers, or None for a huge trace."""
    if len(trace) > ZOOM_MAX_ROWS or policy.startswith("clairvoyant"):
        return None
    counts = np.bincount((trace.arrivals // 60).astype(np.int64))
    begin = max(float(np.argmax(counts)) * 60 - ZOOM_S / 3, 0.0)
    end = begin + ZOOM_S
    # The hour before sets the scene: whoever lives into the window was started there or has been kept busy since.
    near = trace.take((trace.arrivals >= begin - 3600) & (trace.arrivals < end))
    plain = replace(options, engine="fleet", window=None, warmup_s=0.0)
    intervals = simulate(near, parse_law(startup), parse_plan(policy), plain).intervals
    assert intervals is not None
    clipped = intervals.clipped(begin, end)
    numbers = np.unique(np.concatenate([clipped.workers[kind] for kind in clipped.workers]))
    # An even sample in order of their start, so that late workers are seen as well.
    shown = (
        numbers[np.unique(np.linspace(0, len(numbers) - 1, ZOOM_WORKERS).round().astype(int))]
        if len(numbers)
        else numbers
    )
    rows = {int(number): row for row, number in enumerate(shown)}
    spans = [
        [rows[int(worker)], kind, round(float(a - begin), 3), round(float(b - begin), 3)]
        for kind, span in clipped.spans.items()
        for a, b, worker in zip(span[0], span[1], clipped.workers[kind], strict=True)
        if int(worker) in rows
    ]
    inside = trace.arrivals[(trace.arrivals >= begin) & (trace.arrivals < end)] - begin
    return {
        "begin_s": begin,
        "length_s": ZOOM_S,
        "spans": spans,
        "workers": len(numbers),
        "shown": len(shown),
        "arrivals": np.round(inside, 3).tolist(),
    }


def retention_frontier(
    trace: Trace, startups: Sequence[str], options: Options, prices: Prices
) -> list[dict[str, Any]]:
    """Cost and waits over multiples of each startup; the points of the cost-against-wait plot."""
    found: list[dict[str, Any]] = []
    for startup in startups:
        points = []
        for multiple in MULTIPLES:
            row = run_case(trace, Case(startup, f"multiple:{multiple:g}", options, prices, record=False))
            points.append(
                {
                    "multiple": multiple,
                    "retention_s": row["retention_s"],
                    "gpu_hours": row["gpu_hours"],
                    "share": row["share"]["generating"],
                    "cold_fraction": row["cold_fraction"],
                    "wait_mean_s": row["wait_s"]["mean"],
                    "wait_p95_s": row["wait_s"]["p95"],
                    "score_s": row["score_s_per_request"],
                }
            )
        found.append({"startup": startup, "points": points})
    return found


def spares(
    trace: Trace, rows: Sequence[dict[str, Any]], options: Options, prices: Prices
) -> list[dict[str, Any]]:
    """What one and two spare workers would have cost on top of each startup's first policy."""
    if len(trace) > ZOOM_MAX_ROWS:
        return []
    found: list[dict[str, Any]] = []
    for startup in dict.fromkeys(row["startup"] for row in rows):
        base = next(row for row in rows if row["startup"] == startup)
        if "buffer" in base["policy"] or "target" in base["policy"] or "clairvoyant" in base["policy"]:
            continue
        for count in (1, 2):
            row = run_case(
                trace, Case(startup, f"{base['policy']}+buffer:{count}", options, prices, record=False)
            )
            found.append(
                {
                    "startup": startup,
                    "policy": base["policy"],
                    "spares": count,
                    "gpu_hours_more": row["gpu_hours"] - base["gpu_hours"],
                    "cold_fraction": row["cold_fraction"],
                    "cold_before": base["cold_fraction"],
                    "wait_mean_s": row["wait_s"]["mean"],
                    "wait_mean_before_s": base["wait_s"]["mean"],
                    "useless_starts": row["useless_starts"],
                }
            )
    return found


def cheapest(trace: Trace, startups: Sequence[str]) -> list[dict[str, Any]]:
    """Cheapest retention by the level curve for each startup and three prices of waiting, beside twice the startup."""
    curve: RetentionCurve = retention_curve(trace)
    found: list[dict[str, Any]] = []
    for startup in startups:
        median = parse_law(startup).median()
        for wait_value in (0.0, 1.0, 3.0):
            retention, cost = curve.best(median, wait_value)
            found.append(
                {
                    "startup": startup,
                    "wait_value": wait_value,
                    "retention_s": retention,
                    "cost_s": cost,
                    "cost_at_twice_s": float(curve.cost_s(2 * median, median, wait_value)),
                    "clairvoyant_s": curve.clairvoyant_s(median, wait_value),
                }
            )
    return found


def gather(
    trace: Trace,
    rows: Sequence[dict[str, Any]],
    startups: Sequence[str],
    policies: Sequence[str],
    options: Options,
    prices: Prices,
) -> dict[str, Any]:
    """Everything the plots and the report need besides the figures of the combinations."""
    first = policies[0]
    histograms = []
    for startup in startups:
        outcome = simulate(trace, parse_law(startup), parse_plan(first), options, record=False)
        histograms.append({"startup": startup, "policy": first, **wait_histogram(outcome)})
    return {
        "waits": histograms,
        "bursts": bursts(trace),
        "zooms": [
            {"startup": startup, "policy": first, "zoom": zoom(trace, startup, first, options)}
            for startup in startups
        ],
        "frontier": retention_frontier(trace, startups, options, prices),
        "cheapest": cheapest(trace, startups),
        "spares": spares(trace, rows, options, prices),
    }
