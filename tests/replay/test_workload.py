"""Synthetic workloads: rates, reproducibility, burst statistics by family, profiles, pools."""

from __future__ import annotations

import numpy as np
import pytest

from loader.errors import RequestError
from scripts.replay.laws import parse_law, stream
from scripts.replay.stats import burst_stats, find_runs, minute_counts, nearest_rank
from scripts.replay.traces import single_pool
from scripts.replay.workload import GENERATORS, synthetic


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "spike"])
def test_mean_rate_is_as_asked(name: str) -> None:
    rates = [len(synthetic(f"{name}:rate=6,days=7,sigma_h=0", seed)) / (7 * 1440) for seed in range(6)]
    # The burstiest family has an index of dispersion near 20: six weeks know the rate to about 1 %.
    assert np.mean(rates) == pytest.approx(6.0, rel=0.05)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_same_seed_same_bytes(name: str) -> None:
    one, same, other = (synthetic(f"{name}:rate=5,hours=6,pools=3", seed) for seed in (1, 1, 2))
    assert one.digest() == same.digest() != other.digest()
    assert (np.diff(one.arrivals) >= 0).all()
    assert (one.durations > 0).all()
    assert set(one.pools.tolist()) == {0, 1, 2}


def test_volume_of_the_reference_changes_idc_not_q() -> None:
    stats = {rate: burst_stats(synthetic(f"ref:rate={rate}", 0), busy=0) for rate in (5, 100)}
    assert stats[5].idc == pytest.approx(7.9, rel=0.12)
    assert stats[100].idc == pytest.approx(159, rel=0.12)
    assert stats[5].q == pytest.approx(stats[100].q, rel=0.15)


@pytest.mark.parametrize(
    ("spec", "crossings", "median", "high"),
    [
        ("poisson:rate=1,days=14", 8.6, 2.6, 0.08),
        ("poisson:rate=2,days=14", 5.3, None, None),
        ("poisson:rate=10,days=14", 0.1, None, None),
        ("mixed:rate=10,days=14,shape=0.8", 8.0, 3.0, 0.23),
        ("batch:rate=5,days=14,p=0.8", 8.2, 3.0, 0.22),
        ("ref:rate=10,c=2,sigma_h=0,days=14", 8.6, 3.0, 0.21),
    ],
)
def test_burst_statistics_by_family(
    spec: str, crossings: float, median: float | None, high: float | None
) -> None:
    stats = burst_stats(synthetic(spec, 4), busy=0)
    # Two weeks hold some 2,700 bursts: 2 % on counts, 0.01 on fractions, and the published values are rounded.
    assert stats.crossings_per_hour == pytest.approx(crossings, abs=0.5)
    if median is not None:
        assert stats.peak_median == pytest.approx(median, abs=0.12)
        assert stats.peak_share_high == pytest.approx(high, abs=0.04)


def test_sliding_window_counts_more_crossings() -> None:
    trace = synthetic("ref", 0)
    disjoint, sliding = (burst_stats(trace, busy=0, sliding=flag) for flag in (False, True))
    assert sliding.crossings_per_hour == pytest.approx(14.7, abs=0.6)
    assert disjoint.crossings_per_hour == pytest.approx(8.6, abs=0.4)


def test_runs_and_peaks_by_hand() -> None:
    runs = find_runs(np.array([2.0, 0, 0, 2, 5, 3, 0, np.nan, np.nan, 2, np.nan, 1, 4]))
    assert runs.first.tolist() == [0, 3, 9, 12]
    assert runs.last.tolist() == [0, 5, 9, 12]
    assert runs.peak.tolist() == [2, 5, 2, 4]
    assert runs.top.tolist() == [0, 4, 9, 12]


def test_statistics_of_two_hours_by_hand() -> None:
    # Hour 0: 60 requests, one a minute. Hour 1: 60 requests, 5 in minute 65 and 5 in 66, 50 spread over the rest.
    spread = [60 + minute for minute in range(60) if minute not in (5, 6)][:50]
    minutes = [*range(60), *[65] * 5, *[66] * 5, *spread]
    arrivals = np.sort(np.array(minutes) * 60.0 + 30.0)
    trace = single_pool(arrivals - 0.0, np.ones(len(arrivals))).noted(span_s=7200.0)
    stats = burst_stats(trace, busy=0)
    assert (stats.hours, stats.busy_hours, stats.crossings_per_hour) == (2, 2, 0.5)
    assert (stats.peak_median, stats.peak_share_high, stats.max_minute, stats.length_min) == (
        5.0,
        1.0,
        5,
        2.0,
    )


def test_median_of_zero_is_not_divided_by() -> None:
    trace = single_pool(np.arange(20) * 600.0, np.ones(20))
    stats = burst_stats(trace)
    assert stats.max_over_median is None
    assert any("median" in note for note in stats.notes)


def test_short_trace_has_no_hour_based_statistics() -> None:
    stats = burst_stats(single_pool(np.array([0.0, 5.0]), np.ones(2)))
    assert stats.crossings_per_hour is None


def test_clock_minutes_follow_the_wall_clock() -> None:
    from dataclasses import replace

    trace = replace(single_pool(np.array([0.0, 30.0, 3600.0 * 5]), np.ones(3)), clock_s=3540.0)
    counts = minute_counts(trace)
    # The first event is at minute 59 of its hour, the second in the same minute; counting begins at the next full hour.
    assert counts[:60].sum() == 0
    assert counts.sum() == 0 or len(counts) % 60 == 0


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 5.0), (0.9, 9.0), (0.91, 10.0), (0.0, 1.0), (1.0, 10.0)]
)
def test_nearest_rank(share: float, expected: float) -> None:
    assert nearest_rank(np.arange(1.0, 11.0), share) == expected


def test_day_profile_moves_the_load() -> None:
    factors = "/".join(["0"] * 12 + ["1"] * 12)
    trace = synthetic(f"poisson:rate=10,days=3,day={factors}", 1)
    hours = (trace.arrivals % 86400 // 3600).astype(int)
    assert hours.min() == 12
    assert len(trace) == pytest.approx(3 * 14400, rel=0.03)


def test_zipf_pools() -> None:
    trace = synthetic("poisson:rate=50,days=2,pools=3,zipf=1", 1)
    shares = np.bincount(trace.pools) / len(trace)
    assert shares == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.01)


def test_spike_rises_by_its_multiplier() -> None:
    trace = synthetic("spike:rate=10,hours=12,at=14400,high=20,rise=60,decay=1800", 3)
    counts = np.bincount((trace.arrivals // 60).astype(int))
    assert counts[:230].mean() == pytest.approx(10, rel=0.1)
    assert counts[241:246].mean() == pytest.approx(190, rel=0.15)


@pytest.mark.parametrize(
    "text",
    [
        "what",
        "ref:rat=3",
        "ref:rate=0",
        "batch:p=1",
        "ref:rate=1e9,days=99",
        "poisson:day=1/2",
        "hawkes:n=1.2",
    ],
)
def test_bad_workloads_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        synthetic(text, 0)


@pytest.mark.parametrize(
    ("text", "mean", "p50", "p90"),
    [
        ("lognormal:p50=7.21,p90=19.88", None, 7.21, 19.88),
        ("lognormal:p50=64.70,p90=119.31", None, 64.70, 119.31),
        ("lognormal:mean=54,cv=0.4", 54.0, None, None),
        ("gamma:mean=50,shape=4", 50.0, None, None),
        ("exponential:mean=50", 50.0, None, 115.1),
        ("uniform:low=2,high=9", 5.5, 5.5, 8.3),
        ("mix:0.75*4|0.25*8", 5.0, 4.0, 8.0),
        ("fixed:7.2", 7.2, 7.2, 7.2),
    ],
)
def test_laws(text: str, mean: float | None, p50: float | None, p90: float | None) -> None:
    law = parse_law(text)
    drawn = law.draw(stream(1, "x"), 200_000)
    assert drawn.mean() == pytest.approx(law.mean(), rel=0.01)
    assert np.median(drawn) == pytest.approx(law.median(), rel=0.01)
    for value, found in ((mean, drawn.mean()), (p50, np.median(drawn)), (p90, np.quantile(drawn, 0.9))):
        assert value is None or found == pytest.approx(value, rel=0.01)


def test_lognormal_spread_of_measured_startups() -> None:
    for text, sigma in (
        ("p50=7.21,p90=19.88", 0.791),
        ("p50=64.70,p90=119.31", 0.478),
        ("p50=71.50,p90=126.03", 0.442),
    ):
        assert round(parse_law(f"lognormal:{text}").sigma, 3) == sigma  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "-1",
        "nan",
        "inf",
        "lognormal:p50=5",
        "lognormal:p50=9,p90=3",
        "uniform:low=3,high=2",
        "mix:1*",
        "gamma:mean=0",
        "empirical:nowhere",
    ],
)
def test_bad_laws_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_law(text)
