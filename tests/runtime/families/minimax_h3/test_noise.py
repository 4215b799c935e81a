"""Draw orders of both noise modes, replayed by hand and with diffusers' blocks."""

from __future__ import annotations

import hashlib

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.utils.torch_utils import randn_tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.noise import draw_noise, noised_keyframe
from tests.runtime.families.minimax_h3.small_config import small_config

SHAPE, AUDIO = (7, 4, 6), 37
CHANNELS, AUDIO_CHANNELS = 4, 8


@pytest.mark.oracle
@pytest.mark.parametrize("keyframes", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 - 1])
def test_single_stream_draws_keyframes_then_video_then_audio(seed: int, keyframes: int) -> None:
    noise = draw_noise(small_config(), seed, SHAPE, AUDIO, keyframes)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=torch.float32)

    for tensor in noise.keyframes:
        assert torch.equal(tensor, draw(1, CHANNELS, 1, 4, 6))
    assert len(noise.keyframes) == keyframes
    assert torch.equal(noise.video, draw(1, CHANNELS, *SHAPE))
    assert torch.equal(noise.audio, draw(2 * AUDIO, AUDIO_CHANNELS))


@pytest.mark.parametrize("keyframes", [0, 1, 2])
def test_reseed_starts_every_stream_anew(keyframes: int) -> None:
    noise = draw_noise(small_config(), 11, SHAPE, AUDIO, keyframes, "reseed")
    video = torch.randn((1, CHANNELS, *SHAPE), generator=torch.Generator().manual_seed(11))
    audio = torch.randn((2 * AUDIO, AUDIO_CHANNELS), generator=torch.Generator().manual_seed(11))
    tall = torch.randn((1, CHANNELS, 7 + keyframes, 4, 6), generator=torch.Generator().manual_seed(11))
    assert torch.equal(noise.video, video)
    assert torch.equal(noise.audio, audio)
    assert len(noise.keyframes) == keyframes
    assert all(torch.equal(tensor, tall[:, :, :1]) for tensor in noise.keyframes)
    assert not torch.equal(noise.audio, draw_noise(small_config(), 11, SHAPE, AUDIO).audio)


def test_text_to_video_shares_the_video_noise() -> None:
    config = small_config()
    assert torch.equal(
        draw_noise(config, 5, SHAPE, AUDIO).video, draw_noise(config, 5, SHAPE, AUDIO, 0, "reseed").video
    )


def test_digest_covers_every_value_in_draw_order() -> None:
    noise = draw_noise(small_config(), 3, SHAPE, AUDIO, 1)
    data = b"".join(t.numpy().tobytes() for t in (*noise.keyframes, noise.video, noise.audio))
    assert noise.sha256() == hashlib.sha256(data).hexdigest()
    assert noise.sha256() != draw_noise(small_config(), 4, SHAPE, AUDIO, 1).sha256()
    assert noise.sha256() == draw_noise(small_config(), 3, SHAPE, AUDIO, 1).sha256()


@pytest.mark.oracle
def test_keyframe_noising_equals_the_reference() -> None:
    latents, noise = torch.randn(1, 4, 1, 6, 8), torch.randn(1, 4, 1, 6, 8)
    expected = MiniMaxH3Scheduler(shift=12.0).scale_noise(latents, 0.999, noise)
    assert torch.equal(noised_keyframe(latents, noise, 0.999), expected)


def test_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    draw_noise(small_config(), 3, SHAPE, AUDIO, 2)
    draw_noise(small_config(), 3, SHAPE, AUDIO, 2, "reseed")
    assert torch.equal(before, torch.random.get_rng_state())


def test_unknown_mode_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="noise mode"):
        draw_noise(small_config(), 3, SHAPE, AUDIO, 0, "shuffled")  # type: ignore[arg-type]
