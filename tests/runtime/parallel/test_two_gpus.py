"""Two GPUs of one host: collectives over NCCL however it was connected, and a worker's file whatever way it was started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.parallel.team import Team
from tests.runtime.parallel.test_launch import REQUEST, TwoRanks, prepared_for_two

pytestmark = pytest.mark.gpu2

ONE_EACH = [{"TEST_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)]
BOTH = [{"TEST_DEVICE": "cuda"}] * 2
EARLY = [{**environment, "TEST_NCCL": "early"} for environment in ONE_EACH]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_for_two(tmp_path_factory.mktemp("prepared"))


@pytest.mark.parametrize(
    "environments", [ONE_EACH, BOTH, EARLY], ids=["one visible", "both visible", "early"]
)
def test_collectives_bring_the_right_bytes(environments: Any, tmp_path: Path) -> None:
    team = Team(2, tmp_path, environments, limit_s=60.0)
    try:
        team.wait_ready()
        (_, first), (_, second) = team.call("exchange_everything", device="cuda", seed=7)
    finally:
        team.close()
    assert first == second > 0


def test_a_killed_rank_ends_the_other_though_the_communicator_is_our_own(tmp_path: Path) -> None:
    team = Team(2, tmp_path, EARLY, limit_s=8.0, beat_s=0.1, grace_s=2.0)
    try:
        team.wait_ready()
        team.send("fail", rank=1, how="kill", device="cuda")
        survivor = team.answer(0)
    finally:
        team.close()
    # Both limits run out at once, as it was killed at the beginning of the job.
    assert re.search(
        "rank 1 of 2 failed: (did not answer for 8 s|stopped answering, and no progress for 8 s)",
        str(survivor),
    )


def test_the_file_is_the_same_whoever_connects_and_whoever_reads(bundle: Path, tmp_path: Path) -> None:
    """Two requests each: the second runs on ranks that have waited for it."""
    files: dict[str, bytes] = {}
    for nccl in ("torch", "early"):
        for reader in ("shared", "own"):
            ranks = TwoRanks(bundle, "cuda", COLDFRAME_NCCL=nccl, COLDFRAME_HOST_READER=reader)
            try:
                for name in ("first", "second"):
                    output = tmp_path / f"{nccl} {reader} {name}.mp4"
                    ranks.send(op="generate", job=name, request=REQUEST, output=str(output))
                    ranks.until("done", name)
                    files[output.stem] = output.read_bytes()
                ranks.send(op="shutdown")
                for code, _, errors in ranks.end():
                    assert code == 0, errors
            finally:
                ranks.close()
    assert len(files) == 8
    assert len(set(files.values())) == 1, {name: len(data) for name, data in files.items()}
