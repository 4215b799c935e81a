"""A rank that fails ends all ranks, soon and with the same clear error. Processes over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.errors import InternalError
from tests.runtime.parallel.team import Team

KINDS = ("exception", "kill", "hang")


@pytest.fixture(scope="module")
def teams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Team]]:
    """Two ranks for every kind of failure, started together because starting is what takes the time."""
    folder = tmp_path_factory.mktemp("failures")
    limits = {"exception": 60.0, "kill": 60.0, "hang": 8.0}
    teams = {kind: Team(2, folder, limit_s=limits[kind], beat_s=0.1, grace_s=1.0) for kind in KINDS}
    try:
        for team in teams.values():
            team.wait_ready()
        yield teams
    finally:
        for team in teams.values():
            for process in team.processes:
                process.kill()
            team.close()


def test_an_exception_is_reported_on_all_ranks(teams: dict[str, Team]) -> None:
    team = teams["exception"]
    team.send("fail", rank=1, how="exception")
    for answer in team.answers():
        assert "rank 1 of 2 failed: test: out of paint" in str(answer)


def test_a_killed_rank_is_named_by_the_others(teams: dict[str, Team]) -> None:
    team = teams["kill"]
    team.send("fail", rank=1, how="kill")
    survivor, killed = team.answers()
    assert killed["ended"] == -signal.SIGKILL
    assert "rank 1 of 2 failed: stopped answering" in str(survivor)


def test_idle_ranks_may_wait_longer_than_a_hang(teams: dict[str, Team]) -> None:
    team = teams["hang"]
    assert team.call("idle", seconds=8.5) == [{"op": "wake"}] * 2


def test_a_hanging_rank_is_named_after_the_limit(teams: dict[str, Team]) -> None:
    team = teams["hang"]
    team.send("fail", rank=1, how="hang")
    survivor = team.answer(0)
    os.kill(team.processes[1].pid, signal.SIGCONT)
    woken = team.answer(1)
    assert "rank 1 of 2 failed" in str(survivor)
    assert "rank 1 of 2 failed" in str(woken)


def test_nothing_of_the_runs_is_left(teams: dict[str, Team]) -> None:
    for kind in KINDS:
        for process in teams[kind].processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in teams[kind].processes:
            process.wait(timeout=60)
        port = teams[kind].port
        connections = Path("/proc/net/tcp").read_text().split("\n")[1:-1]
        listening = [line for line in connections if line.split()[3] == "0A"]
        assert not [line for line in listening if line.split()[1].endswith(f":{port:04X}")]


def test_a_rank_that_dies_while_they_come_together_is_noticed(tmp_path: Path) -> None:
    """Between its process group and the one for control, where gloo would wait for a year."""
    dies = [{}, {"TEST_DIES": "before the control group"}]
    team = Team(2, tmp_path, dies, limit_s=8.0, beat_s=0.1, grace_s=0.2)
    try:
        survivor, killed = team.answers()
        assert killed["ended"] == -signal.SIGKILL
        assert survivor["ended"] == InternalError.exit_code
        assert "rank 1 of 2 failed" in survivor["stderr"]
    finally:
        team.close()
