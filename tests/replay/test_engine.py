"""The plain loops: hand cases, closed forms, equality of engines, independence of chunks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.replay import engine
from scripts.replay.arithmetic import erlang_c
from scripts.replay.laws import Constant, parse_law
from scripts.replay.options import Options
from scripts.replay.outcome import most_at_once
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace, single_pool

ENGINES = ["python", "numba", "fleet"]


def expm(matrix: np.ndarray) -> np.ndarray:
    """Matrix exponential by scaling and squaring; the generators here have norms below 100."""
    halvings = max(0, math.ceil(math.log2(max(np.abs(matrix).sum(axis=1).max(), 1e-9)))) + 4
    scaled, term = matrix / 2**halvings, np.eye(len(matrix))
    total = term.copy()
    for order in range(1, 16):
        term = term @ scaled / order
        total += term
    return np.linalg.matrix_power(total, 2**halvings)


def poisson(rate: float, count: int, durations: np.ndarray, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    return single_pool(np.cumsum(rng.exponential(1 / rate, count)), durations)


@pytest.mark.parametrize("name", ENGINES)
def test_two_requests_one_second_apart_start_two_workers(name: str) -> None:
    trace = single_pool(np.array([0.0, 1.0]), np.array([10.0, 10.0]))
    outcome = simulate(trace, Constant(5.0), parse_plan("fixed:3"), Options(engine=name))
    assert outcome.waits.tolist() == [5.0, 5.0]
    assert (outcome.starts, outcome.idle_s, outcome.starting_s) == (2, 6.0, 10.0)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("late", "starts"), [(0.0, 1), (1e-6, 2)])
def test_an_arrival_exactly_at_the_end_of_retention_is_warm(name: str, late: float, starts: int) -> None:
    trace = single_pool(np.array([0.0, 5.0 + 10.0 + 3.0 + late]), np.array([10.0, 10.0]))
    assert simulate(trace, Constant(5.0), parse_plan("fixed:3"), Options(engine=name)).starts == starts


@pytest.mark.parametrize("name", ENGINES)
def test_an_arrival_exactly_at_a_completion_finds_the_worker_idle(name: str) -> None:
    trace = single_pool(np.array([0.0, 15.0]), np.array([10.0, 10.0]))
    outcome = simulate(trace, Constant(5.0), parse_plan("zero"), Options(engine=name))
    assert (outcome.starts, outcome.idle_s) == (1, 0.0)


@pytest.mark.parametrize("name", ENGINES)
def test_more_workers_may_wait_longer_when_workers_expire(name: str) -> None:
    """Why "more workers never wait longer" is no law here: the smallest counterexample."""
    trace = single_pool(np.array([0.0, 5.0, 20.5]), np.array([6.0, 4.0, 10.0]))
    waits = [
        simulate(
            trace, Constant(3.0), parse_plan("fixed:8"), Options(engine=name, max_workers=cap)
        ).waits.tolist()
        for cap in (1, 2)
    ]
    assert waits == [[3.0, 4.0, 0.0], [3.0, 3.0, 3.0]]


@pytest.mark.parametrize("binding", ["bound", "shared"])
@pytest.mark.parametrize("dispatch", ["newest-idle", "oldest-idle"])
def test_compiled_engine_equals_the_plain_one_to_the_bit(binding: str, dispatch: str) -> None:
    for seed, load in ((0, 0.3), (1, 3.0), (2, 60.0)):
        rng = np.random.default_rng(seed)
        trace = poisson(load / 20, 20_000, rng.gamma(2.0, 10.0, 20_000), seed)
        cap = int(load * 2) + 1 if binding == "shared" else None
        options = Options(binding=binding, dispatch=dispatch, max_workers=cap, seed=seed)
        law, plan = parse_law("lognormal:p50=7,p90=20"), parse_plan("multiple:2")
        plain, fast = (
            simulate(trace, law, plan, replace(options, engine=name)) for name in ("python", "numba")
        )
        assert np.array_equal(plain.waits, fast.waits)
        assert (plain.idle_s, plain.starting_s, plain.starts) == (fast.idle_s, fast.starting_s, fast.starts)
        assert (plain.useless, plain.peak_workers) == (fast.useless, fast.peak_workers)


def test_general_fleet_equals_the_plain_loops() -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 50))
        arrivals = np.sort(rng.integers(0, 200, count) / rng.choice([1, 2, 7])).astype(float)
        durations = rng.integers(0, 30, count).astype(float)
        trace = single_pool(arrivals - arrivals[0], durations)
        trace = replace(trace, pools=rng.integers(0, 2, count).astype(np.int32), pool_names=("a", "b"))
        law = Constant(float(rng.choice([0, 1, 3.5, 20])))
        plan = parse_plan(f"fixed:{rng.choice(['0', '1', '17.25', 'inf'])}")
        binding = "shared" if seed % 2 else "bound"
        cap = None if binding == "bound" else [None, 1, 2, 3][seed % 4]
        dispatch = ("newest-idle", "oldest-idle")[seed // 4 % 2]
        options = Options(binding=binding, dispatch=dispatch, max_workers=cap)
        plain, fleet = (
            simulate(trace, law, plan, replace(options, engine=name)) for name in ("python", "fleet")
        )
        assert np.allclose(plain.waits, fleet.waits, rtol=0, atol=1e-9), seed
        assert np.array_equal(plain.cold, fleet.cold), seed
        assert (plain.starts, plain.useless, plain.peak_workers) == (
            fleet.starts,
            fleet.useless,
            fleet.peak_workers,
        ), seed
        assert plain.idle_s == pytest.approx(fleet.idle_s, abs=1e-7), seed


def test_result_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = poisson(0.1, 3000, np.random.default_rng(0).gamma(2.0, 10.0, 3000), 0)
    law, plan = parse_law("lognormal:p50=7,p90=20"), parse_plan("multiple:2")
    whole = simulate(trace, law, plan)
    monkeypatch.setattr(engine, "CHUNK", 7)
    cut = simulate(trace, law, plan)
    assert np.array_equal(whole.waits, cut.waits)
    assert whole.idle_s == cut.idle_s


def test_no_retention_all_cold_and_workers_are_poisson() -> None:
    """M/G/∞: allocated workers in steady state are Poisson with mean λ(S + ḡ)."""
    rate, startup = 0.2, 7.0
    rng = np.random.default_rng(3)
    durations = rng.gamma(4.0, 5.0, 200_000)
    trace = poisson(rate, 200_000, durations, 4)
    outcome = simulate(trace, Constant(startup), parse_plan("zero"))
    assert outcome.cold.all()
    assert outcome.generating_s / outcome.allocated_s == pytest.approx(
        durations.mean() / (durations.mean() + startup), rel=1e-12
    )
    assert outcome.intervals is not None
    moments = np.arange(1000.0, trace.arrivals[-1] - 1000, 97.0)
    begins, ends = np.sort(trace.arrivals), np.sort(trace.arrivals + startup + durations)
    alive = np.searchsorted(begins, moments, side="right") - np.searchsorted(ends, moments, side="right")
    # 10,000 samples of a mean-5.4 Poisson, weakly correlated: standard error about 0.03.
    assert alive.mean() == pytest.approx(rate * (startup + 20.0), rel=0.03)
    assert alive.var() == pytest.approx(rate * (startup + 20.0), rel=0.06)


@pytest.mark.parametrize("name", ["numba", "python"])
def test_one_worker_with_starts_and_expiry(name: str) -> None:
    """M/G/1 with setup after an idle time longer than R; closed forms of mean wait, starts and idle time."""
    rate, shape, startup, retention = 0.005, 4.0, 70.0, 140.0
    rng = np.random.default_rng(11)
    count = 600_000
    trace = poisson(rate, count, rng.gamma(shape, 50.0 / shape, count), 12)
    options = Options(max_workers=1, engine=name)
    found = simulate(trace, Constant(startup), parse_plan(f"fixed:{retention}"), options, record=False)
    load, p = rate * 50.0, math.exp(-rate * retention)
    second = 50.0**2 * (1 + 1 / shape)
    wait = rate * second / (2 * (1 - load)) + (2 * p * startup + rate * p * startup**2) / (
        2 * (1 + rate * p * startup)
    )
    starts = p * (1 - load) / (1 + rate * p * startup)
    idle = (1 - load) / (1 + rate * p * startup) * (1 - p) / rate
    assert (round(wait, 3), round(starts, 5)) == (45.213, 0.31729)
    # Standard errors at this length: waits 0.3 %, starts 0.2 %; bounds at about four of them.
    assert found.waits.mean() == pytest.approx(wait, rel=0.015)
    assert found.starts / count == pytest.approx(starts, rel=0.01)
    assert found.idle_s / count == pytest.approx(idle, rel=0.01)


@pytest.mark.parametrize(
    ("load", "retention", "cold", "idle"),
    [(0.5, 60.0, 0.61488, 46.806), (2.0, 60.0, 0.31216, 31.197), (8.0, 140.0, 0.07673, 26.141)],
)
def test_zero_startup_birth_death(load: float, retention: float, cold: float, idle: float) -> None:
    """S = 0, exponential service: cold = Σ π_n P(T_n > R), T_n the first passage from n to n + 1."""
    mu, lam = 1 / 50.0, load / 50.0
    highest = int(load + 12 * math.sqrt(load) + 12)
    probability = np.array([math.exp(-load) * load**n / math.factorial(n) for n in range(highest)])
    late, kept = np.zeros(highest), np.zeros(highest)
    for n in range(highest):
        generator = np.zeros((n + 1, n + 1))
        for state in range(n + 1):
            generator[state, state] = -(lam + state * mu)
            if state < n:
                generator[state, state + 1] = lam
            if state > 0:
                generator[state, state - 1] = state * mu
        step = expm(generator * retention)
        late[n] = step[n].sum()
        kept[n] = (np.linalg.solve(-generator, np.eye(n + 1) - step))[n].sum()
    assert probability @ late == pytest.approx(cold, abs=5e-6)
    rng = np.random.default_rng(int(load * 10))
    count = 400_000
    trace = poisson(lam, count, rng.exponential(50.0, count), int(load * 10) + 1)
    found = simulate(
        trace, Constant(0.0), parse_plan(f"fixed:{retention}"), Options(engine="numba"), record=False
    )
    # Standard error of a correlated fraction over 400,000 requests: at most 0.4 %.
    assert found.starts / count == pytest.approx(cold, rel=0.015)
    assert found.idle_s / count == pytest.approx(idle, rel=0.015)
    assert probability @ kept == pytest.approx(idle, rel=1e-3)


def test_fixed_fleet_is_erlang_c() -> None:
    load, workers, count = 6.0, 8, 2_000_000
    rng = np.random.default_rng(21)
    trace = poisson(load / 50.0, count, rng.exponential(50.0, count), 22)
    options = Options(max_workers=workers, engine="numba")
    waits = simulate(trace, Constant(0.0), parse_plan("fixed:inf"), options, record=False).waits[5000:]
    chance = erlang_c(load, workers)
    # Waits in a queue at 75 % load are strongly correlated: standard error about 1 % at this length.
    assert (waits > 0).mean() == pytest.approx(chance, rel=0.03)
    assert waits.mean() == pytest.approx(chance * 50.0 / (workers - load), rel=0.05)


def test_endless_retention_starts_the_peak_concurrency() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        trace = poisson(0.1, 300, rng.gamma(2.0, 15.0, 300), seed)
        outcome = simulate(trace, Constant(9.0), parse_plan("fixed:inf"))
        begin = trace.arrivals
        assert outcome.starts == most_at_once(np.array([begin, begin + outcome.waits + trace.durations]))


@settings(deadline=None, max_examples=60)
@given(operations=st.lists(st.one_of(st.none(), st.integers(0, 20)), max_size=200))
def test_wide_heap_pops_in_order(operations: list[int | None]) -> None:
    heap: list[float] = []
    model: list[float] = []
    for value in operations:
        if value is not None:
            engine.push_wide(heap, float(value))
            model.append(float(value))
        elif model:
            model.sort()
            assert engine.pop_wide(heap) == model.pop(0)
    assert sorted(heap) == sorted(model)
