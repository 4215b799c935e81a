"""Keyframes on the canvas against diffusers' resize step, pixel for pixel."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3ResizeStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from runtime.families.minimax_h3.keyframes import Keyframe, fit_follower, fit_keyframes
from runtime.media.images import decode_image

INPUTS = Path(__file__).parents[3] / "cases" / "inputs"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def reference(first, last, width: int, height: int) -> list[Image.Image]:
    components = SimpleNamespace(
        image_processor=VaeImageProcessor(vae_scale_factor=16),
        canvas_multiple=32,
        config=SimpleNamespace(canvas_short_edge=768, canvas_max_pixels=768 * 1344),
    )
    state = PipelineState()
    for name, value in (("image", first), ("last_image", last), ("width", width), ("height", height)):
        state.set(name, value)
    MiniMaxH3ResizeStep()(components, state)
    return state.get("keyframes")


SIZES = st.tuples(st.integers(20, 400), st.integers(20, 400))


@pytest.mark.oracle
@settings(max_examples=40, deadline=None)
@given(SIZES, SIZES, st.integers(1, 8), st.integers(1, 8), st.sampled_from(["first", "last", "both"]))
def test_pixels_equal_the_reference(size_a, size_b, columns: int, rows: int, which: str) -> None:
    width, height = 32 * columns, 32 * rows
    first = picture(*size_a, seed=1) if which != "last" else None
    last = picture(*size_b, seed=2) if which != "first" else None
    keyframes = [
        Keyframe(name, image) for name, image in (("first", first), ("last", last)) if image is not None
    ]
    fitted = fit_keyframes(keyframes, width, height)
    expected = reference(first, last, width, height)
    assert [k.anchor for k in fitted] == [k.anchor for k in keyframes]
    for ours, theirs in zip(fitted, expected, strict=True):
        assert ours.image.size == (width, height)
        assert np.array_equal(np.asarray(ours.image), np.asarray(theirs))


def test_pictures_of_canvas_size_are_untouched() -> None:
    image = picture(64, 32)
    (fitted,) = fit_keyframes([Keyframe("last", image)], 64, 32)
    assert fitted.image is image
    assert fitted.transform == "none"


def test_transforms_are_reported_and_the_anchor_can_be_cut() -> None:
    keyframes = [Keyframe("first", picture(64, 64)), Keyframe("last", picture(64, 64, 1))]
    assert [k.transform for k in fit_keyframes(keyframes, 96, 64)] == ["stretch", "cover_crop"]
    cut = fit_keyframes(keyframes, 96, 64, crop_anchor=True)
    assert [k.transform for k in cut] == ["cover_crop", "cover_crop"]
    assert np.array_equal(np.asarray(cut[0].image), np.asarray(fit_follower(keyframes[0].image, 96, 64)))


def circle_mask(image: Image.Image) -> np.ndarray:
    """Where the picture's circle is: what differs clearly from the corner's colour."""
    pixels = np.asarray(image).astype(int)
    return np.abs(pixels - pixels[2, 2]).sum(axis=-1) > 150


def circle_ratio(image: Image.Image) -> float:
    """Width over height of the circle."""
    mask = circle_mask(image)
    return float(mask.any(axis=0).sum() / mask.any(axis=1).sum())


def case_picture(case_id: str) -> Image.Image:
    case = next(c for c in json.loads((INPUTS / "index.json").read_text()) if c["id"] == case_id)
    return decode_image((INPUTS / case["file"]).read_bytes())


def test_second_keyframe_keeps_a_circle_round() -> None:
    """I40. The circle is taller than the cut, so its chords are compared with those of a circle."""
    image = case_picture("I40")
    assert circle_ratio(image) == pytest.approx(1, abs=0.02)
    fitted = fit_keyframes([Keyframe("first", picture(1344, 768)), Keyframe("last", image)], 1344, 768)[1]
    assert fitted.transform == "cover_crop"
    radius = circle_mask(image).any(axis=0).sum() / 2 * 1344 / 720
    chords = circle_mask(fitted.image).sum(axis=1)
    for offset in (-300, -150, 0, 150, 300):
        assert chords[384 + offset] == pytest.approx(2 * (radius**2 - offset**2) ** 0.5, rel=0.03)


def test_first_keyframe_is_stretched_to_the_canvas() -> None:
    """I41. The reference stretches: by (1344/720) / (768/1280) here."""
    (fitted,) = fit_keyframes([Keyframe("first", case_picture("I41"))], 1344, 768)
    assert fitted.transform == "stretch"
    assert circle_ratio(fitted.image) == pytest.approx(1344 / 720 / (768 / 1280), rel=0.03)
