"""Ranks from launchers' variables."""

from __future__ import annotations

import pytest

from loader.errors import RequestError
from runtime.parallel.environment import RankEnvironment, rank_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_without_a_launcher_there_is_one_rank() -> None:
    assert rank_environment({}) == RankEnvironment()
    assert rank_environment({}).host_ranks == range(1)


def test_torchrun_variables() -> None:
    environment = rank_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": "abc"})
    assert environment == RankEnvironment(5, 8, 1, 4, "10.0.0.1", 29400, "abc-29400")
    assert environment.host_ranks == range(4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8 with WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 with LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"WORLD_SIZE": "two"}, "no whole number"),
        ({"MASTER_ADDR": None, "LOCAL_RANK": None}, "LOCAL_RANK, MASTER_ADDR"),
    ],
)
def test_contradictions_are_named(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(RequestError, match=message):
        rank_environment(environ)
