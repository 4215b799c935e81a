"""Canvas and frame rules against diffusers; limits and their messages."""

from __future__ import annotations

import pytest
from diffusers.modular_pipelines.minimax_h3 import modular_pipeline as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import RequestError
from runtime.families.minimax_h3 import canvas
from runtime.families.minimax_h3.canvas import CanvasLimits, FrameLimits
from tests.runtime.families.minimax_h3.small_config import small_config

LIMITS = CanvasLimits()


@pytest.mark.oracle
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6000), st.integers(1, 6000))
def test_resolved_canvas_equals_the_reference(width: int, height: int) -> None:
    if not 1 / 4 <= width / height <= 4:
        with pytest.raises(RequestError, match="aspect ratio"):
            canvas.resolve_canvas(width, height, LIMITS, 32, "first_frame")
        with pytest.raises(ValueError, match="aspect ratio"):
            reference.resolve_canvas_size(width, height, 32, 768, 768 * 1344)
        return
    ours = canvas.resolve_canvas(width, height, LIMITS, 32, "first_frame")
    assert ours[::-1] == reference.resolve_canvas_size(width, height, 32, 768, 768 * 1344)
    canvas.check_canvas(*ours, LIMITS, 32)  # what we serve can be asked for


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ((16, 9), (1344, 768)), ((9, 16), (768, 1344)), ((4, 3), (1024, 768)), ((3, 4), (768, 1024)),
        ((1, 1), (768, 768)), ((3, 2), (1152, 768)), ((21, 9), (1536, 672)), ((4, 1), (2016, 512)),
        ((1376, 768), (1344, 768)), ((7, 4), (1344, 768)),
    ],
)  # fmt: skip
def test_published_canvases(ratio: tuple[int, int], expected: tuple[int, int]) -> None:
    assert canvas.resolve_canvas(*ratio, LIMITS, 32, "aspect_ratio") == expected


@pytest.mark.parametrize("pair", [(1344, 768), (768, 1344), (768, 768), (256, 256), (1024, 256), (512, 2016)])
def test_legal_explicit_canvases(pair: tuple[int, int]) -> None:
    canvas.check_canvas(*pair, LIMITS, 32)
    assert canvas.nearest_canvas(*pair, LIMITS, 32) == pair


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((1360, 768), "multiples of 32"), ((1345, 769), "multiples of 32"), ((0, 0), "at least 256"),
        ((-1344, 768), "at least 256"), ((32, 32), "at least 256"), ((8192, 8192), "pixels"),
        ((1920, 1088), "1032192 pixels"), ((4096, 256), "4:1"), ((10**30, 32), "at least 256"),
    ],
)  # fmt: skip
def test_illegal_explicit_canvases(pair: tuple[int, int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        canvas.check_canvas(*pair, LIMITS, 32)
    assert "nearest legal size" in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(-(2**70), 2**70) | st.integers(-10, 5000),
    st.integers(-(2**70), 2**70) | st.integers(-10, 5000),
    st.sampled_from([LIMITS, canvas.SMALL_CANVAS]),
)
def test_the_suggested_canvas_is_always_legal(width: int, height: int, limits: CanvasLimits) -> None:
    canvas.check_canvas(*canvas.nearest_canvas(width, height, limits, 32), limits, 32)


@pytest.mark.oracle
def test_alignment_equals_the_reference() -> None:
    for frames in range(1, 400):
        aligned = reference.align_num_frames(frames, 17, 5)
        assert canvas.aligned_frames(frames) == aligned
        assert canvas.latent_frames(aligned) == reference.video_latent_num_frames(aligned, 17, 5)
        assert canvas.audio_latents(aligned) == reference.audio_latent_num_frames(aligned)


@settings(deadline=None)
@given(st.integers(1, 10**12))
def test_alignment_is_the_next_legal_count(frames: int) -> None:
    aligned = canvas.aligned_frames(frames)
    assert 0 <= aligned - frames < 17
    assert aligned % 17 == 5
    assert canvas.aligned_frames(aligned) == aligned


@pytest.mark.parametrize(
    ("asked", "served"), [(96, 107), (107, 107), (108, 124), (345, 345), (346, 362), (362, 362)]
)
def test_native_limits_hold_for_the_frames_asked(asked: int, served: int) -> None:
    assert canvas.check_frames(asked, FrameLimits()) == served


@pytest.mark.oracle
def test_strict_limits_are_those_of_the_reference() -> None:
    for frames in range(1, 400):
        legal = 5 <= reference.align_num_frames(frames, 17, 5) / 24 <= 15
        if legal:
            assert canvas.check_frames(frames, canvas.STRICT_FRAMES) == reference.align_num_frames(
                frames, 17, 5
            )
        else:
            with pytest.raises(RequestError, match="num_frames"):
                canvas.check_frames(frames, canvas.STRICT_FRAMES)


@pytest.mark.parametrize(
    "frames",
    [-(10**40), -1, 0, 1, 81, 95, 363, 10**6, 10**12, 2**63, pytest.param(10**5000, id="5001 digits")],
)
def test_illegal_frame_counts_name_rule_and_range(frames: int) -> None:
    with pytest.raises(RequestError, match="17n") as caught:
        canvas.check_frames(frames, FrameLimits())
    text = str(caught.value)
    assert all(word in text for word in ("num_frames", "362", "15"))
    assert len(text) < 300
    assert ("minimum is 107 frames, then 124" in text) == (frames < 96)


@pytest.mark.parametrize(
    ("seconds", "served"), [(4, 107), (5, 124), (10, 243), (15, 362), (5.5, 141), (14.99, 362)]
)
def test_seconds_round_to_frames(seconds: float, served: int) -> None:
    assert canvas.frames_of_seconds(seconds, FrameLimits()) == served


@pytest.mark.parametrize("seconds", [0, -1, 3.9, 15.01, 16, 1e300])
def test_durations_out_of_range(seconds: float) -> None:
    with pytest.raises(RequestError, match=r"seconds.*4 … 15 s"):
        canvas.frames_of_seconds(seconds, FrameLimits())


def test_sizes_of_the_published_lengths() -> None:
    # n, latent frames, audio latents per channel, samples of the decoder (800 per latent), samples of the file
    table = {
        107: (32, 178, 142_667),
        124: (37, 207, 165_333),
        141: (42, 235, 188_000),
        362: (107, 603, 482_667),
    }
    for frames, (latents, audio, samples) in table.items():
        assert canvas.latent_frames(frames) == latents
        assert canvas.audio_latents(frames) == audio
        assert canvas.audio_samples(frames, 32_000) == samples
        assert abs(800 * audio - samples) <= 400


def test_shapes_follow_the_configuration() -> None:
    assert canvas.canvas_multiple(small_config()) == 32
    assert canvas.latent_shape(small_config(), 1344, 768, 124) == (37, 48, 84)
