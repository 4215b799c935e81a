"""Video decoder against diffusers in float32 on the CPU, bit for bit; units, batching, memory, precision recipes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loader.errors import InternalError
from runtime.families.minimax_h3.model.tiling import RELEASED_TILES, TileGeometry
from runtime.families.minimax_h3.model.video_vae import VideoDecoder, to_uint8
from tests.fakes.h3_vae import video_oracle, video_parts
from tests.fakes.peak_bytes import PeakBytes
from tests.fakes.weights import DictWeights

SMALL = TileGeometry(size=64, min_overlap=16)
ENCODER = {"block_out_channels": (4, 4, 4, 4), "norm_num_groups": 2}  # unused here: as small as it goes
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": ENCODER,
    "three-layers-one-register": {
        **ENCODER,
        "decoder_num_layers": 3,
        "decoder_num_register_tokens": 1,
        "decoder_ffn_mult": 4,
        "decoder_num_attention_heads": 3,
    },
    "released-head": {
        **ENCODER,
        "decoder_attention_head_dim": 64,
        "decoder_rope_theta": 50.0,
        "decoder_num_layers": 1,
    },
    "half-rotated": {**ENCODER, "decoder_attention_head_dim": 48, "decoder_rope_dim_ratio": 0.5},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Equality of bits needs one thread: several cut a product by its shape, and fused or batched ones then round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _oracle(seed: int, name: str = "tiny", tiles: TileGeometry | None = SMALL) -> Any:
    oracle = video_oracle(seed, **CONFIGS[name])
    if tiles is None:
        oracle.disable_tiling()
    else:
        oracle.enable_tiling(tiles.size, tiles.size, tiles.min_overlap, tiles.min_overlap)
    return oracle


def _reference(oracle: Any, latents: Tensor) -> Tensor:
    """[F, 3, H, W] in [0, 1] by the formulas of the reference pipeline."""
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (oracle.config.latents_mean, oracle.config.latents_std)
    )
    decoded = oracle.decode(latents[None] * std + mean).sample
    pixel_mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1, 1)
    pixel_std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1, 1)
    return (decoded * pixel_std + pixel_mean).clamp(0, 1)[0].transpose(0, 1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("height", "width"), [(5, 6), (4, 9)], ids=["80x96", "64x144"])
@pytest.mark.parametrize("num_latents", [7, 12, 17, 22, 37], ids=lambda t: f"C65-{t}-latents")
def test_decode_equals_the_reference(name: str, height: int, width: int, num_latents: int) -> None:
    oracle = _oracle(num_latents, name)
    config, weights = video_parts(oracle)
    latents = torch.randn(4, num_latents, height, width)

    frames = VideoDecoder(config, weights, "cpu", tiles=SMALL).decode(latents)

    assert frames.shape == ((num_latents - 2) // 5 * 17 + 5, 3, 16 * height, 16 * width)
    assert frames.dtype == torch.float32
    assert torch.equal(frames, _reference(oracle, latents))
    assert frames.std() > 0.05  # neither constant nor saturated


def test_longest_video_equals_the_reference() -> None:
    """C65 at 107 latent frames, 362 frames."""
    oracle = _oracle(1)
    config, weights = video_parts(oracle)
    latents = torch.randn(4, 107, 3, 5)

    frames = VideoDecoder(config, weights, "cpu", tiles=SMALL).decode(latents)

    assert frames.shape[0] == 362
    assert torch.equal(frames, _reference(oracle, latents))


@pytest.mark.parametrize("num_latents", [3, 4, 5, 6, 8, 9, 10, 11, 13])
def test_other_lengths_equal_the_reference(num_latents: int) -> None:
    oracle = _oracle(2)
    config, weights = video_parts(oracle)
    latents = torch.randn(4, num_latents, 2, 3)

    frames = VideoDecoder(config, weights, "cpu", tiles=SMALL).decode(latents)

    assert torch.equal(frames, _reference(oracle, latents))


@pytest.mark.parametrize(("height", "width"), [(2, 2), (3, 11), (16, 16)])
def test_canvas_of_one_tile_equals_the_untiled_reference(height: int, width: int) -> None:
    oracle = _oracle(3, tiles=None)
    config, weights = video_parts(oracle)
    latents = torch.randn(4, 7, height, width)

    assert torch.equal(VideoDecoder(config, weights, "cpu").decode(latents), _reference(oracle, latents))


def test_released_tiles_are_the_default_and_differ_from_untiled() -> None:
    """C68."""
    tiled, untiled = _oracle(4, tiles=RELEASED_TILES), _oracle(4, tiles=None)
    config, weights = video_parts(tiled)
    latents = torch.randn(4, 7, 18, 17)

    decoder = VideoDecoder(config, weights, "cpu")
    frames = decoder.decode(latents)

    assert decoder.tiles == TileGeometry(256, 64)
    assert torch.equal(frames, _reference(tiled, latents))
    assert (frames - _reference(untiled, latents)).abs().max() > 1e-3


@pytest.mark.parametrize("tile_batch", [1, 2, 5, 28], ids=lambda b: f"C68-batch-{b}")
@pytest.mark.parametrize("seed", range(2))
def test_batched_tiles_equal_the_reference_bit_for_bit(tile_batch: int, seed: int) -> None:
    oracle = _oracle(seed)
    config, weights = video_parts(oracle)
    latents = torch.randn(4, 12, 9, 10)  # 3 x 4 tiles

    frames = VideoDecoder(config, weights, "cpu", tiles=SMALL, tile_batch=tile_batch).decode(latents)

    assert torch.equal(frames, _reference(oracle, latents))


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5, 7, 10], ids=lambda h: f"{16 * h}-high")
def test_all_tiles_in_one_forward_equal_one_by_one_at_every_width(height: int) -> None:
    """C68 over one to five tiles a side, with every way of sharing out the overlaps; one to three units."""
    config, weights = video_parts(_oracle(height, "half-rotated"))
    whole = VideoDecoder(config, weights, "cpu", tiles=SMALL)
    single = VideoDecoder(config, weights, "cpu", tiles=SMALL, tile_batch=1)
    for width in range(1, 12):
        latents = torch.randn(4, 7 + 5 * (width % 3), height, width)
        assert torch.equal(whole.decode(latents), single.decode(latents)), (height, width)
        whole.tile_batch = None  # chosen anew for the next canvas


@pytest.mark.parametrize(
    ("num_latents", "parts"), [(7, [22]), (12, [17, 22]), (17, [17, 17, 22]), (9, [17, 13])]
)
def test_units_are_the_whole_in_parts(num_latents: int, parts: list[int]) -> None:
    config, weights = video_parts(_oracle(5))
    decoder = VideoDecoder(config, weights, "cpu", tiles=SMALL)
    latents = torch.randn(4, num_latents, 5, 6)

    units = list(decoder.units(latents))

    assert [len(unit) for unit in units] == parts
    assert torch.equal(torch.cat(units), decoder.decode(latents))


def test_several_threads_change_rounding_only() -> None:
    oracle = _oracle(14)
    config, weights = video_parts(oracle)
    latents = torch.randn(4, 7, 5, 6)
    expected = _reference(oracle, latents)

    torch.set_num_threads(2)
    frames = VideoDecoder(config, weights, "cpu", tiles=SMALL).decode(latents)

    # Pixels are below 1, so float32 keeps 6e-8; a handful of roundings survive the two layers.
    torch.testing.assert_close(frames, expected, rtol=0, atol=2e-6)


def test_a_unit_is_out_before_later_latents_are_looked_at() -> None:
    config, weights = video_parts(_oracle(6))
    decoder = VideoDecoder(config, weights, "cpu", tiles=SMALL)
    latents = torch.randn(4, 12, 4, 4)
    broken = latents.clone()
    broken[:, 7:] = float("nan")

    first = next(decoder.units(broken))

    assert torch.equal(first, next(decoder.units(latents)))


def test_units_own_their_memory() -> None:
    config, weights = video_parts(_oracle(6))
    latents = torch.randn(4, 12, 4, 4)
    units = VideoDecoder(config, weights, "cpu").units(latents)
    expected = VideoDecoder(config, weights, "cpu").decode(latents)

    first = next(units)
    kept = first.clone()
    second = next(units)

    assert torch.equal(first, kept)
    assert torch.equal(second, expected[17:])


def test_groups_are_asked_for_once_in_order_of_use() -> None:
    config, weights = video_parts(_oracle(7))
    decoder = VideoDecoder(config, weights, "cpu")
    assert weights.asked == []

    decoder.decode(torch.randn(4, 12, 2, 2))

    assert weights.asked == [f"vae/decoder.{name}" for name in ("prelude", "blocks.0", "blocks.1", "heads")]


def test_outputs_need_no_grad() -> None:
    """C71."""
    config, weights = video_parts(_oracle(8).requires_grad_(True))
    decoder = VideoDecoder(config, weights, "cpu")
    latents = torch.randn(4, 7, 2, 2, requires_grad=True)

    assert not any(unit.requires_grad for unit in decoder.units(latents))
    assert torch.is_grad_enabled()  # nothing leaked out of the generator


def _peak_of_decode(num_latents: int) -> int:
    config, weights = video_parts(_oracle(9))
    decoder = VideoDecoder(config, weights, "cpu", tiles=SMALL)
    latents = torch.randn(4, num_latents, 5, 6)
    next(decoder.units(latents))  # tables and weights are there already
    with PeakBytes() as memory:
        for _ in decoder.units(latents):
            pass
    return memory.peak


def test_memory_does_not_grow_with_length() -> None:
    """C70: 124 and 362 frames; one part of 80x96 is 0.5 MB, so holding all of them would double the peak."""
    short, long = _peak_of_decode(37), _peak_of_decode(107)

    assert short > 1_000_000
    assert long == pytest.approx(short, rel=0.01)


class _SmallDevice(TorchDispatchMode):
    """A device whose allocator refuses any tensor larger than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() > self.limit:
                raise torch.OutOfMemoryError(f"{func} wants {leaf.untyped_storage().nbytes()} bytes")
        return result


def test_out_of_memory_retries_with_smaller_batches(caplog: pytest.LogCaptureFixture) -> None:
    """C70: a tile's pixels are 3*28*64*64 floats; the device takes those of three tiles but not of all four."""
    oracle = _oracle(10)
    config, weights = video_parts(oracle)
    latents = torch.randn(4, 12, 6, 7)  # 2 x 2 tiles of 64 pixels
    decoder = VideoDecoder(config, weights, "cpu", tiles=SMALL)

    with _SmallDevice(limit=3 * (3 * 28 * 64 * 64) * 4):
        units = list(decoder.units(latents))

    assert decoder.tile_batch == 2
    assert [record.tile_batch for record in caplog.records] == [2]
    assert torch.equal(torch.cat(units), _reference(oracle, latents))


def test_out_of_memory_with_one_tile_is_an_error_that_keeps_the_latents() -> None:
    """C70."""
    config, weights = video_parts(_oracle(10))
    latents = torch.randn(4, 7, 6, 7)
    before = latents.clone()

    with (
        _SmallDevice(limit=10_000),
        pytest.raises(InternalError, match="video decoder: out of memory with one tile") as caught,
    ):
        VideoDecoder(config, weights, "cpu", tiles=SMALL).decode(latents)

    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert torch.equal(latents, before)


@pytest.mark.parametrize("name", CONFIGS)
def test_fp16_linears_are_close_to_fp32(name: str) -> None:
    config, weights = video_parts(_oracle(11, name))
    latents = torch.randn(4, 12, 5, 6)

    exact = VideoDecoder(config, weights, "cpu", tiles=SMALL).decode(latents)
    half = VideoDecoder(config, weights, "cpu", tiles=SMALL, precision="fp16_linears").decode(latents)

    assert half.dtype == torch.float32
    # float16 keeps 11 bits (5e-4 relative); pixels have a spread of 0.15 here, and half of a uint8 step is 2e-3.
    torch.testing.assert_close(half, exact, rtol=0, atol=2e-3)
    assert not torch.equal(half, exact)


def test_linears_stored_in_fp16_give_the_same_bits_as_a_cast_at_load() -> None:
    config, weights = video_parts(_oracle(12))
    stored = DictWeights(
        {
            group: {
                name: tensor.half() if "blocks" in group and (".attn." in name or ".ff." in name) else tensor
                for name, tensor in tensors.items()
            }
            for group, tensors in weights.groups.items()
        }
    )
    latents = torch.randn(4, 7, 3, 3)

    cast = VideoDecoder(config, weights, "cpu", precision="fp16_linears").decode(latents)

    assert torch.equal(VideoDecoder(config, stored, "cpu", precision="fp16_linears").decode(latents), cast)


def test_residual_beyond_fp16_range_stays_finite() -> None:
    """C60: residual streams reach 1e6 and more, sixteen times what float16 holds."""
    oracle = _oracle(13)
    oracle.decoder.proj_in.bias.add_(torch.linspace(-1e6, 1e6, 64))
    config, weights = video_parts(oracle)
    latents = torch.randn(4, 7, 3, 3)

    half = VideoDecoder(config, weights, "cpu", precision="fp16_linears").decode(latents)

    assert torch.isfinite(half).all()
    torch.testing.assert_close(half, _reference(oracle, latents), rtol=0, atol=2e-3)


@pytest.mark.parametrize("num_latents", [1, 2])
def test_too_few_latents_are_refused_at_once(num_latents: int) -> None:
    config, weights = video_parts(_oracle(0))

    with pytest.raises(InternalError, match="too few latent frames"):
        VideoDecoder(config, weights, "cpu").units(torch.zeros(4, num_latents, 2, 2))


@pytest.mark.parametrize("shape", [(3, 7, 2, 2), (1, 4, 7, 2, 2), (4, 7, 4)])
def test_other_shapes_are_refused_at_once(shape: tuple[int, ...]) -> None:
    config, weights = video_parts(_oracle(0))

    with pytest.raises(InternalError, match=r"video decoder: latents: .*allowed: \[4, T, h, w\]"):
        VideoDecoder(config, weights, "cpu").units(torch.zeros(shape))


def test_unknown_recipe_and_empty_batch_are_refused() -> None:
    config, weights = video_parts(_oracle(0))

    with pytest.raises(InternalError, match=r"found 'bf16'; allowed: .*fp16_linears"):
        VideoDecoder(config, weights, "cpu", precision="bf16")  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="tile_batch"):
        VideoDecoder(config, weights, "cpu", tile_batch=0)


def test_uint8_rounds_half_to_even() -> None:
    levels = torch.tensor([0.0, 0.49, 0.5, 1.5, 2.5, 254.5, 254.51, 255.0])
    frames = (levels.double() / 255).view(1, 1, 1, 8).expand(2, 3, 4, 8)

    pixels = to_uint8(frames)

    assert pixels.shape == (2, 4, 8, 3)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert pixels[1, 2, :, 0].tolist() == [0, 0, 0, 2, 2, 254, 255, 255]


def test_uint8_keeps_channels_apart_and_equals_numpy() -> None:
    frames = torch.rand(3, 3, 5, 7)

    expected = (frames.permute(0, 2, 3, 1).numpy() * 255).round().astype("uint8")

    assert (to_uint8(frames).numpy() == expected).all()
