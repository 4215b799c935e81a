"""Fitting sound to the picture's length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import InternalError
from runtime.media.pcm import fit_pcm, resample_linear


def noise(samples: int, scale: float = 0.5) -> np.ndarray:
    return (scale * np.random.default_rng(samples).uniform(-1, 1, (2, samples))).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(-401, 401))
def test_at_most_half_a_latent_is_cut_or_filled(frames: int, extra: int) -> None:
    wanted = round(frames * 32_000 / 24)
    audio = noise(wanted + extra)
    if abs(extra) > 400:
        with pytest.raises(InternalError, match="too long" if extra > 0 else "too short"):
            fit_pcm(audio, 32_000, frames, 24)
        return
    fitted = fit_pcm(audio, 32_000, frames, 24)
    kept = min(wanted, audio.shape[1])
    assert fitted.samples.shape == (2, wanted)
    assert fitted.samples.dtype == np.float32
    assert np.array_equal(fitted.samples[:, :kept], audio[:, :kept])
    assert not fitted.samples[:, kept:].any()
    assert fitted.shift == -extra


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_clamps_and_counts(dtype: type) -> None:
    audio = np.zeros((2, 32_000), dtype)
    audio[0, :3], audio[1, 0] = [1.5, -2.0, 1.0], -1.25
    before = audio.copy()
    fitted = fit_pcm(audio, 32_000, 24, 24)
    assert fitted.samples[0, :3].tolist() == [1.0, -1.0, 1.0]
    assert (fitted.clipped, fitted.peak) == (3, 2.0)
    assert np.array_equal(audio, before)


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (np.zeros((1, 32_000), np.float32), "stereo"), (np.zeros((2, 32_000), np.int16), "int16"),
        (np.zeros(32_000, np.float32), "stereo"), (np.zeros((1, 2, 32_000), np.float32), "stereo"),
        (np.zeros((2, 0), np.float32), "empty"), (np.full((2, 32_000), np.nan, np.float32), "64000 NaN"),
    ],
)  # fmt: skip
def test_unusable_sound_is_refused(audio: np.ndarray, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        fit_pcm(audio, 32_000, 24, 24)


def test_linear_resampling_keeps_times_and_values() -> None:
    ramp = np.stack([np.arange(160.0), -np.arange(160.0)]).astype(np.float32)
    wide = resample_linear(ramp, 32_000)
    assert wide.shape == (2, 32_000)
    assert np.array_equal(wide[:, ::200], ramp)
    assert wide[0, 100] == pytest.approx(0.5)
    assert np.array_equal(resample_linear(ramp, 160), ramp)
