"""Starts leave nothing behind: many in a row, killed at random moments, two at once. `scripts.bench.stress_starts` runs
the same in hundreds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.bench.stress_starts import (
    LeftBehind,
    Start,
    fresh_starts,
    killed_starts,
    simultaneous_starts,
    stream_starts,
)


def test_loads_in_one_process_leave_nothing(bundle: Path) -> None:
    figures = stream_starts(bundle, count=25, warm=3)
    assert figures["starts"] == 25


@pytest.mark.slow
def test_two_hundred_loads_do_not_grow(bundle: Path) -> None:
    figures = stream_starts(bundle, count=200, warm=20)
    assert (
        figures["resident_growth_kib"] < 8 * 1024
    )  # allocator noise; one leaked arena a start would be 400 MiB


def test_fresh_processes_leave_nothing(bundle: Path) -> None:
    assert fresh_starts(bundle, count=2)["starts"] == 2


def test_killed_parents_leave_nothing(bundle: Path) -> None:
    figures = killed_starts(bundle, count=3, seed=20261130, within_s=2.0)
    assert figures["killed"] >= 1


def test_two_workers_at_once_make_the_same_file(bundle: Path) -> None:
    assert simultaneous_starts(bundle, rounds=1)["workers"] == 2


def test_a_child_that_outlives_its_parent_is_found() -> None:
    """The check itself: a grandchild in a session of its own, with its parent gone."""
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    orphan = f"import subprocess, sys; subprocess.Popen({sleeper}, start_new_session=True)"
    start = Start([sys.executable, "-c", orphan], gone_within_s=0.2)
    with pytest.raises(LeftBehind, match=r"time\.sleep"):
        start.finish()
    assert start.descendants() == {}
