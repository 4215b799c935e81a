"""Many combinations of startup and policy over one trace: in this process, in a pool of processes, or on Ray.

Same code and same numbers everywhere: a combination depends on the trace, its own text and the seed only. The trace
travels once: memory-mapped columns for local processes, the object store for Ray. Finished combinations are appended to
a results file keyed by digest, so that `--resume` skips them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import RequestError
from scripts.replay.laws import parse_law
from scripts.replay.measures import Prices, measure, timeline
from scripts.replay.optional import is_installed, require
from scripts.replay.options import Options
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace


@dataclass(frozen=True)
class Case:
    """One combination."""

    startup: str
    policy: str
    options: Options
    prices: Prices
    record: bool | None = None
    with_timeline: bool = False

    def key(self, trace_digest: str) -> str:
        """SHA-256 over trace, options and version: what `--resume` compares."""
        parts = [trace_digest, self.startup, self.policy, repr(self.options), repr(self.prices), version()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def version() -> str:
    """Version of the installed project, or "checkout"."""
    try:
        return metadata.version("coldframe")
    except metadata.PackageNotFoundError:
        return "checkout"


def cases(
    startups: Sequence[str], policies: Sequence[str], options: Options, prices: Prices, **more: Any
) -> list[Case]:
    """The cross product, startups outermost."""
    return [Case(startup, policy, options, prices, **more) for startup in startups for policy in policies]


def run_case(trace: Trace, case: Case) -> dict[str, Any]:
    """Figures of one combination."""
    startup, plan = parse_law(case.startup, where="--startup"), parse_plan(case.policy)
    outcome = simulate(trace, startup, plan, case.options, record=case.record)
    found: dict[str, Any] = measure(trace, startup, plan, case.options, outcome, case.prices)
    if case.with_timeline and outcome.intervals is not None:
        found["timeline"] = timeline(trace, outcome.intervals)
    return found


def run_sweep(
    trace: Trace,
    todo: Sequence[Case],
    *,
    jobs: int = 1,
    ray: bool = False,
    results: Path | None = None,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """Figures of all combinations in the order given.

    Args:
        jobs: local processes; 1 runs here.
        results: JSON-lines file that each combination is appended to as it finishes.
        resume: take what `results` already holds.
    """
    digest = trace.digest()
    known = _read_results(results) if resume and results else {}
    open_cases = [case for case in todo if case.key(digest) not in known]
    if ray:
        fresh = _on_ray(trace, open_cases)
    elif jobs > 1 and len(open_cases) > 1:
        fresh = _on_processes(trace, open_cases, jobs)
    else:
        fresh = ((case, run_case(trace, case)) for case in open_cases)
    for case, found in fresh:
        key = case.key(digest)
        known[key] = found
        if results:
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "result": found}) + "\n")
    return [known[case.key(digest)] for case in todo]


def _read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Finished combinations; a line cut off by a crash is ignored, as its combination simply runs again."""
    if not path.is_file():
        return {}
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text("utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["key"]] = row["result"]
    return found


def _on_processes(trace: Trace, todo: Sequence[Case], jobs: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Worker processes map the columns from files; results come in the order given."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        store_trace(trace, Path(folder))
        # Spawned, not forked: the parent may have threads of pyarrow or Numba.
        with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=get_context("spawn")) as pool:
            yield from zip(todo, pool.map(partial(_run_stored, folder), todo), strict=True)


def store_trace(trace: Trace, folder: Path) -> None:
    """Columns as .npy files, to be memory-mapped."""
    for name in ("arrivals", "durations", "pools"):
        np.save(folder / f"{name}.npy", getattr(trace, name))
    (folder / "trace.json").write_text(
        json.dumps({"pool_names": trace.pool_names, "label": trace.label}), "utf-8"
    )


def load_trace(folder: Path) -> Trace:
    """The trace of `store_trace`, mapped read-only."""
    about = json.loads((folder / "trace.json").read_text("utf-8"))
    arrivals, durations, pools = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("arrivals", "durations", "pools")
    )
    return Trace(
        np.asarray(arrivals),
        np.asarray(durations),
        np.asarray(pools),
        tuple(about["pool_names"]),
        about["label"],
    )


def _run_stored(folder: str, case: Case) -> dict[str, Any]:
    return run_case(load_trace(Path(folder)), case)


def _on_ray(trace: Trace, todo: Sequence[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """One task per combination, the trace put into the object store once; results as they finish."""
    ray = require("ray", "a sweep on Ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    shared = ray.put(replace(trace, facts={}, sizes={}))
    task = ray.remote(run_case)
    waiting = {task.remote(shared, case): case for case in todo}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        for reference in done:
            yield waiting.pop(reference), ray.get(reference)


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One row per combination; nested figures become columns named `a.b`."""
    arrow = require("pyarrow", "writing Parquet")
    parquet = require("pyarrow.parquet", "writing Parquet")
    parquet.write_table(arrow.Table.from_pylist([flat(row) for row in rows]), path)


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects → dotted keys; lists become text; the timeline is left out."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key == "timeline":
            continue
        if isinstance(value, dict) and key != "options":
            found.update(flat(value, f"{prefix}{key}."))
        elif isinstance(value, (dict, list, tuple)):
            found[prefix + key] = json.dumps(value)
        else:
            found[prefix + key] = value
    return found


def split_at_rest(trace: Trace, longest_startup_s: float, retention_s: float) -> list[Trace]:
    """Cuts one pool's trace where no worker can be alive, for exact parallel replay of a single huge pool.

    Exact for `bound` requests and for uncapped `shared` ones: a worker lives at most until the latest
    arrival + startup + generation + retention before the cut.
    """
    if len(trace.pool_names) != 1:
        raise RequestError(
            "several pools: split by pool instead", found=len(trace.pool_names), expected="one pool"
        )
    alive_until = np.maximum.accumulate(trace.arrivals + longest_startup_s + trace.durations) + retention_s
    cuts = np.flatnonzero(trace.arrivals[1:] > alive_until[:-1]) + 1
    rows = np.split(np.arange(len(trace)), cuts)
    return [trace.take(part) for part in rows]


def arrow_is_available() -> bool:
    """True if Parquet can be written."""
    return is_installed("pyarrow")
