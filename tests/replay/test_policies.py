"""Policies: what they parse to, what they decide, and that they see the past only."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loader.errors import RequestError
from scripts.replay.laws import Constant
from scripts.replay.levels import retention_curve
from scripts.replay.options import Options
from scripts.replay.policies import parse_plan
from scripts.replay.policy import Setup
from scripts.replay.simulate import simulate
from scripts.replay.specs import split_specs
from scripts.replay.traces import Trace, single_pool
from scripts.replay.workload import synthetic


@pytest.mark.parametrize(
    ("text", "retention"),
    [
        ("multiple:2", 140.0),
        ("multiple:m=0.5", 35.0),
        ("fixed:60", 60.0),
        ("zero", 0.0),
        ("break_even:3", 280.0),
        ("fixed:inf", math.inf),
    ],
)
def test_constant_retentions(text: str, retention: float) -> None:
    assert parse_plan(text).policy.retention(70.0, "all") == retention


def test_per_pool_retention() -> None:
    policy = parse_plan("pools:a=10,other=3").policy
    assert [policy.retention(7.0, name) for name in ("a", "b")] == [10.0, 3.0]
    with pytest.raises(RequestError, match="'b'"):
        parse_plan("pools:a=10").policy.retention(7.0, "b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "multiple:x",
        "fixed",
        "fixed:-1",
        "zero:3",
        "hybrid:rnage=3",
        "multiple:2+zero",
        "schedule",
        "target:u=0",
        "floor:1.5",
        "fixed:nan",
    ],
)
def test_bad_policies_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_plan(text)


def test_list_of_specifications() -> None:
    text = "7.2,lognormal:p50=7,p90=20,multiple:2+buffer:1,percent=10,zero"
    assert split_specs(text) == ["7.2", "lognormal:p50=7,p90=20", "multiple:2+buffer:1,percent=10", "zero"]


def regular(gap: float, count: int = 400) -> Trace:
    """One request at a time, idle gaps of one length."""
    return single_pool(np.arange(count) * (10.0 + gap), np.full(count, 10.0))


def test_hybrid_learns_a_regular_gap_and_releases_until_just_before_it() -> None:
    """Gaps of 100 s at S = 7.2: keeping costs 100 s, a pre-start 7.2 s and a short wait for the request."""
    outcome = simulate(regular(100.0), Constant(7.2), parse_plan("hybrid"))
    late = outcome.cold[100:]
    assert late.sum() == 0
    assert outcome.idle_s / 400 < 40


def test_hybrid_keeps_through_short_gaps() -> None:
    outcome = simulate(regular(5.0), Constant(7.2), parse_plan("hybrid"))
    # The second request comes while the first, delayed by its start, still runs.
    assert outcome.starts == 2


def test_level_policy_finds_that_long_gaps_are_not_worth_keeping() -> None:
    outcome = simulate(regular(100.0), Constant(7.2), parse_plan("level:1"))
    # Break-even for 20 gaps of which none is shorter, then none.
    assert outcome.idle_s <= 22 * 14.4
    assert outcome.cold.all()


def test_level_policy_keeps_through_gaps_cheaper_than_a_start() -> None:
    outcome = simulate(regular(13.0), Constant(7.2), parse_plan("level:1"))
    assert outcome.starts == 1


def test_level_policy_is_close_to_the_best_constant_on_the_reference() -> None:
    trace = synthetic("ref:days=2", 1)
    curve = retention_curve(trace)
    _, best = curve.best(70.0, 1.0)
    outcome = simulate(trace, Constant(70.0), parse_plan("level:1"))
    cost = (outcome.idle_s + outcome.starts * 140.0) / len(trace)
    # Online, and levels move with S: within 15 % of the best constant found in hindsight.
    assert curve.clairvoyant_s(70.0, 1.0) < cost < 1.15 * best


def test_forecast_prestarts_for_the_busy_hour() -> None:
    """An hour of traffic a day at the same time: after the first day, workers are there before the requests."""
    busy = np.sort(np.random.default_rng(0).uniform(0, 3600, 400))
    arrivals = np.concatenate([busy + day * 7 * 86400 + 1800 for day in range(3)])
    trace = single_pool(arrivals, np.full(1200, 30.0))
    plain = simulate(trace, Constant(60.0), parse_plan("multiple:2"))
    forecast = simulate(trace, Constant(60.0), parse_plan("forecast:q=0.95"))
    assert forecast.waits[600:].mean() < plain.waits[600:].mean()
    assert forecast.useless >= 0


def test_schedule_keeps_its_floor_by_time_of_day() -> None:
    trace = single_pool(np.array([10 * 3600.0, 34 * 3600.0]), np.array([5.0, 5.0]))
    outcome = simulate(trace, Constant(60.0), parse_plan("schedule:0=0,9=1,18=0,m=0"))
    # Warm at both requests, from 9 to 18 h on the first day.
    assert outcome.waits.tolist() == [0.0, 0.0]
    assert outcome.intervals is not None
    lengths = np.diff(outcome.intervals.spans["idle"], axis=0)[0]
    assert outcome.idle_s == pytest.approx(9 * 3600 - 60 - 5 + (3600 - 60))
    assert sorted(lengths[lengths > 0].tolist()) == [3540.0, 3540.0, 28795.0]


def test_target_scales_to_zero_after_window_and_grace() -> None:
    trace = single_pool(np.array([0.0, 1000.0]), np.array([20.0, 20.0]))
    outcome = simulate(trace, Constant(5.0), parse_plan("target:u=0.7"), Options(binding="shared"))
    assert outcome.starts >= 2
    assert outcome.intervals is not None
    released = outcome.intervals.spans["idle"][1]
    first = released[released < 1000].max()
    # Busy until 25; the 60 s window is empty at 85, the grace of 30 s ends at 115; ticks every 2 s.
    assert first == pytest.approx(116, abs=3)


def test_target_needs_a_shared_queue() -> None:
    with pytest.raises(RequestError, match="shared"):
        simulate(regular(5.0, 3), Constant(5.0), parse_plan("target"))


@pytest.mark.parametrize("text", ["hybrid", "level:1", "forecast", "schedule:0=1,9=3", "multiple:2"])
def test_the_future_does_not_change_the_past(text: str) -> None:
    trace = synthetic("ref:hours=8", 2)
    half = trace.take(np.arange(len(trace) // 2))
    whole, part = (simulate(item, Constant(20.0), parse_plan(text)) for item in (trace, half))
    assert np.array_equal(whole.waits[: len(half)], part.waits)


def test_controllers_start_afresh_for_each_run() -> None:
    plan = parse_plan("level:1")
    one, other = (plan.policy.controller(Setup(7.0, ("all",))) for _ in range(2))
    one.arrival(0, 1, 0.0)
    assert one is not other
    trace = synthetic("ref:hours=6", 2)
    first, second = (simulate(trace, Constant(7.0), plan) for _ in range(2))
    assert np.array_equal(first.waits, second.waits)
