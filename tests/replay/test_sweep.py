"""Sweeps: one process, several, Ray's calling convention, resumed, split: same numbers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from loader.errors import CapabilityError
from scripts.replay import sweep
from scripts.replay.laws import parse_law
from scripts.replay.measures import Prices
from scripts.replay.options import Options
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.sweep import cases, run_sweep, split_at_rest, write_parquet
from scripts.replay.traces import Trace
from scripts.replay.workload import synthetic

TRACE = synthetic("ref:hours=6,pools=2", 1)
TODO = cases(["7.2", "lognormal:p50=7,p90=20"], ["multiple:2", "level:1"], Options(seed=3), Prices(0.002))


def test_processes_give_the_same_numbers() -> None:
    assert run_sweep(TRACE, TODO, jobs=2) == run_sweep(TRACE, TODO)


def test_resume_skips_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    first = run_sweep(TRACE, TODO[:3], results=results)
    with results.open("a") as file:
        file.write('{"key": "cut off by a cra')
    ran: list[str] = []
    real = sweep.run_case
    monkeypatch.setattr(sweep, "run_case", lambda trace, case: ran.append(case.policy) or real(trace, case))
    again = run_sweep(TRACE, TODO, results=results, resume=True)
    assert ran == ["level:1"]
    assert again[:3] == first
    assert again == run_sweep(TRACE, TODO)


def test_other_options_are_other_combinations(tmp_path: Path) -> None:
    digest = TRACE.digest()
    keys = {case.key(digest) for case in TODO} | {TODO[0].key("other trace")}
    keys.add(cases(["7.2"], ["multiple:2"], Options(seed=4), Prices(0.002))[0].key(digest))
    assert len(keys) == 6


class FakeRay(types.ModuleType):
    """The calls of Ray that a sweep makes; values pass through JSON-free references as in the object store."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.puts = 0

    def is_initialized(self) -> bool:
        return True

    def put(self, value: object) -> object:
        self.puts += 1
        return ("reference", value)

    def remote(self, function: Any) -> Any:
        def start(shared: tuple[str, Trace], case: object) -> object:
            return ("task", id(case), lambda: function(shared[1], case))

        return types.SimpleNamespace(remote=start)

    def wait(self, references: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return references[-num_returns:], references[:-num_returns]  # the last one finishes first

    def get(self, reference: Any) -> Any:
        return reference[2]()


def test_ray_gives_the_same_numbers_and_ships_the_trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert run_sweep(TRACE, TODO, ray=True) == run_sweep(TRACE, TODO)
    assert ray.puts == 1


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CapabilityError, match=r"coldframe\[ray\]"):
        run_sweep(TRACE, TODO, ray=True)


def test_parquet_has_a_row_per_combination(tmp_path: Path) -> None:
    rows = run_sweep(TRACE, TODO)
    write_parquet(rows, tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    assert table.num_rows == 4
    assert table["wait_s.p95"].to_pylist() == [row["wait_s"]["p95"] for row in rows]


@pytest.mark.parametrize("binding", ["bound", "shared"])
def test_split_at_rest_equals_the_whole(binding: str) -> None:
    trace = synthetic("poisson:rate=0.2,days=3", 1)
    law, plan, options = parse_law("7.2"), parse_plan("multiple:2"), Options(binding=binding)
    parts = split_at_rest(trace, 7.2, 14.4)
    assert len(parts) > 20
    whole = simulate(trace, law, plan, options)
    runs = [simulate(part, law, plan, options) for part in parts]
    assert np.array_equal(np.concatenate([run.waits for run in runs]), whole.waits)
    assert sum(run.starts for run in runs) == whole.starts
    assert sum(run.idle_s for run in runs) == pytest.approx(whole.idle_s, rel=1e-12)


def test_results_are_plain_json() -> None:
    rows = run_sweep(TRACE, TODO[:1])
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
