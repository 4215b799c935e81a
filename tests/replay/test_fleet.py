"""Extensions of the base model, each on a case small enough to follow by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loader.errors import RequestError
from scripts.replay.laws import Constant, parse_law
from scripts.replay.options import Options
from scripts.replay.outcome import ABANDONED, REFUSED, SERVED, Outcome
from scripts.replay.platforms import parse_delay, parse_system
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace, single_pool


def trace_of(*rows: tuple[float, float], pools: list[int] | None = None) -> Trace:
    trace = single_pool(
        np.array([row[0] for row in rows], dtype=float), np.array([row[1] for row in rows], dtype=float)
    )
    if pools is None:
        return trace
    names = tuple(f"p{index}" for index in range(max(pools) + 1))
    return Trace(trace.arrivals, trace.durations, np.array(pools, dtype=np.int32), names, "hand")


def run(trace: Trace, policy: str, startup: float = 5.0, **options: Any) -> Outcome:
    return simulate(trace, Constant(startup), parse_plan(policy), Options(**options))


def starts_at(outcome: Outcome) -> list[float]:
    assert outcome.intervals is not None
    return sorted(outcome.intervals.spans["starting"][0].tolist())


def test_shared_start_is_taken_by_whoever_is_first() -> None:
    # The second request queues at 8, its start is ready at 13; the first worker is free at 10 and takes it.
    outcome = run(trace_of((0, 5), (8, 4)), "fixed:20", binding="shared")
    assert (outcome.waits.tolist(), outcome.starts, outcome.useless) == ([5.0, 2.0], 2, 1)


def test_surplus_start_is_cancelled() -> None:
    outcome = run(trace_of((0, 5), (8, 4)), "fixed:20", binding="shared", cancel_surplus=True)
    assert (outcome.cancelled, outcome.starting_s) == (1, 5.0 + 2.0)


def test_starting_capacity_counts_as_capacity() -> None:
    """A burst on a slow start: as many workers as requests, not one more for every look at the queue."""
    outcome = run(
        trace_of(*[(0.1 * index, 30.0) for index in range(20)]), "fixed:20", startup=60.0, binding="shared"
    )
    assert (outcome.starts, outcome.useless) == (20, 0)


def test_floor_is_warm_before_the_trace_and_released_after_it() -> None:
    outcome = run(trace_of((10, 5), (30, 5)), "zero+floor:1")
    assert (outcome.starts, outcome.prewarmed, outcome.waits.tolist()) == (0, 1, [0.0, 0.0])
    assert outcome.idle_s == 10 + 15


def test_buffer_replaces_the_spare_at_dispatch() -> None:
    outcome = run(trace_of((10, 100)), "zero+buffer:1")
    assert (outcome.prewarmed, starts_at(outcome)) == (1, [10.0])
    assert outcome.waits[0] == 0


def test_buffer_while_active_starts_with_the_first_request_only() -> None:
    outcome = run(trace_of((10, 100)), "zero+buffer:1,active=1")
    assert (outcome.prewarmed, starts_at(outcome), outcome.waits[0]) == (0, [10.0, 10.0], 5.0)
    # The spare is released when nothing runs any more.
    assert outcome.intervals is not None
    assert outcome.intervals.spans["idle"][1].max() == 115.0


def test_buffer_percent_rounds_up() -> None:
    outcome = run(trace_of((0, 100), (0, 100), (0, 100)), "zero+buffer:0,percent=34")
    assert outcome.starts == 3 + 2


def test_queue_limit_refuses_and_timeout_abandons() -> None:
    rows = [(0, 50), (1, 50), (2, 50)]
    refused = run(trace_of(*rows), "zero", max_workers=1, queue_limit=1)
    assert refused.status.tolist() == [SERVED, SERVED, REFUSED]
    abandoned = run(trace_of(*rows), "zero", max_workers=1, queue_timeout_s=60.0)
    assert abandoned.status.tolist() == [SERVED, SERVED, ABANDONED]
    assert math.isnan(abandoned.waits[2])
    assert abandoned.waits[1] == 54.0


def test_lost_requests_are_not_averaged_into_waits() -> None:
    from scripts.replay.measures import Prices, measure

    trace, options = trace_of((0, 50), (1, 50), (2, 50)), Options(max_workers=1, queue_limit=1)
    plan = parse_plan("zero")
    figures = measure(
        trace, Constant(5.0), plan, options, simulate(trace, Constant(5.0), plan, options), Prices()
    )
    assert (figures["served"], figures["refused"]) == (2, 1)
    assert figures["wait_s"] == {"mean": 29.5, "p50": 5.0, "p90": 54.0, "p95": 54.0, "p99": 54.0, "max": 54.0}


def test_global_cap_makes_pools_wait_and_eviction_frees_the_oldest_idle() -> None:
    trace = trace_of((0, 10), (1, 10), (20, 10), pools=[0, 1, 2])
    waiting = run(trace, "fixed:100", max_gpus=2)
    assert waiting.waits[2] == 15 + 100 - 20 + 5
    evicting = run(trace, "fixed:100", max_gpus=2, evict=True)
    assert (evicting.waits[2], evicting.evicted) == (5.0, 1)


def test_a_request_that_can_never_be_served_is_an_error() -> None:
    with pytest.raises(RequestError, match="never be served"):
        run(trace_of((0, 10), (20, 10), pools=[0, 1]), "fixed:inf", max_gpus=1)


def test_scale_delay_and_rate() -> None:
    burst = trace_of(*[(0, 100)] * 5)
    assert starts_at(run(burst, "zero", scale_delay_s=7.0)) == [7.0] * 5
    assert starts_at(run(burst, "zero", scale_rate=(2, 10.0))) == [0.0, 0.0, 10.0, 10.0, 20.0]


def test_failed_starts_back_off_30_60_90() -> None:
    found = run(trace_of((0, 10)), "zero", start_failure=(0.9, 2.0), seed=3)
    begins = starts_at(found)
    assert found.failed_starts == len(begins) - 1 > 2
    pauses = np.diff(begins) - 2.0
    assert pauses.tolist() == [min(30.0 * (index + 1), 600.0) for index in range(len(pauses))]
    assert found.waits[0] == begins[-1] + 5.0


def test_preempted_work_is_lost_and_done_again() -> None:
    trace = trace_of((0, 50))
    found = [run(trace, "zero", preempt_mean_s=40.0, seed=seed) for seed in range(20)]
    hit = [outcome for outcome in found if outcome.lost_s > 0]
    assert hit
    for outcome in found:
        assert outcome.generating_s == pytest.approx(50.0)  # end minus begin
        assert outcome.starts == 1 + outcome.preempted
    assert hit[0].waits[0] > 5.0


def test_fresh_worker_is_dropped_sooner() -> None:
    outcome = run(trace_of((0, 5), (8, 4)), "fixed:20", binding="shared", fresh_idle_s=1.0)
    assert outcome.intervals is not None
    lengths = np.diff(outcome.intervals.spans["idle"], axis=0)[0]
    assert sorted(lengths.tolist()) == [1.0, 20.0]


def test_requests_in_one_worker_slow_each_other_down() -> None:
    # The first runs alone from 5 to 9, then both at half speed: done at 21; the second has 4 s left, done at 25.
    outcome = run(trace_of((0, 10), (9, 10)), "zero", slowdown=(1.0, 2.0))
    assert (outcome.starts, outcome.waits.tolist()) == (1, [5.0, 0.0])
    assert outcome.generating_s == 20.0
    assert outcome.allocated_s == 25.0


def test_newest_created_differs_from_newest_idle() -> None:
    rows = [(0, 30), (1, 10), (60, 5)]
    workers = {}
    for dispatch in ("newest-idle", "newest-created"):
        outcome = run(trace_of(*rows), "fixed:100", dispatch=dispatch, engine="fleet")
        assert outcome.intervals is not None
        at = outcome.intervals.spans["generating"][0] == 60.0
        workers[dispatch] = int(outcome.intervals.workers["generating"][at][0])
    assert workers == {"newest-idle": 0, "newest-created": 1}


def test_scheduling_adds_to_the_wait_and_is_billed_on_request() -> None:
    law = parse_law("fixed:3")
    free = run(trace_of((0, 10)), "zero", scheduling=law)
    billed = run(trace_of((0, 10)), "zero", scheduling=law, bill_scheduling=True)
    assert (free.waits[0], free.starting_s, billed.starting_s) == (8.0, 5.0, 8.0)


def test_modal_delay_grows_with_simultaneous_starts() -> None:
    law = parse_delay("modal")
    burst = simulate(
        trace_of(*[(0, 10)] * 30), Constant(0.0), parse_plan("zero"), Options(scheduling=law, seed=2)
    )
    alone = simulate(
        trace_of(*[(1000.0 * index, 10) for index in range(30)]),
        Constant(0.0),
        parse_plan("zero"),
        Options(scheduling=law, seed=2),
    )
    assert (alone.waits >= 2).all()
    assert (alone.waits <= 9).all()
    assert burst.waits.max() > 20
    assert burst.waits.max() <= 36


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("fal", 3, 15), ("fal:image_pull=1", 63, 75), ("together", 16, 90), ("nebius", 120, 360)],
)
def test_delay_presets(text: str, low: float, high: float) -> None:
    drawn = parse_delay(text).draw(np.random.default_rng(0), 10_000)
    assert drawn.min() == pytest.approx(low, rel=0.02)
    assert drawn.max() == pytest.approx(high, rel=0.02)


def test_replica_of_several_gpus() -> None:
    from scripts.replay.measures import Prices, measure

    options, plan = Options(gpus_per_worker=4, efficiency={4: 0.8}), parse_plan("multiple:2")
    trace = trace_of((0, 64))
    outcome = simulate(trace, Constant(5.0), plan, options)
    figures: Any = measure(trace, Constant(5.0), plan, options, outcome, Prices(0.001))
    assert outcome.generating_s == 20.0
    assert figures["gpu_s"]["allocated"] == 4 * (20 + 5 + 10)
    assert figures["cost_usd"] == pytest.approx(0.14)


def test_random_draws_are_common_to_all_policies() -> None:
    trace = trace_of(*[(10.0 * index, 1.0) for index in range(50)])
    law = parse_law("lognormal:p50=7,p90=20")
    zero, short = (
        simulate(trace, law, parse_plan(policy), Options(seed=4)) for policy in ("zero", "fixed:3")
    )
    both = (zero.cold == 1) & (short.cold == 1)
    assert both.any()
    assert np.array_equal(zero.waits[both], short.waits[both])


@pytest.mark.parametrize(
    "system",
    [
        "modal:scaledown_window=60,buffer_containers=1",
        "fal:keep_alive=10",
        "knative",
        "keda",
        "ray-serve:max=20",
        "serverless-llm",
        "simfaas",
    ],
)
def test_systems_serve_a_burst(system: str) -> None:
    policy, options = parse_system(system, Options())
    rng = np.random.default_rng(5)
    trace = single_pool(np.sort(rng.uniform(0, 600, 80)), rng.gamma(4.0, 5.0, 80))
    outcome = simulate(trace, Constant(7.2), parse_plan(policy), options)
    cap = options.max_workers
    assert cap is None or outcome.peak_workers <= cap
    assert (outcome.status == SERVED).all() or system == "simfaas"


def test_modal_refuses_a_window_of_one_second() -> None:
    with pytest.raises(RequestError, match=r"2 … 3600"):
        parse_system("modal:scaledown_window=1", Options())


def test_target_policy_reports_flapping_settings() -> None:
    from scripts.replay.measures import flags

    text = " ".join(
        flags(Constant(70.0), parse_plan("target:u=0.7,window=60,grace=10"), Options(), trace_of((0, 1)))
    )
    assert "hold-down 10 s is shorter than the metric window 60 s" in text
    assert "startup 70 s is longer than the metric window" in text
