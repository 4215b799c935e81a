"""Modulation tables: numbers against diffusers, canonical rounding against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3AdaLayerNormModulation,
    MiniMaxH3AdaLayerNormOut,
)
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import InternalError
from runtime.families.minimax_h3.model import adaln
from runtime.families.minimax_h3.packing import KIND_KEYFRAME
from tests.fakes.h3_weights import random_config
from tests.fakes.weights import DictWeights

TIMESTEPS = (0.0, 1 / 3, 0.0769, 0.25, 0.5, 0.999, 1.0, 0.94117647)


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(4))
def test_timestep_embedding_equals_diffusers(seed):
    config = random_config(seed).transformer
    torch.manual_seed(seed)
    embedder = TimestepEmbedding(config.freq_dim, config.time_embed_hidden_dim, out_dim=config.time_embed_dim)
    features = Timesteps(config.freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
    timesteps = torch.tensor(TIMESTEPS)
    weights = {f"time_embedder.{name}": value for name, value in embedder.state_dict().items()}

    result = adaln.timestep_embedding(timesteps, weights, config)

    assert result.dtype == torch.float32
    assert torch.equal(result, embedder(features(timesteps)).detach())


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_match_tables_hold_the_rows_that_diffusers_looks_up(dtype, width):
    torch.manual_seed(width)
    module = MiniMaxH3AdaLayerNormModulation(time_embed_dim=24, hidden_size=48).to(dtype)
    plan = adaln.TimestepPlan((0.1, 0.4, 0.999)[:width], 0, min(1, width - 1), width - 1)
    temb = torch.randn(width, 24)
    terms = module(temb)  # six of [M * 3, D]

    projected = adaln.project(
        adaln.adaln_input(temb, dtype), module.linear.weight, module.linear.bias, "match"
    )
    rows = [adaln.block_rows(projected, plan), adaln.condition_rows(projected, plan)[None]]

    lookup = [plan.video * 3 + 0, plan.video * 3 + 1, plan.audio * 3 + 2, plan.condition * 3 + 0]
    expected = torch.stack([term[lookup] for term in terms], dim=1)
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_match_final_rows_modulate_like_diffusers(dtype):
    torch.manual_seed(5)
    module = MiniMaxH3AdaLayerNormOut(hidden_size=48, time_embed_dim=24, eps=1e-5).to(dtype)
    plan = adaln.TimestepPlan((0.25, 0.75), 1, 0, None)
    temb, hidden = torch.randn(2, 24), torch.randn(1, 2, 48).to(dtype)
    projected = adaln.project(
        adaln.adaln_input(temb, dtype), module.linear.weight, module.linear.bias, "match"
    )

    final = adaln.final_rows(projected, plan)

    shift, scale = final[:, adaln.FINAL_SHIFT], final[:, adaln.FINAL_SCALE]
    expected = module(hidden, temb, torch.tensor([plan.video, plan.audio]))[0]
    assert torch.equal(module.norm(hidden[0]) * (1 + scale) + shift, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_canonical_is_the_exact_sum_rounded_once(dtype, seed):
    torch.manual_seed(seed)
    a, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 40), (31, 40), (31,)))
    a[:, 0] = 1
    # Feature 0 cancels to nothing; feature 1 lies exactly between two values. Both need the exact sum.
    weight[0, 20:], a[:, 20:], bias[0] = -weight[0, :20], a[:, :20], 0
    weight[1], bias[1] = 0, 1
    weight[1, 0] = torch.finfo(dtype).eps / 2

    result = adaln.project(a, weight, bias, "canonical")

    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(weight.tolist()):
            exact = sum(Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True))
            exact += Fraction(bias[j].item())
            assert result[i, j].item() == _nearest(exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_canonical_does_not_depend_on_the_number_or_order_of_rows_and_features(dtype):
    torch.manual_seed(0)
    a, weight, bias = (torch.randn(shape).to(dtype) for shape in ((7, 96), (300, 96), (300,)))
    order = torch.randperm(96)

    together = adaln.project(a, weight, bias, "canonical")
    alone = torch.cat([adaln.project(row[None], weight, bias, "canonical") for row in a])
    shuffled = adaln.project(a[:, order], weight[:, order], bias, "canonical")

    assert torch.equal(together, alone)
    assert torch.equal(together, shuffled)


def test_canonical_is_within_one_step_of_match():
    torch.manual_seed(1)
    a, weight, bias = (torch.randn(shape).bfloat16() for shape in ((3, 64), (128, 64), (128,)))

    canonical = adaln.project(a, weight, bias, "canonical").float()
    match = adaln.project(a, weight, bias, "match").float()

    # One bf16 step is at most 2^-7 of a value; sums that cancel carry fp32 noise of their terms instead.
    assert ((canonical - match).abs() <= match.abs() * 2**-7 + 1e-4).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**16 - 1), st.integers(-30, 30), st.sampled_from([-1, 0, 1]), st.integers(25, 52))
def test_round_once_beside_the_middle_of_two_bf16_values(mantissa, exponent, side, bit):
    middle = (1 + (2 * (mantissa % 128) + 1) / 256) * 2.0**exponent
    value = middle * (1 + side * 2.0**-bit) if bit < 52 else middle + side * middle * 2.0**-51
    x = torch.tensor([value, -value], dtype=torch.float64)

    result = adaln.round_once(x, torch.bfloat16)

    expected = _nearest(Fraction(value), torch.bfloat16)
    assert result.tolist() == [expected, -expected]


@pytest.mark.oracle
@pytest.mark.parametrize("num_condition", [0, 3])
@pytest.mark.parametrize(("video", "audio"), [(0.0, 0.0), (0.0769, 0.25), (0.9995, 0.9999), (0.8, 0.2)])
def test_plan_equals_the_row_timesteps_of_diffusers(video, audio, num_condition):
    build = next(
        cls.build_row_timesteps
        for cls in vars(before_denoise).values()
        if hasattr(cls, "build_row_timesteps")
    )
    video_rows, audio_rows = torch.arange(10, 10 + num_condition + 4), torch.arange(5, 10)
    timesteps, index = build(
        video_rows, audio_rows, num_condition, 0, 5, video, audio, max(video, 0.999), 1.0
    )

    (plan,) = adaln.plan_timesteps([video], [audio], has_condition=num_condition > 0)

    assert torch.equal(torch.tensor(plan.timesteps), timesteps)
    assert [plan.video, plan.video, plan.audio] == [index[-1], index[0], index[5]]
    assert plan.condition == (index[10].item() if num_condition else None)


def test_plan_merges_values_that_are_equal_in_float32():
    (plan,) = adaln.plan_timesteps([0.1], [0.1 + 1e-12], has_condition=False)

    assert plan == adaln.TimestepPlan((torch.tensor(0.1).item(),), 0, 0, None)


def test_plan_refuses_schedules_of_different_length():
    with pytest.raises(InternalError, match="2 and 1"):
        adaln.plan_timesteps([0.0, 0.5], [0.0], has_condition=False)


def test_tables_ask_only_for_the_group_of_the_evaluation():
    blocks, final = torch.randn(2, 3, 6, 4), torch.randn(2, 2, 4)
    weights = DictWeights(
        {"adaln/base-1.t2va/step.000": {"step.000.blocks": blocks, "step.000.final": final}}
    )

    step = adaln.ModulationTables(weights, "base-1.t2va").step(0)

    assert torch.equal(step.blocks, blocks)
    assert torch.equal(step.final, final)
    assert weights.asked == ["adaln/base-1.t2va/step.000"]


def test_tables_append_the_condition_row_of_the_evaluation():
    blocks, condition = torch.randn(2, 3, 6, 4), torch.randn(2, 2, 6, 4)
    weights = DictWeights(
        {
            "adaln/x.fl2va/condition": {"condition.blocks": condition},
            "adaln/x.fl2va/step.012": {"step.012.blocks": blocks, "step.012.final": torch.randn(2, 2, 4)},
        }
    )

    step = adaln.ModulationTables(weights, "x.fl2va", condition_index=(0,) * 12 + (1,)).step(12)

    assert step.blocks.shape == (2, 4, 6, 4)
    assert torch.equal(step.blocks[:, :3], blocks)
    assert torch.equal(step.blocks[:, KIND_KEYFRAME], condition[:, 1])


def _nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """Nearest value of `dtype`, ties to even, by integer arithmetic (normal range only)."""
    if exact == 0:
        return 0.0
    bits = 8 if dtype == torch.bfloat16 else 24
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (exponent - bits + 1)
    rounded = round(magnitude / unit) * unit  # round() of a Fraction is half to even
    return float(rounded if exact > 0 else -rounded)
