"""What must hold for any trace; and only true laws (see docs/replay.md for plausible ones that are false)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.replay.laws import Constant, parse_law
from scripts.replay.measures import Prices, binned_seconds, measure
from scripts.replay.options import Options
from scripts.replay.outcome import SERVED, Outcome
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace, single_pool

QUICK = settings(deadline=None, max_examples=60)  # a busy machine is no failure
HALVES = st.integers(0, 80).map(lambda value: value / 2)
POLICIES = ("multiple:2", "zero", "fixed:7", "fixed:inf", "hybrid", "level:1", "forecast", "zero+floor:1", "fixed:5+buffer:2",
            "fixed:9+buffer:0,percent=50,active=1", "schedule:0=1,12=2")  # fmt: skip
EXTRAS: tuple[dict[str, object], ...] = (
    {},
    {"binding": "shared"},
    {"binding": "shared", "cancel_surplus": True},
    {"max_workers": 2},
    {"max_workers": 3, "dispatch": "oldest-idle"},
    {"max_gpus": 2, "evict": True},
    {"queue_limit": 1, "max_workers": 1},
    {"queue_timeout_s": 6.0, "max_workers": 1},
    {"scale_delay_s": 3.0},
    {"scale_rate": (1, 10.0)},
    {"start_failure": (0.3, 2.0)},
    {"preempt_mean_s": 40.0},
    {"preempt_mean_s": 40.0, "binding": "shared"},
    {"dispatch": "newest-created"},
    {"fresh_idle_s": 1.0, "binding": "shared"},
    {"slowdown": (1.0, 1.5, 2.25)},
    {"scheduling": parse_law("uniform:low=1,high=4"), "bill_scheduling": True},
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Trace, float, str, Options]:
    rows = sorted(draw(st.lists(st.tuples(HALVES, HALVES, st.integers(0, 1)), min_size=1, max_size=25)))
    trace = single_pool(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))
    trace = replace(trace, pools=np.array([row[2] for row in rows], dtype=np.int32), pool_names=("a", "b"))
    policy = draw(st.sampled_from(POLICIES))
    extra = dict(draw(st.sampled_from(EXTRAS)))
    if ("floor" in policy and "max_gpus" in extra) or (policy == "fixed:inf" and "max_gpus" in extra):
        extra = {}  # a floor or endless workers of one pool may hold every GPU: refused with a message of its own
    if "schedule" in policy or "buffer" in policy:
        extra.pop("max_gpus", None)
    startup = draw(st.sampled_from([0.0, 0.5, 4.0, 20.0]))
    return trace, startup, policy, Options(seed=draw(st.integers(0, 5)), **extra)  # type: ignore[arg-type]


def run(situation: tuple[Trace, float, str, Options]) -> Outcome:
    trace, startup, policy, options = situation
    return simulate(trace, Constant(startup), parse_plan(policy), options)


@QUICK
@given(situation=situations())
def test_time_is_split_without_gaps_and_everyone_is_served_once(
    situation: tuple[Trace, float, str, Options],
) -> None:
    trace, _, _, options = situation
    outcome = run(situation)
    served = outcome.status == SERVED
    assert np.isfinite(outcome.waits[served]).all()
    assert (outcome.waits[served] >= 0).all()
    assert np.isnan(outcome.waits[~served]).all()
    assert min(outcome.generating_s, outcome.starting_s, outcome.idle_s, outcome.lost_s) >= 0
    if len(options.slowdown) == 1:
        assert outcome.generating_s == pytest.approx(trace.durations[served].sum(), abs=1e-9)
    if options.queue_limit is None and options.queue_timeout_s is None:
        assert served.all()


@QUICK
@given(situation=situations())
def test_a_worker_does_one_thing_at_a_time_from_start_to_release(
    situation: tuple[Trace, float, str, Options],
) -> None:
    trace, startup, policy, options = situation
    outcome = simulate(trace, Constant(startup), parse_plan(policy), replace(options, engine="fleet"))
    assert outcome.intervals is not None
    by_worker: dict[int, list[tuple[float, float]]] = {}
    for kind, span in outcome.intervals.spans.items():
        for begin, end, worker in zip(*span, outcome.intervals.workers[kind], strict=True):
            by_worker.setdefault(int(worker), []).append((float(begin), float(end)))
    for spans in by_worker.values():
        spans.sort()
        # Halves plus a drawn delay: sums differ by rounding only.
        assert all(
            later[0] == pytest.approx(earlier[1], abs=1e-9) for earlier, later in itertools.pairwise(spans)
        )


@QUICK
@given(situation=situations(), width=st.sampled_from([1.0, 7.0, 60.0]))
def test_bins_add_up_to_the_totals(situation: tuple[Trace, float, str, Options], width: float) -> None:
    outcome = run(situation)
    assert outcome.intervals is not None
    for kind, span in outcome.intervals.spans.items():
        count = int(max(span[1].max() if span.size else 0.0, 1.0) // width) + 1
        bins = binned_seconds(span, width, count)
        assert (bins >= -1e-9).all()
        assert bins.sum() == pytest.approx(outcome.intervals.seconds(kind), abs=1e-6)


@QUICK
@given(situation=situations())
def test_bound_requests_wait_at_most_one_startup(situation: tuple[Trace, float, str, Options]) -> None:
    trace, startup, policy, _ = situation
    outcome = simulate(trace, Constant(startup), parse_plan(policy))
    assert outcome.waits.max() <= startup + 1e-9
    if startup == 0:
        assert outcome.waits.max() == 0


@QUICK
@given(situation=situations())
def test_shared_queues_are_first_in_first_out(situation: tuple[Trace, float, str, Options]) -> None:
    trace, startup, policy, _ = situation
    for cap in (None, 1, 2):
        outcome = simulate(
            trace, Constant(startup), parse_plan(policy), Options(binding="shared", max_workers=cap)
        )
        begin = trace.arrivals + outcome.waits
        for pool in (0, 1):
            assert (np.diff(begin[trace.pools == pool]) >= -1e-9).all()


@QUICK
@given(situation=situations(), exponent=st.integers(-2, 5))
def test_scaling_all_times_scales_the_result(
    situation: tuple[Trace, float, str, Options], exponent: int
) -> None:
    trace, startup, _, _ = situation
    factor = 2.0**exponent  # exact in binary, so equality holds to the bit
    scaled = replace(trace, arrivals=trace.arrivals * factor, durations=trace.durations * factor)
    for binding in ("bound", "shared"):
        one = simulate(trace, Constant(startup), parse_plan("multiple:2"), Options(binding=binding))
        other = simulate(
            scaled, Constant(startup * factor), parse_plan("multiple:2"), Options(binding=binding)
        )
        assert np.array_equal(one.waits * factor, other.waits)
        assert (one.starts, one.idle_s * factor) == (other.starts, other.idle_s)


@QUICK
@given(situation=situations(), seed=st.integers(0, 100))
def test_order_of_equal_rows_does_not_change_the_totals(
    situation: tuple[Trace, float, str, Options], seed: int
) -> None:
    trace, startup, policy, _ = situation
    equal = replace(
        trace,
        durations=np.full(len(trace), 5.0),
        pools=np.zeros(len(trace), dtype=np.int32),
        pool_names=("a",),
    )
    shuffled = np.random.default_rng(seed).permutation(len(trace))
    order = shuffled[np.argsort(equal.arrivals[shuffled], kind="stable")]
    one = simulate(equal, Constant(startup), parse_plan(policy))
    other = simulate(equal.take(order), Constant(startup), parse_plan(policy))
    assert (one.starts, one.idle_s, one.waits.sum()) == (other.starts, other.idle_s, other.waits.sum())


@QUICK
@given(rows=st.lists(st.tuples(HALVES, HALVES), min_size=1, max_size=40), workers=st.integers(1, 4))
def test_one_more_always_warm_worker_never_makes_a_request_wait_longer(
    rows: list[tuple[float, float]], workers: int
) -> None:
    rows = sorted(rows)
    trace = single_pool(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))
    plan = parse_plan("fixed:inf")
    waits = [
        simulate(trace, Constant(0.0), plan, Options(max_workers=count)).waits
        for count in (workers, workers + 1)
    ]
    assert (waits[1] <= waits[0]).all()


@QUICK
@given(situation=situations())
def test_window_over_everything_changes_nothing(situation: tuple[Trace, float, str, Options]) -> None:
    trace, startup, policy, options = situation
    whole = run(situation)
    windowed = simulate(trace, Constant(startup), parse_plan(policy), replace(options, window=(0.0, 1e9)))
    assert windowed.allocated_s == pytest.approx(whole.allocated_s, abs=1e-6)
    halves = [
        simulate(trace, Constant(startup), parse_plan(policy), replace(options, window=part)).allocated_s
        for part in ((0.0, 20.0), (20.0, 1e9))
    ]
    assert sum(halves) == pytest.approx(whole.allocated_s, abs=1e-6)


@QUICK
@given(situation=situations())
def test_figures_are_finite_and_json_ready(situation: tuple[Trace, float, str, Options]) -> None:
    import json

    trace, startup, policy, options = situation
    plan, law = parse_plan(policy), Constant(startup)
    figures = measure(trace, law, plan, options, run(situation), Prices(0.002, 0.01, 1.0))
    assert json.loads(json.dumps(figures, allow_nan=False))["served"] == figures["served"]
