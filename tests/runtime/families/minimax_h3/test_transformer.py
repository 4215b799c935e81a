"""The DiT against diffusers: one evaluation, tables in place of projections.

Equality is asked for throughout: operations and rounding points are the same, and the oracle multiplies the same fused
matrices. One test compares with the untouched oracle.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loader.errors import ArtifactError, InternalError
from runtime.families.minimax_h3.model import adaln
from runtime.families.minimax_h3.model.block import BlockWeights
from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.families.minimax_h3.model.rotary import packed_rotary_table
from runtime.families.minimax_h3.model.transformer import Transformer, Velocity, block_forward
from runtime.families.minimax_h3.packing import KIND_KEYFRAME, PackedSequence, pack
from runtime.ops.attention import attention
from tests.fakes.h3_weights import (
    build_transformer,
    modulation_groups,
    on_meta,
    random_config,
    transformer_groups,
)
from tests.fakes.weights import DictWeights

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "mixed_bf16"])
T2VA_STEPS = ([0.0, 0.0769, 0.5], [0.0, 0.25, 0.8])


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


class Case:
    """One random model with a packed request; `ours` and `oracle` run the same evaluation."""

    def __init__(
        self, seed, dtype, *, frames=2, anchors=(), audio=3, steps=T2VA_STEPS, canvas=(4, 6), fused=True
    ):
        self.config = random_config(seed)
        c = self.config.transformer
        self.dtype = dtype
        self.model, self.state = build_transformer(c, seed, dtype, fused=fused)
        self.plans = adaln.plan_timesteps(*steps, has_condition=bool(anchors))
        self.weights = DictWeights(
            transformer_groups(self.state) | modulation_groups(self.state, c, "x.y", self.plans)
        )
        tags = [1, 1, 0, 0, 0, 1, 1] if anchors else [1] * 5
        self.sequence = pack(self.config, tags, (frames, *canvas), audio, anchors)
        self.prompt_embeds = torch.randn(len(tags), c.text_dim).to(dtype)
        rows = self.sequence.num_condition + self.sequence.num_video
        self.video, self.audio = (
            torch.randn(rows, c.video_row_dim),
            torch.randn(2 * audio, c.audio_in_channels),
        )

    def transformer(self, **kwargs) -> Transformer:
        index = tuple(range(len(self.plans))) if self.sequence.num_condition else None
        tables = adaln.ModulationTables(self.weights, "x.y", index)
        return Transformer(self.config, self.weights, tables, **kwargs)

    def ours(self, evaluation: int) -> Velocity:
        transformer = self.transformer()
        transformer.begin(refine_text(self.config, self.weights, self.prompt_embeds), self.sequence)
        return transformer.forward(self.video, self.audio, evaluation)

    def oracle(self, evaluation: int) -> Velocity:
        s, plan = self.sequence, self.plans[evaluation]
        rows = torch.arange(s.num_rows)
        timestep_index = torch.full((s.num_rows,), plan.video)
        timestep_index[s.audio] = plan.audio
        if plan.condition is not None:
            timestep_index[s.condition] = plan.condition
        out = self.model(
            hidden_states=self.video[None],
            audio_hidden_states=self.audio[None],
            encoder_hidden_states=self.prompt_embeds[None],
            timestep=torch.tensor(plan.timesteps),
            timestep_indices=timestep_index,
            token_tags=torch.from_numpy(s.token_tags),
            position_ids=torch.from_numpy(s.position_ids),
            video_indices=torch.cat((rows[s.condition], rows[s.video])),
            audio_indices=rows[s.audio],
            text_indices=rows[s.text],
        )
        return Velocity(out.sample[0, s.num_condition :], out.audio_sample[0])


def assert_equal(found: Velocity, expected: Velocity) -> None:
    assert found.video.dtype == found.audio.dtype == torch.float32
    assert found.video.abs().max() > 0.05  # a zero output would compare equal to anything broken alike
    assert torch.equal(found.video, expected.video)
    assert torch.equal(found.audio, expected.audio)


@pytest.mark.oracle
@DTYPES
@pytest.mark.parametrize("seed", range(6))
def test_t2va_velocity_equals_diffusers(seed, dtype):
    case = Case(seed, dtype)

    for evaluation in range(3):
        assert_equal(case.ours(evaluation), case.oracle(evaluation))


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(3))
def test_velocity_stays_close_to_separate_projections(seed):
    case = Case(seed, torch.float32, anchors=("first",), fused=False)

    found, expected = case.ours(1), case.oracle(1)

    # Other shapes of a product may sum in another order: fp32 noise through at most three blocks.
    torch.testing.assert_close(found.video, expected.video, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.audio, expected.audio, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
@DTYPES
@pytest.mark.parametrize("anchors", [("first",), ("last",), ("first", "last")], ids="+".join)
@pytest.mark.parametrize("seed", range(3))
def test_fl2va_velocity_equals_diffusers(seed, dtype, anchors):
    case = Case(seed, dtype, anchors=anchors, steps=([0.0, 0.5, 0.9995], [0.0, 0.8, 0.9999]))

    for evaluation in range(3):
        assert_equal(case.ours(evaluation), case.oracle(evaluation))


@pytest.mark.oracle
@DTYPES
@pytest.mark.parametrize(("frames", "audio"), [(2, 8), (7, 37), (12, 20), (17, 30), (22, 123), (37, 207)])
def test_velocity_equals_diffusers_at_every_latent_length(frames, audio, dtype):
    case = Case(11, dtype, frames=frames, audio=audio, canvas=(2, 4))

    assert_equal(case.ours(1), case.oracle(1))


@pytest.mark.oracle
@DTYPES
@pytest.mark.parametrize("seed", range(4))
def test_block_equals_diffusers(seed, dtype):
    case = Case(seed, dtype, anchors=("first",))
    c, s, plan = case.config.transformer, case.sequence, case.plans[1]
    block = case.model.transformer_blocks[0]
    x = torch.randn(s.num_rows, c.hidden_size).to(dtype)
    positions = torch.from_numpy(s.position_ids)
    index = torch.from_numpy(s.modulation_index)
    timestep = torch.tensor([plan.video, plan.video, plan.audio, plan.condition])[index.long()]
    temb = adaln.timestep_embedding(torch.tensor(plan.timesteps), case.state, c)
    adaln_index = timestep * 3 + torch.from_numpy(s.token_tags)
    expected = block(x[None], temb, adaln_index, case.model.rope(positions))[0]

    w = BlockWeights.view(case.weights.groups["transformer/blocks.0"], "transformer_blocks.0.")
    modulation = case.transformer().tables.step(1).blocks[0]
    found = block_forward(x, w, modulation, index, packed_rotary_table(positions, c, dtype), attention, c)

    assert torch.equal(found, expected)


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(4))
def test_rotary_table_equals_diffusers(seed):
    case = Case(seed, torch.float32, frames=17)
    positions = torch.from_numpy(case.sequence.position_ids)

    table = packed_rotary_table(positions, case.config.transformer, torch.float32)

    cos, sin = case.model.rope(positions)
    assert torch.equal(torch.cat((table.cos, table.cos), dim=-1), cos)
    assert torch.equal(torch.cat((table.sin, table.sin), dim=-1), sin)


def test_canonical_tables_stay_close_to_the_live_projection():
    case = Case(3, torch.float32)
    groups = modulation_groups(case.state, case.config.transformer, "x.y", case.plans, "canonical")
    case.weights = DictWeights(dict(case.weights.groups) | groups)

    found, expected = case.ours(1), case.oracle(1)

    # Only the last bit of table entries differs; fp32 through at most three blocks.
    torch.testing.assert_close(found.video, expected.video, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.audio, expected.audio, rtol=1e-5, atol=1e-5)


def test_groups_are_asked_for_in_the_order_of_use():
    case = Case(1, torch.float32, anchors=("first",))
    transformer = case.transformer()
    transformer.begin(refine_text(case.config, case.weights, case.prompt_embeds), case.sequence)
    case.weights.asked.clear()

    transformer.forward(case.video, case.audio, 2)

    blocks = [f"transformer/blocks.{i}" for i in range(case.config.transformer.num_layers)]
    tables = ["adaln/x.y/condition", "adaln/x.y/step.002"]
    assert case.weights.asked == ["transformer/prelude", *tables, *blocks, "transformer/heads"]


def test_evaluations_do_not_change_each_other():
    case = Case(2, torch.bfloat16)
    transformer = case.transformer()
    transformer.begin(refine_text(case.config, case.weights, case.prompt_embeds), case.sequence)
    video, audio = case.video.clone(), case.audio.clone()

    first = transformer.forward(case.video, case.audio, 1)
    transformer.forward(case.video, case.audio, 2)
    again = transformer.forward(case.video, case.audio, 1)

    assert_equal(again, first)
    assert torch.equal(case.video, video)
    assert torch.equal(case.audio, audio)


def test_attention_and_block_hooks_see_every_block():
    case = Case(2, torch.float32)
    shapes, indexes = [], []

    def watched_attention(q, k, v, *, causal=False, scale=None):
        shapes.append((q.shape, k.shape, causal))
        return attention(q, k, v, causal=causal, scale=scale)

    def watched_block(x, w, modulation, index, rope, attention, config):
        indexes.append(index)
        return block_forward(x, w, modulation, index, rope, attention, config)

    transformer = case.transformer(attention=watched_attention, block=watched_block)
    transformer.begin(refine_text(case.config, case.weights, case.prompt_embeds), case.sequence)
    found = transformer.forward(case.video, case.audio, 1)

    c = case.config.transformer
    shape = (case.sequence.num_rows, c.num_attention_heads, c.attention_head_dim)
    assert shapes == [(shape, shape, False)] * c.num_layers
    assert len(indexes) == c.num_layers
    assert_equal(found, case.ours(1))


def test_keyframe_rows_take_their_own_modulation():
    case = Case(4, torch.float32, anchors=("first",))
    expected = case.ours(1)
    case.weights.groups["adaln/x.y/condition"]["condition.blocks"][:, 1] += 1

    changed = case.ours(1)

    assert not torch.equal(changed.video, expected.video)
    assert (case.sequence.modulation_index[case.sequence.condition] == KIND_KEYFRAME).all()


def test_everything_runs_on_the_device_of_the_weights():
    case = Case(1, torch.bfloat16, anchors=("first",))
    case.weights = on_meta(case.weights)
    case.prompt_embeds = case.prompt_embeds.to("meta")
    case.video, case.audio = case.video.to("meta"), case.audio.to("meta")

    velocity = case.ours(1)

    # The meta device refuses most operands of another device, as CUDA does.
    assert velocity.video.device == velocity.audio.device == torch.device("meta")
    assert velocity.video.shape == (case.sequence.num_video, case.config.transformer.video_row_dim)


def test_forward_before_begin_is_refused():
    case = Case(0, torch.float32)
    with pytest.raises(InternalError, match="no request has begun"):
        case.transformer().forward(case.video, case.audio, 0)


def test_rows_that_disagree_with_the_sequence_are_refused_with_both_counts():
    case = Case(0, torch.float32)
    transformer = case.transformer()
    text = refine_text(case.config, case.weights, case.prompt_embeds)
    with pytest.raises(InternalError, match=r"text.*found 4; allowed: 5"):
        transformer.begin(text[:4], case.sequence)
    transformer.begin(text, case.sequence)
    with pytest.raises(InternalError, match=r"video_rows.*found 11; allowed: 12"):
        transformer.forward(case.video[1:], case.audio, 0)
    with pytest.raises(InternalError, match=r"audio_rows.*found 5; allowed: 6"):
        transformer.forward(case.video, case.audio[1:], 0)


def test_positions_that_disagree_with_the_rows_are_refused():
    case = Case(0, torch.float32)
    text = refine_text(case.config, case.weights, case.prompt_embeds)
    short: PackedSequence = dataclasses.replace(case.sequence, position_ids=np.zeros((3, 3)))
    with pytest.raises(InternalError, match=r"position_ids.*found 3; allowed: 23"):
        case.transformer().begin(text, short)


def test_keyframe_rows_with_a_table_without_them_are_refused():
    case = Case(0, torch.float32, anchors=("first",))
    tables = adaln.ModulationTables(case.weights, "x.y", None)
    transformer = Transformer(case.config, case.weights, tables)
    transformer.begin(refine_text(case.config, case.weights, case.prompt_embeds), case.sequence)
    with pytest.raises(InternalError, match="no keyframe rows"):
        transformer.forward(case.video, case.audio, 0)


def test_a_group_without_its_tensors_names_all_that_are_missing():
    case = Case(0, torch.float32)
    group = case.weights.groups["transformer/blocks.0"]
    del group["transformer_blocks.0.attn.to_qkv.weight"], group["transformer_blocks.0.norm2.weight"]
    with pytest.raises(ArtifactError, match=r"0\.attn\.to_qkv\.weight.*0\.norm2\.weight"):
        case.ours(0)
