"""Starts on several ranks as the bench sees them: what is kept of a run, and what is left of one that fails."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from scripts.bench import parallel_start
from scripts.bench.parallel_start import TRIES, StartFailed, _last_object, _wait, summary
from scripts.bench.start_settings import parse_try
from tests.fakes.service import is_running


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def test_ranks_that_end_well_are_waited_for() -> None:
    assert _wait([python("import time; time.sleep(0.2)"), python("pass")])


def test_one_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_start, "LEAVE_S", 0.1)
    processes = [python("import time; time.sleep(600)"), python("raise SystemExit(3)")]
    assert not _wait(processes)
    assert processes[1].returncode == 3
    assert not is_running(processes[0].pid)


def test_time_that_runs_out_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_start, "START_S", 0.1)
    processes = [python("import time; time.sleep(600)") for _ in range(2)]
    assert not _wait(processes)
    assert not any(is_running(process.pid) for process in processes)


def test_the_report_is_the_last_object_whatever_libraries_print() -> None:
    assert _last_object('NCCL version 2.28\n{"a": 1}\n{"a": 2}\nNCCL INFO bye\n') == {"a": 2}
    with pytest.raises(StartFailed, match="no report: nothing"):
        _last_object("nothing")


def test_medians_are_of_marks_that_every_run_has() -> None:
    runs: list[dict[str, Any]] = [
        {"headline": {"first_dit_entry": 1.0, "first_step_done": 3.0}},
        {"headline": {"first_dit_entry": 2.0}},
        {"headline": {"first_dit_entry": 4.0, "first_step_done": 5.0}},
    ]
    assert summary(runs) == {"medians": {"first_dit_entry": 2.0}, "runs": runs}
    assert summary([]) == {"medians": {}, "runs": []}


def test_tries_are_names_and_known_variables() -> None:
    from runtime.settings import settings_from_environment

    for text in TRIES:
        _, variables = parse_try(text)
        assert variables
        settings_from_environment(variables)
