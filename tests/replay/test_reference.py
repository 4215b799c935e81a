"""The reference workload and the published traces: the figures that a change must not move."""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from scripts.replay.importers import import_trace
from scripts.replay.laws import Constant, parse_law
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.stats import burst_stats, fit_reference
from scripts.replay.traces import Trace, merge_pools, thin, with_durations
from scripts.replay.workload import from_windows, synthetic

DATA = Path(__file__).parent / "data"


def shares(trace: Trace) -> tuple[float, float, float, float]:
    """Shares at 70 and 7.2 s in %, overhead cut, GPU time saved in %; retention twice the startup."""
    found = []
    for startup in (70.0, 7.2):
        outcome = simulate(trace, Constant(startup), parse_plan("multiple:2"), record=False)
        found.append(outcome.generating_s / outcome.allocated_s)
    slow, fast = found
    return 100 * slow, 100 * fast, 100 * (1 - (1 / fast - 1) / (1 / slow - 1)), 100 * (1 - slow / fast)


@pytest.mark.parametrize("seed", [0, 1])
def test_reference_has_the_published_burst_statistics(seed: int) -> None:
    """Within three standard deviations over streams of the published means."""
    stats = burst_stats(synthetic("ref", seed), busy=0)
    assert stats.crossings_per_hour == pytest.approx(8.50, abs=3 * 0.14)
    assert stats.peak_median == pytest.approx(2.99, abs=3 * 0.04)
    assert stats.peak_share_high == pytest.approx(0.223, abs=3 * 0.017)
    assert stats.max_over_median == pytest.approx(20, abs=3 * 3)
    assert stats.q == pytest.approx(1.59, abs=0.15)


@pytest.mark.parametrize("seed", [0, 1])
def test_reference_gives_the_published_shares(seed: int) -> None:
    slow, fast, overhead, saved = shares(synthetic("ref", seed))
    assert slow == pytest.approx(33.15, abs=3 * 0.44)
    assert fast == pytest.approx(74.77, abs=3 * 0.13)
    assert overhead == pytest.approx(83.3, abs=3 * 0.2)
    assert saved == pytest.approx(55.7, abs=3 * 0.5)


def test_a_faster_start_makes_more_requests_cold_and_the_mean_wait_fall() -> None:
    trace = synthetic("ref", 0)
    slow, fast = (
        simulate(trace, Constant(startup), parse_plan("multiple:2"), record=False) for startup in (70.0, 7.2)
    )
    assert slow.cold.mean() == pytest.approx(0.388, abs=0.02)
    assert fast.cold.mean() == pytest.approx(0.743, abs=0.02)
    assert (slow.waits.mean(), fast.waits.mean()) == (
        pytest.approx(27.2, abs=1.4),
        pytest.approx(5.35, abs=0.15),
    )


@pytest.mark.parametrize("rate", [2, 30])
def test_volume_does_not_change_the_reference(rate: int) -> None:
    trace = synthetic(f"ref:rate={rate}", 3)
    slow, fast, *_ = shares(trace)
    assert (slow, fast) == (pytest.approx(33.1, abs=2.0), pytest.approx(74.8, abs=1.0))
    assert burst_stats(trace, busy=0).peak_median == pytest.approx(2.99, abs=0.15)


@pytest.mark.parametrize(
    ("load", "mean", "expected"),
    [(0.5, 60, (32, 75)), (2, 45, (42, 74)), (8, 30, (56, 78)), (16, 70, (70, 89))],
)
def test_poisson_table(load: float, mean: float, expected: tuple[int, int]) -> None:
    rate = load / mean * 60
    days = 40_000 / rate / 1440
    trace = synthetic(f"poisson:rate={rate!r},days={days!r},mean={mean},cv=0.4", 1)
    slow, fast, *_ = shares(trace)
    # Printed as whole percents; 40,000 requests add about half a point.
    assert (slow, fast) == (pytest.approx(expected[0], abs=1.3), pytest.approx(expected[1], abs=1.0))


def azure(mean: float) -> Trace:
    trace = import_trace("azure-llm", str(DATA / "azure_llm_2023_code.csv"))
    return with_durations(trace, parse_law(f"lognormal:mean={mean},cv=0.4"), 0)


def test_azure_code_as_is() -> None:
    trace = azure(54)
    assert len(trace) == 8819
    # Service times are drawn: one point between streams.
    assert shares(trace) == pytest.approx((36.0, 79.6, 85.6, 54.8), abs=1.0)


def test_azure_code_thinned() -> None:
    found = [
        shares(
            with_durations(
                thin(azure(46), Fraction(1, 20), seed), parse_law("lognormal:mean=46,cv=0.4"), seed
            )
        )
        for seed in range(8)
    ]
    means = [sum(values) / len(values) for values in zip(*found, strict=True)]
    # 440 requests an hour: several points between draws, one for the mean of eight.
    assert means == pytest.approx([33.2, 75.3, 83.7, 55.9], abs=2.5)


@pytest.mark.parametrize(
    ("scale", "expected"), [(0.1, (43.1, 79.3, 80.2, 45.6)), (0.02, (32.4, 74.6, 83.7, 56.5))]
)
def test_servegen_clients(scale: float, expected: tuple[float, ...]) -> None:
    with (DATA / "servegen_mm_image_windows.csv").open() as file:
        rows = list(csv.DictReader(file))
    trace = from_windows(rows, rate_scale=scale, mean_s=54.0, cv=0.4, seed=0, label="servegen")
    total = sum(float(row["rate"]) * float(row["length"]) for row in rows) * scale
    assert len(trace.pool_names) == 35
    # Without restarts the count stays at its expectation (gap CV up to 15: a few percent at thin rates).
    assert len(trace) == pytest.approx(total, rel=0.06)
    assert shares(trace) == pytest.approx(expected, abs=1.2)
    if scale == 0.02:
        assert shares(merge_pools(trace)) == pytest.approx((50.1, 82.1, 78.1, 39.0), abs=1.5)


def test_fit_finds_the_parameters_of_the_reference() -> None:
    trace = synthetic("ref:rate=20,days=7", 2)
    fitted = fit_reference(burst_stats(trace, busy=0), trace)
    parameters = dict(part.split("=") for part in str(fitted["spec"]).partition(":")[2].split(","))
    assert float(parameters["rate"]) == pytest.approx(20, rel=0.08)
    assert float(parameters["c"]) == pytest.approx(1.9, rel=0.1)
    assert float(parameters["mean"]) == pytest.approx(51.5, rel=0.02)
    assert fitted["misfits"] == []


def test_fit_says_what_does_not_match() -> None:
    trace = synthetic("poisson:rate=30,days=2", 2)
    misfits = fit_reference(burst_stats(trace, busy=0), trace)["misfits"]
    assert any(text.startswith("crossings_per_hour") for text in misfits)
