"""Pictures and the vision tower against transformers (Qwen3-VL)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from loader.errors import ArtifactError, InternalError
from runtime.families.minimax_h3.model.vision import encode_images, image_patches, position_embedding
from runtime.families.minimax_h3.tokens import ImageSpan
from runtime.ops.attention import attention
from tests.fakes.h3_weights import build_encoder, conditioner_groups, random_config
from tests.fakes.weights import DictWeights

GRIDS = pytest.mark.parametrize(
    "grids",
    [[(2, 2)], [(2, 6)], [(8, 4)], [(6, 10), (4, 2)], [(4, 4), (4, 4)]],
    ids=lambda grids: "+".join(f"{h}x{w}" for h, w in grids),
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PATCH_WIDTH = 3 * 2 * 16 * 16


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth RGB noise, so that resampling has something to keep."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR))


def run_ours(config, state, patches, grids, **kwargs):
    weights = DictWeights(conditioner_groups(state))
    spans = [ImageSpan(0, height, width) for height, width in grids]
    return encode_images(config, weights, patches, spans, "cpu", **kwargs)


def random_patches(grids, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(height * width, PATCH_WIDTH) for height, width in grids]


@pytest.mark.oracle
@DTYPES
@GRIDS
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_deepstack_equal_transformers(seed, grids, dtype):
    config = random_config(seed)
    model, state = build_encoder(config, seed, dtype)
    patches = random_patches(grids)

    found = run_ours(config, state, patches, grids)

    pixels = torch.cat(patches).to(dtype)
    expected = model.model.visual(pixels, grid_thw=torch.tensor([(1, h, w) for h, w in grids]))
    assert len(found.deepstack) == len(config.vision.deepstack_visual_indexes)
    assert found.tokens.abs().max() > 0.05
    assert torch.equal(found.tokens, expected.pooler_output)
    for mine, theirs in zip(found.deepstack, expected.deepstack_features, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.oracle
@pytest.mark.parametrize("grid", [(2, 2), (2, 14), (10, 4), (48, 84)], ids=lambda g: f"{g[0]}x{g[1]}")
@pytest.mark.parametrize("side", [2, 8, 48])
def test_position_embedding_is_a_bilinear_resize_with_aligned_corners(grid, side):
    vision = dataclasses.replace(random_config(0).vision, num_position_embeddings=side * side)
    table = torch.randn(side * side, 5)

    found = position_embedding(table, *grid, vision)

    raster = torch.nn.functional.interpolate(
        table.T.reshape(1, 5, side, side), size=grid, mode="bilinear", align_corners=True
    )[0]
    cells = raster.reshape(5, grid[0] // 2, 2, grid[1] // 2, 2).permute(1, 3, 2, 4, 0).reshape(-1, 5)
    # Another order of the same four products and another rounding of the place: below 1e-5 of unit values.
    torch.testing.assert_close(found, cells, rtol=0, atol=2e-5)


@pytest.mark.oracle
def test_tokens_stay_close_to_the_patch_convolution():
    config = random_config(2)
    model, state = build_encoder(config, 2, torch.float32, fused=False)
    patches = random_patches([(4, 6)])

    found = run_ours(config, state, patches, [(4, 6)])

    expected = model.model.visual(patches[0], grid_thw=torch.tensor([(1, 4, 6)]))
    # A convolution sums its 1536 products in another order than a matrix product.
    torch.testing.assert_close(found.tokens, expected.pooler_output, rtol=1e-5, atol=2e-5)


def test_pictures_do_not_see_each_other():
    config = random_config(1)
    _, state = build_encoder(config, 1, torch.float32)
    grids = [(4, 6), (8, 2)]
    patches = random_patches(grids)

    together = run_ours(config, state, patches, grids)
    alone = [run_ours(config, state, [rows], [grid]) for rows, grid in zip(patches, grids, strict=True)]

    # Matrix products with another number of rows may round differently in fp32.
    expected = torch.cat([features.tokens for features in alone])
    torch.testing.assert_close(together.tokens, expected, rtol=1e-5, atol=1e-6)


def test_attention_hook_is_called_once_per_picture_and_block():
    config = random_config(1)
    _, state = build_encoder(config, 1, torch.float32)
    grids, lengths = [(4, 6), (2, 2)], []

    def watched(q, k, v, *, causal=False, scale=None):
        lengths.append((len(q), causal))
        return attention(q, k, v, causal=causal, scale=scale)

    run_ours(config, state, random_patches(grids), grids, attention=watched)

    assert lengths == [(24, False), (4, False)] * config.vision.depth


def test_patches_that_disagree_with_the_grid_are_refused():
    config = random_config(0)
    _, state = build_encoder(config, 0, torch.float32)
    with pytest.raises(InternalError, match=r"found \[24\]; allowed: \[16\]"):
        run_ours(config, state, random_patches([(4, 6)]), [(4, 4)])


def test_a_missing_tensor_is_named():
    config = random_config(0)
    weights = DictWeights({"text_encoder/visual": {}})
    with pytest.raises(ArtifactError, match=r"model\.visual\.patch_embed\.proj\.weight"):
        encode_images(config, weights, random_patches([(2, 2)]), [ImageSpan(0, 2, 2)], "cpu")


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("height", "width"),
    [(32, 32), (64, 96), (96, 64), (50, 70), (40, 33), (16, 16), (300, 200), (128, 129), (17, 512)],
)
def test_patches_equal_the_image_processor_of_transformers(height, width):
    config = random_config(0)
    limits = config.image_processor
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    rgb = picture(height, width)

    found = image_patches(rgb, config)

    expected = processor(images=[Image.fromarray(rgb)], return_tensors="pt")
    assert found.shape == (int(expected["image_grid_thw"].prod()), PATCH_WIDTH)
    # The processor divides by 255 first: up to one fp32 step of values below one apart, the same bf16 values.
    torch.testing.assert_close(found, expected["pixel_values"], rtol=0, atol=2**-23)
    assert torch.equal(found.bfloat16(), expected["pixel_values"].bfloat16())


def test_a_picture_on_the_grid_keeps_its_pixels():
    config = random_config(0)
    rgb = picture(64, 96, seed=3)

    patches = image_patches(rgb, config)

    # Second merge block of the first row, its lower left patch; green of the second temporal copy.
    values = patches.view(2, 3, 2, 2, 3, 2, 16, 16)[0, 1, 1, 0, 1, 1]
    expected = (rgb[16:32, 32:48, 1].astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    assert values.numpy().tobytes() == expected.tobytes()


def test_read_only_and_strided_pictures_are_accepted():
    config = random_config(0)
    rgb = picture(64, 64)
    rgb.setflags(write=False)

    assert torch.equal(
        image_patches(rgb[:, ::-1], config), image_patches(np.ascontiguousarray(rgb[:, ::-1]), config)
    )


@pytest.mark.parametrize(
    "rgb",
    [
        np.zeros((32, 32), np.uint8),
        np.zeros((32, 32, 4), np.uint8),
        np.zeros((32, 32, 3), np.float32),
    ],
    ids=["gray", "alpha", "float"],
)
def test_other_arrays_are_refused(rgb):
    with pytest.raises(InternalError, match="not an RGB picture"):
        image_patches(rgb, random_config(0))
