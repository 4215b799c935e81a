"""One trace, one startup, one policy → `Outcome`; picks the plain loops or the general fleet."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError
from scripts.replay.constant_policies import Clairvoyant
from scripts.replay.engine import PoolRun, choose_engine, clairvoyant_pool, run_bound, run_shared
from scripts.replay.fleet import Fleet
from scripts.replay.laws import Constant, Crowded, Law, stream
from scripts.replay.options import Options
from scripts.replay.outcome import Intervals, Outcome, peak_overlap
from scripts.replay.policy import Plan
from scripts.replay.traces import Trace

Floats = NDArray[np.float64]
BASE_MODEL = Options()
RECORD_MAX_ROWS = 2_000_000  # up to here intervals are kept by default: timeline, exact peak, queue length


def simulate(
    trace: Trace, startup: Law, plan: Plan, options: Options = BASE_MODEL, *, record: bool | None = None
) -> Outcome:
    """Replays `trace`.

    Args:
        startup: time from a worker's first instruction until it serves; drawn by request index, so that all policies
            and both engines see the same draws.
        record: keep every interval (None: for traces of up to RECORD_MAX_ROWS rows, and whenever a window needs them).
    Raises: RequestError: an empty trace, or options that contradict the policy.
    """
    if len(trace) == 0:
        raise RequestError(
            "nothing to replay: the trace is empty", found="0 requests", expected="at least one"
        )
    trace = _replica_durations(trace, options)
    if record is None:
        record = len(trace) <= RECORD_MAX_ROWS
    record = record or options.window is not None or options.warmup_s > 0
    if isinstance(plan.policy, Clairvoyant):
        outcome = _plain(trace, startup, plan, options, record=True)
    elif needs_fleet(plan, options, startup.median(), trace):
        outcome = Fleet(trace, startup, plan, options).run()
    else:
        outcome = _plain(trace, startup, plan, options, record=record)
    if options.window is not None or options.warmup_s > 0:
        _clip(outcome, options)
    return outcome


def needs_fleet(plan: Plan, options: Options, startup_s: float, trace: Trace) -> bool:
    """True if the plain loops cannot run this combination."""
    adaptive = plan.policy.retention(startup_s, trace.pool_names[0]) is None
    return adaptive or not plan.is_plain or options.needs_fleet or isinstance(options.scheduling, Crowded)


def _replica_durations(trace: Trace, options: Options) -> Trace:
    """Generation times of a replica of k GPUs: g / (k · e_k)."""
    count = options.gpus_per_worker
    if count == 1 or not options.efficiency:
        return trace
    if count not in options.efficiency:
        raise RequestError(
            "no efficiency for this many GPUs",
            where="efficiency",
            found=count,
            expected=str(dict(options.efficiency)),
        )
    return replace(trace, durations=trace.durations / (count * options.efficiency[count]))


def _plain(trace: Trace, startup: Law, plan: Plan, options: Options, *, record: bool) -> Outcome:
    """Independent pools, constant retention: group once, run each, merge."""
    count = len(trace)
    engine = choose_engine("auto" if options.engine == "fleet" else options.engine, count)
    startups: Floats | float = _drawn(startup, options.seed, "startup", count)
    scheduling: Floats | float = _drawn(options.scheduling, options.seed, "scheduling", count)
    delays: Floats | float = startups if options.scheduling is None else scheduling + startups
    service, waits, cold = np.zeros(count), np.zeros(count), np.zeros(count, dtype=np.uint8)
    started = np.zeros(count, dtype=np.uint8)
    runs: list[PoolRun] = []
    retentions: list[float] = []
    for name, rows in zip(trace.pool_names, _row_sets(trace), strict=True):
        retention = plan.policy.retention(startup.median(), name)
        assert retention is not None
        columns = (
            trace.arrivals[rows],
            trace.durations[rows],
            delays if isinstance(delays, float) else delays[rows],
        )
        run = _run_pool(columns, retention, plan, options, record=record, engine=engine)
        service[rows], waits[rows], cold[rows], started[rows] = run.service, run.waits, run.cold, run.started
        runs.append(run)
        retentions.append(retention)
    billed = delays if options.bill_scheduling else startups
    starting_s = float(
        billed * int(started.sum()) if isinstance(billed, float) else billed[started == 1].sum()
    )
    last = float((service + trace.durations).max()) if math.inf in retentions else 0.0
    ends = _tail_ends(runs, retentions, last)
    idle_s = math.fsum(run.idle_s for run in runs) + math.fsum(
        end - free
        for run, tail in zip(runs, ends, strict=True)
        for free, end in zip(run.left, tail, strict=True)
    )
    outcome = Outcome(
        waits,
        cold,
        np.zeros(count, dtype=np.uint8),
        float(trace.durations.sum()),
        starting_s,
        idle_s,
        sum(run.starts for run in runs),
        useless=sum(run.useless + run.fresh_left for run in runs),
        peak_workers=sum(run.peak for run in runs),
        engine=engine,
    )
    if record:
        unbilled = 0.0 if options.bill_scheduling else scheduling
        outcome.intervals = _intervals(trace, service, started, delays, unbilled, runs, ends)
        outcome.peak_workers = peak_overlap(outcome.intervals)
    elif len(runs) > 1:
        outcome.notes.append("peak workers: sum of the pools' own peaks, an upper bound")
    return outcome


def _drawn(law: Law | None, seed: int, purpose: str, count: int) -> Floats | float:
    """One draw per request; a constant stays one number."""
    if law is None:
        return 0.0
    if isinstance(law, Constant):
        return float(law.value)
    return law.draw(stream(seed, purpose), count)


def _run_pool(
    columns: tuple[Floats, Floats, Floats | float],
    retention: float,
    plan: Plan,
    options: Options,
    *,
    record: bool,
    engine: str,
) -> PoolRun:
    newest = options.dispatch == "newest-idle"
    if isinstance(plan.policy, Clairvoyant):
        if options.is_shared or not newest:
            raise RequestError("foresight needs newest-idle dispatch and bound requests", where=plan.text)
        arrivals, durations, delays = columns
        cold = np.zeros(len(arrivals), dtype=np.uint8)
        delay_column = np.broadcast_to(delays, len(arrivals))
        idle_s, starts, peak, left, begins, ends = clairvoyant_pool(
            arrivals, durations, delay_column, retention, cold
        )
        gaps = np.array([begins, ends])
        waits = np.where(cold, delay_column, 0.0)
        return PoolRun(arrivals + waits, waits, cold, cold, idle_s, starts, 0, peak, left, 0, gaps)
    if options.is_shared:
        return run_shared(
            *columns, retention, newest=newest, record=record, engine=engine, cap=options.max_workers
        )
    return run_bound(*columns, retention, newest=newest, record=record, engine=engine)


def _row_sets(trace: Trace) -> list[Any]:
    """What to index the columns with for each pool; a slice, so without a copy, if there is only one."""
    return [slice(None)] if len(trace.pool_names) == 1 else list(trace.pool_rows())


def _tail_ends(runs: list[PoolRun], retentions: list[float], last: float) -> list[list[float]]:
    """When each worker left at the end is released; endless retention ends with the last completion of all pools."""
    return [
        [max(free, last) if retention == math.inf else free + retention for free in run.left]
        for run, retention in zip(runs, retentions, strict=True)
    ]


def _intervals(
    trace: Trace,
    begin: Floats,
    started: NDArray[np.uint8],
    delays: Floats | float,
    unbilled: Floats | float,
    runs: list[PoolRun],
    ends: list[list[float]],
) -> Intervals:
    """Every stretch of worker life, rebuilt from the per-request columns and the recorded gaps."""
    rows = started == 1
    ready = (trace.arrivals + delays)[rows]
    start = (trace.arrivals + unbilled)[rows]
    idle = [run.gaps for run in runs if run.gaps is not None and run.gaps.size]
    idle += [np.array([run.left, tail]) for run, tail in zip(runs, ends, strict=True) if run.left]
    return Intervals(
        {
            "generating": np.array([begin, begin + trace.durations]),
            "starting": np.array([start, ready]),
            "idle": np.concatenate(idle, axis=1) if idle else np.empty((2, 0)),
            "lost": np.empty((2, 0)),
        }
    )


def _clip(outcome: Outcome, options: Options) -> None:
    """Totals inside the window only; waits of requests outside it are left out by the report."""
    begin, end = options.window or (0.0, math.inf)
    begin = max(begin, options.warmup_s)
    assert outcome.intervals is not None
    clipped = outcome.intervals.clipped(begin, end)
    outcome.intervals = clipped
    outcome.generating_s, outcome.starting_s = clipped.seconds("generating"), clipped.seconds("starting")
    outcome.idle_s, outcome.lost_s = clipped.seconds("idle"), clipped.seconds("lost")
    outcome.peak_workers = peak_overlap(clipped)
