"""The published figures that follow from arithmetic alone, and the simulator on the same situations."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.replay import arithmetic
from scripts.replay.laws import Constant
from scripts.replay.options import Options
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import single_pool

# generation, startup, retention in startups, share %, first over warm (two resp. three decimals as published)
CYCLES = [
    (70, 70, 2, 25.00, 2.000),
    (70, 70, 0, 50.00, 2.000),
    (70, 7, 2, 76.92, 1.100),
    (70, 7, 0, 90.91, 1.100),
    (155, 70, 2, 42.47, 1.452),
    (155, 7, 2, 88.07, 1.045),
    (70, 7.2, 2, 76.42, 1.103),
]


@pytest.mark.parametrize(("generation", "startup", "multiple", "share", "ratio"), CYCLES)
def test_one_cycle(generation: float, startup: float, multiple: float, share: float, ratio: float) -> None:
    assert round(100 * arithmetic.cycle_share(generation, startup, multiple), 2) == share
    assert round(arithmetic.first_over_warm(generation, startup), 3) == ratio
    trace = single_pool(np.array([0.0]), np.array([float(generation)]))
    outcome = simulate(trace, Constant(startup), parse_plan(f"multiple:{multiple}"))
    assert outcome.generating_s / outcome.allocated_s == pytest.approx(share / 100, abs=5e-5)
    assert (outcome.waits[0] + generation) / generation == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize("engine", ["python", "fleet"])
def test_400_at_once_on_100_warm_workers_wait_in_waves(engine: str) -> None:
    trace = single_pool(np.zeros(400), np.full(400, 70.0))
    options = Options(max_workers=100, engine=engine)
    outcome = simulate(trace, Constant(0.0), parse_plan("fixed:inf"), options)
    waits, counts = np.unique(outcome.waits, return_counts=True)
    assert waits.tolist() == [0.0, 70.0, 140.0, 210.0]
    assert counts.tolist() == [100, 100, 100, 100]
    assert [arithmetic.wave_wait(k, 100, 70.0) for k in (0, 99, 100, 399)] == [0, 0, 70, 210]


def test_sizing_for_the_peak() -> None:
    assert arithmetic.idle_share_at_peak(3) == pytest.approx(2 / 3)
    assert arithmetic.idle_share_at_peak(4) == 0.75


def test_prices() -> None:
    assert round(arithmetic.price(3600, 1, 0.001972), 4) == 7.0992
    assert round(arithmetic.price(19.8 * 60, 8, 0.001972), 2) == 18.74
    assert round(arithmetic.price(26.5, 8, 0.001972), 2) == 0.42
    assert round(arithmetic.price(300, 8, 0.001972), 2) == 4.73


def test_two_shares_fix_the_cuts() -> None:
    assert round(100 * arithmetic.time_saved(0.33, 0.75), 1) == 56.0
    assert round(100 * arithmetic.overhead_cut(0.33, 0.75), 1) == 83.6


def test_break_even_at_one_is_twice_the_startup() -> None:
    assert arithmetic.break_even_retention(70.0, 1.0) == 140.0


def test_erlang_c() -> None:
    # Tabulated: 6 erlangs on 8 servers.
    assert round(arithmetic.erlang_c(6.0, 8), 4) == 0.3570


@pytest.mark.parametrize(("mean", "quantile", "expected"), [(0.5, 0.9, 1), (4.0, 0.5, 4), (10.0, 0.99, 18)])
def test_poisson_quantile(mean: float, quantile: float, expected: int) -> None:
    assert arithmetic.poisson_quantile(mean, quantile) == expected
