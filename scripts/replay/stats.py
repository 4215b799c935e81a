"""Burst statistics of a trace, and the reference workload that has the same.

The main estimator counts requests in disjoint clock minutes and compares each with the mean minute of its clock hour.
A comparison must name the estimator: the sliding one counts about 1.7 times as many crossings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError
from scripts.replay.traces import Trace

Floats = NDArray[np.float64]
CROSSING = 2.0
HIGH_PEAK = 4.0
MAX_MINUTES = 50_000_000


@dataclass(frozen=True)
class BurstStats:
    """Statistics over the busy hours; None where the trace is too short or too thin to say.

    crossings_per_hour: runs of consecutive minutes at ≥ 2 times the hour's mean, per busy hour.
    peak_*: highest such ratio in a run. max_over_median: busiest minute over the median minute, all hours.
    idc, q: var/mean and var/mean² of the minute counts over all hours.
    """

    estimator: str
    requests: int
    hours: int
    busy_hours: int
    busy_limit: float
    rate_per_min: float
    busy_rate_per_min: float
    crossings_per_hour: float | None
    peak_median: float | None
    peak_mean: float | None
    peak_share_high: float | None
    rise_min: float | None
    length_min: float | None
    max_minute: int
    max_over_median: float | None
    max_over_mean: float
    idc: float
    q: float
    duration_mean_s: float
    duration_p50_s: float
    duration_p99_s: float
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


STAT_WORDS = {
    "estimator": "estimator",
    "requests": "requests",
    "hours": "hours",
    "busy_hours": "busy hours",
    "busy_limit": "requests that make an hour busy",
    "rate_per_min": "requests a minute",
    "busy_rate_per_min": "the same in busy hours",
    "crossings_per_hour": "bursts (minutes ≥ 2 × their hour's mean) per busy hour",
    "peak_median": "peak of a burst over its hour's mean, median",
    "peak_mean": "the same, mean",
    "peak_share_high": "share of bursts that reach 4 ×",
    "rise_min": "minutes from below the mean to the peak",
    "length_min": "minutes at ≥ 2 ×",
    "max_minute": "requests in the busiest minute",
    "max_over_median": "busiest minute over the median minute",
    "max_over_mean": "busiest minute over the mean minute",
    "idc": "index of dispersion: variance over mean of minute counts",
    "q": "q: variance over squared mean of minute counts",
    "duration_mean_s": "generation time, mean, s",
    "duration_p50_s": "generation time, median, s",
    "duration_p99_s": "generation time, p99, s",
    "notes": "notes",
}
"""What people read for each figure of `BurstStats`."""


def in_words(stats: Mapping[str, object]) -> dict[str, object]:
    """The figures under the names that people read; empty notes left out."""
    return {STAT_WORDS[name]: value for name, value in stats.items() if value not in ((), [])}


@dataclass(frozen=True)
class Runs:
    """Bursts: first minute, last minute, minute of the peak, peak ratio; [number of runs] each."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    top: NDArray[np.int64]
    peak: Floats


def minute_counts(trace: Trace) -> NDArray[np.int64]:
    """[minutes] counts in disjoint clock minutes, whole hours only if the trace has at least two."""
    stamps = trace.arrivals + trace.clock_s
    span_s = trace.facts.get("span_s")
    end_s = float(span_s) if isinstance(span_s, (int, float)) else float(stamps[-1]) + 60.0
    minutes = int(end_s // 60)
    if minutes > MAX_MINUTES:
        raise RequestError("the trace spans too many minutes", found=minutes, expected=f"≤ {MAX_MINUTES}")
    whole = minutes // 60 * 60 if minutes >= 120 else minutes
    first = int(np.ceil(trace.clock_s / 3600)) * 60 if whole >= 180 else 0
    counts = np.bincount((stamps // 60).astype(np.int64), minlength=max(whole, 1))
    return counts[first : max(whole, 1)]


def burst_stats(trace: Trace, *, busy: float | None = None, sliding: bool = False) -> BurstStats:
    """Statistics of §"burst statistics" in docs/replay.md.

    Args:
        busy: an hour counts as busy with at least this many requests (default: the mean hour of the trace).
        sliding: use a trailing 60 s window evaluated at every arrival instead of disjoint minutes.
    """
    counts = minute_counts(trace)
    notes: list[str] = []
    hours = len(counts) // 60
    mean = float(counts.mean())
    variance = float(counts.var())
    median = float(np.median(counts))
    if median == 0:
        notes.append("the median minute is empty: max/median is undefined")
    base = {
        "estimator": "sliding 60 s" if sliding else "disjoint minutes",
        "requests": len(trace),
        "hours": hours,
        "rate_per_min": mean,
        "max_minute": int(counts.max()),
        "max_over_median": float(counts.max() / median) if median > 0 else None,
        "max_over_mean": float(counts.max() / mean) if mean > 0 else 0.0,
        "idc": variance / mean if mean > 0 else 0.0,
        "q": variance / mean**2 if mean > 0 else 0.0,
        "duration_mean_s": float(trace.durations.mean()),
        "duration_p50_s": nearest_rank(np.sort(trace.durations), 0.5),
        "duration_p99_s": nearest_rank(np.sort(trace.durations), 0.99),
    }
    if hours < 2:
        notes.append("shorter than two hours: no hour-based burst statistics")
        return BurstStats(**base, **_no_bursts(mean), notes=tuple(notes))  # type: ignore[arg-type]
    by_hour = counts[: hours * 60].reshape(hours, 60)
    limit = float(by_hour.sum(axis=1).mean()) if busy is None else busy
    kept = by_hour.sum(axis=1) >= limit
    if mean < 3:
        notes.append("a low rate alone gives many crossings: compare with Poisson traffic of the same rate")
    if not kept.any():
        notes.append("no busy hour")
        return BurstStats(**base, **_no_bursts(mean), notes=tuple(notes))  # type: ignore[arg-type]
    ratios = np.full(by_hour.shape, np.nan)
    ratios[kept] = by_hour[kept] / by_hour[kept].mean(axis=1, keepdims=True)
    runs = _sliding_runs(trace, kept, by_hour) if sliding else find_runs(ratios.ravel())
    return BurstStats(**base, **_describe(runs, ratios, kept, by_hour, limit), notes=tuple(notes))  # type: ignore[arg-type]


def _no_bursts(mean: float) -> dict[str, object]:
    empty = dict.fromkeys(
        ("crossings_per_hour", "peak_median", "peak_mean", "peak_share_high", "rise_min", "length_min")
    )
    return {**empty, "busy_hours": 0, "busy_limit": 0.0, "busy_rate_per_min": mean}


def _describe(
    runs: Runs, ratios: Floats, kept: NDArray[np.bool_], by_hour: NDArray[np.int64], limit: float
) -> dict[str, object]:
    busy_hours = int(kept.sum())
    found: dict[str, object] = {
        "busy_hours": busy_hours,
        "busy_limit": limit,
        "busy_rate_per_min": float(by_hour[kept].mean()),
        "crossings_per_hour": len(runs.peak) / busy_hours,
    }
    if len(runs.peak) == 0:
        return {**_no_bursts(0.0), **found}
    # The last minute below the mean, or the last removed one, which ends the search without a rise.
    below = np.flatnonzero(~(ratios.ravel() >= 1))
    before = np.searchsorted(below, runs.top) - 1
    since = below[np.maximum(before, 0)] if len(below) else np.zeros(len(runs.top), dtype=np.int64)
    rises = (runs.top - since)[(before >= 0) & ~np.isnan(ratios.ravel()[since])]
    return {
        **found,
        "peak_median": float(np.median(runs.peak)),
        "peak_mean": float(runs.peak.mean()),
        "peak_share_high": float((runs.peak >= HIGH_PEAK).mean()),
        "rise_min": float(rises.mean()) if len(rises) else None,
        "length_min": float((runs.last - runs.first + 1).mean()),
    }


def find_runs(ratios: Floats) -> Runs:
    """Runs of consecutive values ≥ 2; NaN (a removed hour) ends a run."""
    high = np.concatenate(([False], ratios >= CROSSING, [False]))
    edges = np.flatnonzero(np.diff(high.astype(np.int8)))
    first, last = edges[::2], edges[1::2] - 1
    top = np.array(
        [a + int(np.argmax(ratios[a : b + 1])) for a, b in zip(first, last, strict=True)], dtype=np.int64
    )
    return Runs(first, last, top, ratios[top] if len(top) else np.empty(0))


def _sliding_runs(trace: Trace, kept: NDArray[np.bool_], by_hour: NDArray[np.int64]) -> Runs:
    """Runs of the trailing 60 s count, evaluated where it changes: arrivals enter, and leave 60 s later."""
    stamps = trace.arrivals + trace.clock_s
    if len(kept) * 3600 < stamps[-1] - 3600:  # minute_counts cut the first partial hour
        stamps = stamps - np.ceil(trace.clock_s / 3600) * 3600
    moments = np.concatenate((stamps, stamps + 60.0))
    moments = moments[(moments >= 0) & (moments < len(kept) * 3600.0)]
    moments.sort()
    counts = np.searchsorted(stamps, moments, side="right") - np.searchsorted(
        stamps, moments - 60.0, side="right"
    )
    hour = (moments // 3600).astype(np.int64)
    ratios = np.where(kept[hour], counts / np.maximum(by_hour.mean(axis=1)[hour], 1e-12), np.nan)
    runs = find_runs(ratios)
    minute = (moments // 60).astype(np.int64)
    if len(runs.peak) == 0:
        return runs
    return Runs(minute[runs.first], minute[runs.last], minute[runs.top], runs.peak)


def nearest_rank(ordered: Floats, share: float) -> float:
    """Percentile by the nearest-rank rule: the smallest value with at least `share` of the data at or below it."""
    if len(ordered) == 0:
        return 0.0
    # The tiny subtraction keeps 0.95 · 100 = 95.00000000000001 at rank 95.
    rank = int(np.ceil(share * len(ordered) - 1e-9))
    return float(ordered[min(max(rank, 1), len(ordered)) - 1])


def fit_reference(stats: BurstStats, trace: Trace) -> dict[str, object]:
    """Parameters of `ref` that match a trace, and what does not match.

    m is the mean rate; c follows from q of the minute counts, c ≈ 1.2·q at sigma_h = 0.3.
    """
    cv = float(trace.durations.std() / trace.durations.mean()) if trace.durations.mean() > 0 else 0.0
    misfits: list[str] = []
    reference = {
        "crossings_per_hour": 8.5,
        "peak_median": 2.99,
        "peak_share_high": 0.223,
        "max_over_median": 20.0,
    }
    for name, value in reference.items():
        found = getattr(stats, name)
        if found is None:
            misfits.append(f"{name}: undefined for this trace")
        elif abs(found / value - 1) > 0.25:
            misfits.append(f"{name}: {found:.3g} against {value:.3g} for the reference process")
    spec = f"ref:rate={stats.rate_per_min:.4g},c={1.2 * stats.q:.3g},mean={trace.durations.mean():.4g},cv={cv:.3g}"
    return {"spec": spec, "q": stats.q, "misfits": misfits}
