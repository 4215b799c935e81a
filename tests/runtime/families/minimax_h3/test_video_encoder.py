"""Video encoder against diffusers in float32 on the CPU: bit for bit at one tile per forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.model.tiling import RELEASED_TILES, TileGeometry
from runtime.families.minimax_h3.model.video_vae import VideoEncoder, encode_frames, encode_keyframe
from tests.fakes.h3_vae import video_oracle, video_parts

SMALL = TileGeometry(size=64, min_overlap=16)
NARROW = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "decoder_num_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "narrow": NARROW,
    "two-blocks-a-level": {**NARROW, "layers_per_block": 2, "block_out_channels": (8, 16, 16, 24)},
    "levels-without-downsampling": {
        **NARROW,
        "block_out_channels": (4, 8, 8, 12, 16, 16),
        "spatial_downsample_factors": (2, 2, 2, 2, 1, 1),
        "temporal_downsample_factors": (1, 2, 2, 1, 1, 1),
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Equality of bits needs one thread: several cut a product by its shape, and convolutions may then sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _pixels(frames: int, height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8)


def _normalized(pixels: Tensor) -> Tensor:
    """[1, 3, F, H, W] float32, written out independently of the code under test."""
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1, 1)
    return (pixels.permute(3, 0, 1, 2)[None].float() / 255.0 - mean) / std


def _set_tiles(oracle: Any, tiles: TileGeometry) -> None:
    oracle.enable_tiling(tiles.size, tiles.size, tiles.min_overlap, tiles.min_overlap)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("frames", "height", "width", "latent_frames"),
    [(1, 64, 96, 1), (1, 160, 112, 1), (17, 32, 48, 2), (22, 48, 32, 7), (39, 32, 32, 12), (5, 32, 32, 2)],
)
def test_moments_equal_the_reference(
    name: str, frames: int, height: int, width: int, latent_frames: int
) -> None:
    oracle = video_oracle(frames + height, **CONFIGS[name])
    _set_tiles(oracle, SMALL)
    config, weights = video_parts(oracle)
    video = _normalized(_pixels(frames, height, width))

    moments = VideoEncoder(config, weights, "cpu", tiles=SMALL).moments(video[0])

    assert moments.shape == (8, latent_frames, height // 16, width // 16)
    assert torch.equal(moments, oracle.encode(video).latent_dist.parameters[0])


def test_clip_tiled_both_ways_equals_the_reference() -> None:
    oracle = video_oracle(5, **NARROW)
    _set_tiles(oracle, SMALL)
    config, weights = video_parts(oracle)
    video = _normalized(_pixels(5, 80, 112))

    moments = VideoEncoder(config, weights, "cpu", tiles=SMALL).moments(video[0])

    assert torch.equal(moments, oracle.encode(video).latent_dist.parameters[0])


def test_released_tiles_are_the_default() -> None:
    oracle = video_oracle(6, **NARROW)  # diffusers' own default geometry
    config, weights = video_parts(oracle)
    video = _normalized(_pixels(1, 272, 64))

    encoder = VideoEncoder(config, weights, "cpu")

    assert encoder.tiles == RELEASED_TILES == TileGeometry(256, 64)
    assert torch.equal(encoder.moments(video[0]), oracle.encode(video).latent_dist.parameters[0])


@pytest.mark.parametrize("frames", [1, 5])
def test_batched_tiles_equal_one_by_one(frames: int) -> None:
    """Only to rounding: a convolution of another batch size may sum in another order."""
    config, weights = video_parts(video_oracle(7, **NARROW))
    video = _normalized(_pixels(frames, 112, 80))[0]

    one_by_one = VideoEncoder(config, weights, "cpu", tiles=SMALL).moments(video)
    batched = VideoEncoder(config, weights, "cpu", tiles=SMALL, tile_batch=4).moments(video)

    # Values are of order 1; float32 has 6e-8 there and the sums about 20 layers.
    torch.testing.assert_close(batched, one_by_one, rtol=0, atol=1e-5)


def test_encoder_is_causal() -> None:
    config, weights = video_parts(video_oracle(8, **NARROW))
    encoder = VideoEncoder(config, weights, "cpu")
    video = _normalized(_pixels(34, 32, 32))[0]
    changed = video.clone()
    changed[:, 17:] = 0.0

    before, after = encoder.moments(video), encoder.moments(changed)

    assert torch.equal(before[:, :5], after[:, :5])  # the first clip's latents
    assert not torch.equal(before[:, 5:], after[:, 5:])


def _reference_condition(oracle: Any, pixels: Tensor) -> Tensor:
    """The recipe of the reference pipeline around diffusers' own posterior."""
    posterior = oracle.encode(_normalized(pixels)).latent_dist
    sample = posterior.sample(generator=torch.Generator().manual_seed(42)).to(torch.float16).float()
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (oracle.config.latents_mean, oracle.config.latents_std)
    )
    return ((sample - mean) / std)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("height", "width"), [(64, 96), (288, 32), (96, 272)])
def test_keyframe_equals_the_reference(height: int, width: int, seed: int) -> None:
    """C64: sampled posterior, seed 42, float16 rounding, then normalisation."""
    oracle = video_oracle(seed, **NARROW)
    config, weights = video_parts(oracle)
    pixels = _pixels(1, height, width)

    torch.manual_seed(999)  # neither the global generator nor its state matters
    latents = encode_keyframe(pixels[0], config, weights, "cpu")

    assert latents.shape == (4, 1, height // 16, width // 16)
    assert latents.dtype == torch.float32
    assert torch.equal(latents, _reference_condition(oracle, pixels))


def test_reference_video_equals_the_reference() -> None:
    oracle = video_oracle(4, **NARROW)
    config, weights = video_parts(oracle)
    pixels = _pixels(22, 48, 64)

    latents = encode_frames(pixels, config, weights, "cpu")

    assert latents.shape == (4, 7, 3, 4)
    assert torch.equal(latents, _reference_condition(oracle, pixels))


@pytest.mark.slow
def test_keyframe_equals_the_reference_pipeline() -> None:
    """Slow: importing diffusers' pipeline takes most of it."""
    from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

    oracle = video_oracle(3, **NARROW)
    config, weights = video_parts(oracle)
    pixels = _pixels(1, 288, 96)

    expected = encode_vae_condition(
        oracle, pixels.permute(3, 0, 1, 2)[None], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    )

    assert torch.equal(encode_keyframe(pixels[0], config, weights, "cpu"), expected[0])


def test_outputs_need_no_grad() -> None:
    """C71."""
    config, weights = video_parts(video_oracle(0, **NARROW).requires_grad_(True))
    video = torch.randn(3, 1, 32, 32, requires_grad=True)

    assert not VideoEncoder(config, weights, "cpu").moments(video).requires_grad
    assert not encode_keyframe(_pixels(1, 32, 32)[0], config, weights, "cpu").requires_grad


@pytest.mark.parametrize(
    "pixels",
    [
        torch.zeros(1, 32, 32, 4, dtype=torch.uint8),
        torch.zeros(1, 3, 32, 32, dtype=torch.uint8),
        torch.zeros(1, 32, 32, 3),
        torch.zeros(32, 32, 3, dtype=torch.uint8),
    ],
    ids=["rgba", "channels-first", "float", "no-frames"],
)
def test_other_pixels_are_refused(pixels: Tensor) -> None:
    config, weights = video_parts(video_oracle(0, **NARROW))

    with pytest.raises(InternalError, match=r"video encoder: pixels: .*allowed: \[F, H, W, 3\] uint8"):
        encode_frames(pixels, config, weights, "cpu")


def test_canvas_off_the_latent_grid_is_refused() -> None:
    config, weights = video_parts(video_oracle(0, **NARROW))

    with pytest.raises(InternalError, match="multiples of 16"):
        encode_keyframe(_pixels(1, 40, 32)[0], config, weights, "cpu")
