"""The level curve: exact for zero startup, an estimate otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.replay.gap_policies import best_retention
from scripts.replay.laws import Constant
from scripts.replay.levels import retention_curve
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace, single_pool
from scripts.replay.workload import synthetic

# Halves of small integers: ties of every kind, sums exact in binary.
QUICK = settings(deadline=None, max_examples=60)  # a busy machine is no failure
HALVES = st.integers(0, 60).map(lambda value: value / 2)
REQUESTS = st.lists(st.tuples(HALVES, HALVES, st.integers(0, 1)), min_size=1, max_size=40)


def build(requests: list[tuple[float, float, int]]) -> Trace:
    rows = sorted(requests, key=lambda row: row[0])
    trace = single_pool(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))
    return replace(trace, pools=np.array([row[2] for row in rows], dtype=np.int32), pool_names=("a", "b"))


@QUICK
@given(requests=REQUESTS, retention=HALVES)
def test_curve_equals_the_engine_for_zero_startup(
    requests: list[tuple[float, float, int]], retention: float
) -> None:
    trace = build(requests)
    curve = retention_curve(trace)
    outcome = simulate(trace, Constant(0.0), parse_plan(f"fixed:{retention}"))
    assert int(curve.starts(retention)) == outcome.starts
    assert float(curve.idle_s(retention)) == outcome.idle_s


@QUICK
@given(requests=REQUESTS)
def test_starts_never_increase_with_retention_for_zero_startup(
    requests: list[tuple[float, float, int]],
) -> None:
    trace = build(requests)
    starts = [simulate(trace, Constant(0.0), parse_plan(f"fixed:{r}")).starts for r in (0, 0.5, 2, 5, 11, 40)]
    assert starts == sorted(starts, reverse=True)


@QUICK
@given(requests=REQUESTS, limit=HALVES)
def test_clairvoyant_engine_equals_the_curve(requests: list[tuple[float, float, int]], limit: float) -> None:
    trace = build(requests)
    curve = retention_curve(trace)
    outcome = simulate(trace, Constant(0.0), parse_plan(f"clairvoyant:{limit}"))
    # With S = 0 the limit S·(1 + w) is 0: only gaps of length 0 are kept.
    assert outcome.starts == int(curve.starts(0.0))
    assert outcome.idle_s == 0.0


def test_curve_equals_the_engine_on_the_reference_workload() -> None:
    trace = synthetic("ref:days=2", 5)
    curve = retention_curve(trace)
    for retention in (0.0, 3.0, 14.4, 140.0, 1000.0):
        outcome = simulate(trace, Constant(0.0), parse_plan(f"fixed:{retention}"))
        assert int(curve.starts(retention)) == outcome.starts
        # The same terms in another order.
        assert float(curve.idle_s(retention)) == pytest.approx(outcome.idle_s, rel=1e-12)


@pytest.mark.parametrize(("startup", "points"), [(7.2, 0.4), (20.0, 0.5), (70.0, 1.5)])
def test_estimate_for_a_real_startup_is_close(startup: float, points: float) -> None:
    trace = synthetic("ref:days=3", 6)
    outcome = simulate(trace, Constant(startup), parse_plan("multiple:2"))
    exact = 100 * outcome.generating_s / outcome.allocated_s
    assert 100 * float(retention_curve(trace).share(2 * startup, startup)) == pytest.approx(exact, abs=points)


def test_best_retention_beats_a_fine_grid() -> None:
    curve = retention_curve(synthetic("ref:days=1", 7))
    for startup, wait_value in ((7.2, 0.0), (7.2, 3.0), (70.0, 1.0)):
        retention, cost = curve.best(startup, wait_value)
        grid = np.linspace(0, 20 * startup, 4001)
        assert cost <= curve.cost_s(grid, startup, wait_value).min() + 1e-9
        assert float(curve.cost_s(retention, startup, wait_value)) == cost
        assert curve.clairvoyant_s(startup, wait_value) <= curve.best_by_level(startup, wait_value) <= cost


@QUICK
@given(gaps=st.lists(st.integers(0, 50), min_size=1, max_size=30), price=st.integers(0, 60))
def test_online_best_retention_equals_exhaustive_search(gaps: list[int], price: int) -> None:
    def cost(retention: float) -> float:
        return sum(min(gap, retention) + price * (gap > retention) for gap in gaps)

    found = best_retention(sorted(map(float, gaps)), float(price))
    assert cost(found) == min(cost(candidate) for candidate in [0, *gaps])
