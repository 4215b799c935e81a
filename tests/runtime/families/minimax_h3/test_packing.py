"""Layout and positions against diffusers' layout step, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    patchify_video_latents,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import InternalError
from runtime.families.minimax_h3 import packing
from runtime.families.minimax_h3.config import TAG_AUDIO, TAG_TEXT, TAG_VIDEO
from tests.runtime.families.minimax_h3.small_config import small_config

ANCHORS = [(), ("first",), ("last",), ("first", "last")]


def reference(text_tags, latent_shape, num_audio, anchors):
    frames, height, width = latent_shape
    return MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.tensor(text_tags, dtype=torch.long), frames, height, width, num_audio, (1, 2, 2), 2,
        TAG_AUDIO, TAG_VIDEO, anchors,
    )  # fmt: skip


def assert_equal_to_reference(text_tags, latent_shape, num_audio, anchors) -> packing.PackedSequence:
    packed = packing.pack(small_config(), text_tags, latent_shape, num_audio, anchors)
    positions, tags, video, audio, text, num_condition, num_condition_audio = reference(
        text_tags, latent_shape, num_audio, anchors
    )
    assert packed.position_ids.dtype == np.float64
    assert packed.position_ids.tobytes() == positions.numpy().tobytes()  # every bit, signs of zero included
    assert packed.token_tags.tolist() == tags.tolist()
    rows = torch.arange(packed.num_rows)
    assert torch.equal(torch.cat([rows[packed.condition], rows[packed.video]]), video)
    assert torch.equal(rows[packed.audio], audio)
    assert torch.equal(rows[packed.text], text)
    assert packed.num_condition == num_condition
    assert num_condition_audio == 0
    return packed


@pytest.mark.oracle
@pytest.mark.parametrize("anchors", ANCHORS, ids=["none", "first", "last", "both"])
@pytest.mark.parametrize("frames", [7, 17, 22, 37, 107])
def test_layout_equals_the_reference(frames: int, anchors: tuple[str, ...]) -> None:
    tags = [TAG_TEXT] * 5 + [TAG_VIDEO] * 6 + [TAG_TEXT] * 36
    assert_equal_to_reference(tags, (frames, 4, 6), 3 * frames, anchors)


@pytest.mark.oracle
@pytest.mark.parametrize("canvas", [(48, 84), (84, 48), (48, 48), (42, 96), (32, 126), (2, 2)])
def test_published_canvases_equal_the_reference(canvas: tuple[int, int]) -> None:
    assert_equal_to_reference([TAG_TEXT] * 47, (37, *canvas), 207, ("first", "last"))


@pytest.mark.oracle
@settings(max_examples=40, deadline=None)
@given(
    tags=st.lists(st.sampled_from([TAG_TEXT, TAG_VIDEO]), min_size=1, max_size=60),
    clips=st.integers(1, 21),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    audio=st.integers(1, 40),
    anchors=st.sampled_from(ANCHORS),
)
def test_any_layout_equals_the_reference(tags, clips, height, width, audio, anchors) -> None:
    packed = assert_equal_to_reference(tags, (5 * clips + 2, 2 * height, 2 * width), audio, anchors)
    kinds = packed.modulation_index
    assert kinds.dtype == np.int32
    assert kinds[packed.text].tolist() == [1 if tag == TAG_TEXT else 0 for tag in tags]
    assert set(kinds[packed.condition].tolist()) <= {3}
    assert set(kinds[packed.audio].tolist()) == {2}
    assert set(kinds[packed.video].tolist()) == {0}
    assert packed.num_rows == len(kinds) == len(packed.token_tags) == len(packed.position_ids)


def test_last_anchor_keeps_the_last_bit_of_the_pairwise_sum() -> None:
    packed = packing.pack(small_config(), [TAG_TEXT] * 47, (37, 2, 2), 1, ("last",))
    assert packed.position_ids[packed.condition][0, 0] == 251.99999999999997
    assert packed.position_ids[packed.video][-1, 0] > 245


def test_audio_rows_are_channel_major_at_the_two_ends_of_the_width() -> None:
    packed = packing.pack(small_config(), [TAG_TEXT] * 3, (7, 4, 4), 5)
    audio = packed.position_ids[packed.audio]
    assert audio[:, 0].tolist() == [3, 4, 5, 6, 7] * 2
    assert audio[:, 1].tolist() == [0.0] * 10
    assert audio[:, 2].tolist() == [0.0] * 5 + [16.0] * 5  # a square canvas of two columns: 0 and 16


@pytest.mark.oracle
@settings(max_examples=20, deadline=None)
@given(
    channels=st.integers(1, 5), frames=st.integers(1, 4), height=st.integers(1, 4), width=st.integers(1, 4),
    patch=st.sampled_from([(1, 2, 2), (1, 1, 1), (2, 1, 3)]),
)  # fmt: skip
def test_patchify_equals_the_reference_and_is_inverted(channels, frames, height, width, patch) -> None:
    shape = (frames * patch[0], height * patch[1], width * patch[2])
    latents = torch.randn(1, channels, *shape)
    rows = packing.patchify(latents, patch)
    assert torch.equal(rows, patchify_video_latents(latents, patch))
    assert torch.equal(packing.unpatchify(rows, shape, patch), latents)


def test_a_row_is_channel_then_patch_row_then_patch_column() -> None:
    latents = torch.arange(2 * 2 * 4 * 4.0).reshape(1, 2, 2, 4, 4)
    rows = packing.patchify(latents, (1, 2, 2))
    assert rows[1].tolist() == [2, 3, 6, 7, 34, 35, 38, 39]  # frame 0, row 0, column 1: c*4 + ph*2 + pw


def test_audio_rows_round_trip() -> None:
    latents = torch.randn(2, 3, 5)
    rows = packing.pack_audio(latents)
    assert torch.equal(rows[:5], latents[0].T)
    assert torch.equal(packing.unpack_audio(rows), latents)


def test_latents_that_do_not_fill_patches_are_refused() -> None:
    with pytest.raises(InternalError, match="whole patches"):
        packing.pack(small_config(), [TAG_TEXT], (7, 3, 4), 1)
    with pytest.raises(InternalError, match="anchor"):
        packing.pack(small_config(), [TAG_TEXT], (7, 2, 2), 1, ("middle",))
