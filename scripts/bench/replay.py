"""Speed and memory of the replay engine: 10 million requests, one policy, one core; and the same work in simpy.

Each measurement is a fresh process, so that its peak memory is its own. The work is one thread without input or output, so
the target is its CPU time: on an unshared core that is the wall-clock time, which is recorded beside it (with the machine's
load) and is larger where other work shares the core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.common import target, write_result
from scripts.replay.laws import Constant
from scripts.replay.options import Options
from scripts.replay.policies import parse_plan
from scripts.replay.reading import read_trace
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace, single_pool

STARTUP, POLICY = 7.2, "multiple:2"


def bench_trace(count: int, busy: float, seed: int = 0) -> Trace:
    """Poisson arrivals with lognormal service (mean 51.5 s, CV 0.4) at a mean of `busy` busy workers."""
    rng = np.random.default_rng(seed)
    sigma = np.sqrt(np.log1p(0.16))
    durations = np.exp(np.log(51.5) - sigma**2 / 2 + sigma * rng.standard_normal(count))
    return single_pool(np.cumsum(rng.exponential(51.5 / busy, count)), durations)


def measure_engine(engine: str, count: int, busy: float) -> dict[str, float]:
    """Seconds to replay, the better of two runs (the first compiles or warms up), and peak memory of the process."""
    trace = bench_trace(count, busy)
    if engine == "numba":
        simulate(
            trace.take(np.arange(1000)),
            Constant(STARTUP),
            parse_plan(POLICY),
            Options(engine=engine),
            record=False,
        )
    best: dict[str, float] = {}
    for _ in range(2):
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = simulate(trace, Constant(STARTUP), parse_plan(POLICY), Options(engine=engine), record=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not best or cpu < best["cpu_s"]:
            best = {
                "wall_s": wall,
                "cpu_s": cpu,
                "requests_per_s": count / cpu,
                "starts": float(outcome.starts),
            }
    return {**best, "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def measure_simpy(count: int, busy: float) -> dict[str, float]:
    """The same replay in the simpy model of the tests."""
    from tests.replay.simpy_twin import Twin

    trace = bench_trace(count, busy)
    twin = Twin(
        trace.arrivals.tolist(), trace.durations.tolist(), [STARTUP] * count, 2 * STARTUP, False, True, None
    )
    wall, cpu = time.perf_counter(), time.process_time()
    twin.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    outcome = simulate(trace, Constant(STARTUP), parse_plan(POLICY), Options(engine="python"), record=False)
    if (twin.starts, round(twin.idle_s, 3)) != (outcome.starts, round(outcome.idle_s, 3)):
        raise RuntimeError(f"simpy gives {twin.starts} starts, the engine {outcome.starts}")
    return {"wall_s": wall, "cpu_s": cpu, "requests_per_s": count / cpu}


def measure_reading(count: int) -> dict[str, float]:
    """Rows per second of the CSV reader."""
    from scripts.replay.cli_files import write_trace

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        write_trace(bench_trace(count, 10.0), path)
        wall, cpu = time.perf_counter(), time.process_time()
        trace = read_trace(str(path))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "rows_per_s": len(trace) / cpu}


def measure_command(count: int) -> dict[str, float]:
    """`replay run` on a CSV of a million rows, import and reading included."""
    from scripts.replay.cli_files import write_trace

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        write_trace(bench_trace(count, 10.0), path)
        command = [sys.executable, "-m", "scripts.replay", "run", str(path), "--startup", "7.2"]
        wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall, "cpu_s": cpu, "rows": float(count)}


def _fresh(*arguments: object) -> dict[str, Any]:
    """Runs one measurement of this file in a process of its own."""
    command = [sys.executable, "-m", "scripts.bench.replay", "--one", *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measures everything and writes `results/replay.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs="+", help="one measurement, printed as JSON")
    parser.add_argument("--requests", type=int, default=10_000_000)
    arguments = parser.parse_args()
    if arguments.one:
        kind, *rest = arguments.one
        if kind == "engine":
            print(json.dumps(measure_engine(rest[0], int(rest[1]), float(rest[2]))))
        elif kind == "simpy":
            print(json.dumps(measure_simpy(int(rest[0]), float(rest[1]))))
        elif kind == "command":
            print(json.dumps(measure_command(int(rest[0]))))
        else:
            print(json.dumps(measure_reading(int(rest[0]))))
        return
    count = arguments.requests
    figures: dict[str, Any] = {"load_average_before": os.getloadavg()}
    for engine in ("numba", "python"):
        for busy in (10, 100, 1000):
            figures[f"{engine}_{busy}_busy"] = _fresh("engine", engine, count, busy)
            print(engine, busy, figures[f"{engine}_{busy}_busy"], file=sys.stderr)
        figures[f"{engine}_growth"] = {
            str(part): _fresh("engine", engine, part, 10) for part in (count // 100, count // 10)
        }
    figures["simpy_10_busy"] = _fresh("simpy", 100_000, 10)
    figures["reading_csv"] = _fresh("reading", count // 10)
    figures["command_1m_rows"] = _fresh("command", 1_000_000)
    fast, plain = figures["numba_10_busy"], figures["python_10_busy"]
    figures["times_simpy"] = {
        name: figures[f"{name}_10_busy"]["requests_per_s"] / figures["simpy_10_busy"]["requests_per_s"]
        for name in ("numba", "python")
    }
    targets = {
        "replay_10m_s": target(fast["cpu_s"], 2.0, "lower", wall_s=fast["wall_s"], engine="numba"),
        "replay_10m_python_s": target(plain["cpu_s"], 10.0, "lower", wall_s=plain["wall_s"], engine="python"),
        "replay_10m_rss_gib": target(max(fast["peak_rss_gib"], plain["peak_rss_gib"]), 2.0, "lower"),
    }
    print(write_result("replay", figures, targets))


if __name__ == "__main__":
    main()
