"""Whole requests on processes over gloo, from tokens to pixels and samples, against one rank.

Latents: 2e-5 of the largest value in float32, after two evaluations of sums taken in another order. Pixels: bytes, so a
value beside a half may differ by one step. Given the same latents, decode is equal bit for bit; sound is compared so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.families.minimax_h3.model.job import H3Job
from tests.fakes.weights import DictWeights
from tests.runtime.parallel.rank_process import run_to_media
from tests.runtime.parallel.team import Team
from tests.runtime.parallel.tiny import (
    decoder_groups,
    embedding_table,
    job_input,
    random_groups,
    tiny_config,
)

RANKS = 4
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    groups = random_groups(config, seed=1) | decoder_groups(config, seed=2)
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save((groups, embedding_table(config, seed=3)), path)
    return path


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team(RANKS, tmp_path_factory.mktemp("team"), limit_s=60.0)
    team.wait_ready()
    yield team
    team.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """As the ranks have: a BLAS cuts products by the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def alone(weights: Path, **request: int) -> dict[str, Any]:
    with one_thread(), torch.inference_mode():
        return run_to_media(H3Job(job_input(**request), DictWeights(*torch.load(weights)), "cpu"))


def sound_of(weights: Path, latents: dict[str, Any], **request: int) -> torch.Tensor:
    """Samples that one rank makes of these latents."""
    with one_thread(), torch.inference_mode():
        job = H3Job(job_input(**request), DictWeights(*torch.load(weights)), "cpu")
        (samples,) = job.decoders()["audio"].units({name: latents[name] for name in ("video", "audio")})
    return torch.from_numpy(samples)


@pytest.mark.parametrize("num_text", [5, 6, 4], ids=["rows%4=3", "rows%4=0", "rows%4=2"])
def test_one_two_and_four_ranks_make_the_same_media(team: Team, weights: Path, num_text: int) -> None:
    expected = alone(weights, num_text=num_text)
    for size, is_sharded in ((1, True), (2, True), (4, True), (4, False)):
        arguments = {"size": size, "is_sharded": is_sharded, "weights": str(weights), "num_text": num_text}
        first, *others = team.call("run_job", **arguments)
        assert {media["noise"] for media in (first, *others[: size - 1])} == {expected["noise"]}  # C58
        for name in ("video", "audio"):
            bound = ROUNDING * float(expected[name].abs().max())
            torch.testing.assert_close(first[name], expected[name], rtol=0, atol=bound)
            assert all(torch.equal(other[name], first[name]) for other in others[: size - 1])
        assert [len(part) for part in first["pixels"]] == [len(part) for part in expected["pixels"]]
        pixels, wanted = (torch.cat(media["pixels"]).int() for media in (first, expected))
        assert wanted.float().std() > 1, "a dead picture would agree with anything"
        assert (pixels - wanted).abs().max() <= 1
        assert (pixels != wanted).float().mean() < 1e-3
        # The random audio decoder's periodic activations enlarge the latents' rounding, so from the ranks' own latents:
        assert torch.equal(first["samples"][0], sound_of(weights, first, num_text=num_text))


@pytest.mark.parametrize("num_units", [1, 5])
def test_decode_equals_local_decode_bit_for_bit(team: Team, weights: Path, num_units: int) -> None:
    arguments = {"weights": str(weights), "num_units": num_units}
    (first, *_) = team.call("run_job", size=RANKS, is_sharded=True, **arguments)
    ((decoded, samples), *_) = team.call("decode", latents_of=str(team.last_result(0)), **arguments)
    assert len(decoded) == num_units
    assert all(torch.equal(a, b) for a, b in zip(first["pixels"], decoded, strict=True))
    assert torch.equal(first["samples"][0], samples)


def test_every_collective_brings_the_right_bytes(team: Team) -> None:
    found = team.call("exchange_everything", device="cpu", seed=5)
    assert len({received for _, received in found}) == 1
