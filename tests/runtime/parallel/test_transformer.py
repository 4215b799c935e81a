"""The DiT over ranks against the DiT on one rank.

Tolerance 2e-5 of the largest velocity, in float32: matrix products of other shapes sum in another order (about 1e-6
here), nothing else differs. With one rank and the same fused products there is no difference at all.
Memory that is not written holds NaN during these tests, so a padding row that entered any statistic would show.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runtime.families.minimax_h3.model.adaln import ModulationTables
from runtime.families.minimax_h3.model.ranks_transformer import RanksTransformer, refine_text_on_ranks
from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.families.minimax_h3.model.transformer import Transformer, Velocity
from runtime.families.minimax_h3.packing import pack
from tests.fakes.weights import DictWeights
from tests.runtime.parallel.thread_ranks import on_threads
from tests.runtime.parallel.tiny import random_groups, rank_weights, tiny_config

ROUNDING = 2e-5


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    with torch.inference_mode():
        yield
    torch.use_deterministic_algorithms(False)


class Case:
    """One model and one request, S rows: `extra_text` text rows more than a multiple of anything."""

    def __init__(self, heads: int, num_text: int, anchors: tuple[str, ...] = (), seed: int = 0) -> None:
        self.config = tiny_config(heads)
        self.groups = random_groups(self.config, seed)
        self.task = "fl2va" if anchors else "t2va"
        c = self.config.transformer
        self.sequence = pack(self.config, [1] * num_text, (2, 4, 6), 3, anchors)  # type: ignore[arg-type]
        self.embeds = torch.randn(num_text, c.text_dim)
        self.video = torch.randn(self.sequence.num_condition + self.sequence.num_video, c.video_row_dim)
        self.audio = torch.randn(self.sequence.num_audio, c.audio_in_channels)

    def tables(self, weights: DictWeights) -> ModulationTables:
        return ModulationTables(weights, f"x.{self.task}", (0, 0) if self.task == "fl2va" else None)

    def alone(self) -> Velocity:
        weights = DictWeights(self.groups)
        transformer = Transformer(self.config, weights, self.tables(weights))
        transformer.begin(refine_text(self.config, weights, self.embeds), self.sequence)
        return transformer.forward(self.video, self.audio, 1)

    def on_ranks(self, size: int, is_sharded: bool, chunk_rows: int = 6144) -> list[Velocity]:
        def run(ranks, control):
            weights = (
                rank_weights(self.config, self.groups, ranks.rank, size)
                if is_sharded
                else DictWeights(self.groups)
            )
            transformer = RanksTransformer(
                self.config, weights, self.tables(weights), ranks, control, is_sharded, chunk_rows=chunk_rows
            )
            with control.request():
                with control.section("refiner"):
                    text = refine_text_on_ranks(self.config, weights, self.embeds, ranks)
                transformer.begin(text, self.sequence)
                return transformer.forward(self.video, self.audio, 1)

        return on_threads(size, run)


def assert_same(found: list[Velocity], expected: Velocity, rounding: float = ROUNDING) -> None:
    for velocity in found:
        for name in ("video", "audio"):
            a, b = getattr(velocity, name), getattr(expected, name)
            torch.testing.assert_close(a, b, rtol=0, atol=rounding * float(b.abs().max()))
            assert torch.equal(a, getattr(found[0], name)), "ranks disagree"


@pytest.mark.parametrize("scheme", ["gathered", "exchanged"])
@pytest.mark.parametrize(("size", "remainder"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_lengths_that_do_and_do_not_divide(size: int, remainder: int, scheme: str) -> None:
    # C62: S mod ranks = 0, 1, ranks - 1
    rest = Case(8, 1).sequence.num_rows - 1
    num_text = 4 + (remainder - rest - 4) % size
    case = Case(8, num_text, seed=size)
    assert case.sequence.num_rows % size == remainder
    assert_same(case.on_ranks(size, scheme == "gathered"), case.alone())


@pytest.mark.parametrize("chunk_rows", [1, 3, 5, 64])
@pytest.mark.parametrize("size", [2, 4])
def test_chunk_sizes(size: int, chunk_rows: int) -> None:
    case = Case(8, 6, seed=chunk_rows)
    assert_same(case.on_ranks(size, True, chunk_rows), case.alone())


@pytest.mark.parametrize("scheme", ["gathered", "exchanged"])
def test_keyframes(scheme: str) -> None:
    case = Case(8, 7, ("first", "last"))
    assert_same(case.on_ranks(4, scheme == "gathered", 2), case.alone())


@pytest.mark.parametrize(("heads", "size"), [(14, 7), (14, 14), (8, 8)])
def test_many_ranks_exchange_projected_heads(heads: int, size: int) -> None:
    case = Case(heads, 5)
    assert_same(case.on_ranks(size, False), case.alone())


def test_seven_ranks_gather_hidden_rows() -> None:
    case = Case(14, 5)
    assert_same(case.on_ranks(7, True, 4), case.alone())


def test_fewer_text_rows_than_ranks() -> None:
    case = Case(8, 2)
    assert_same(case.on_ranks(8, False), case.alone())


def test_one_rank_is_the_plain_transformer_bit_for_bit() -> None:
    case = Case(8, 5)
    (velocity,) = case.on_ranks(1, True)
    expected = case.alone()
    weights = DictWeights(case.groups)
    # The refiner multiplies q, k and v one by one; give both the same text to ask for equality of the DiT.
    text = refine_text(case.config, weights, case.embeds)

    def run(ranks, control):
        transformer = RanksTransformer(case.config, weights, case.tables(weights), ranks, control, True)
        transformer.begin(text, case.sequence)
        return transformer.forward(case.video, case.audio, 1)

    (same_text,) = on_threads(1, run)
    assert torch.equal(same_text.video, expected.video)
    assert torch.equal(same_text.audio, expected.audio)
    assert_same([velocity], expected)
