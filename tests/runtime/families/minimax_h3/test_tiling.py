"""Tile and unit plans against the published table and diffusers' planner; stitching against diffusers' stitch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ArtifactError, InternalError
from runtime.families.minimax_h3.config import VideoVAEConfig
from runtime.families.minimax_h3.model.tiling import (
    AxisTiles,
    TileGeometry,
    TilePlan,
    UnitPlan,
    blend,
    split_axis,
    stitch,
)
from tests.fakes.h3_vae import video_oracle, video_parts

SMALL = TileGeometry(size=64, min_overlap=16)


@pytest.fixture(scope="module")
def oracle() -> AutoencoderKLMiniMaxH3:
    return video_oracle(0, decoder_num_layers=1)


@pytest.fixture(scope="module")
def config(oracle: AutoencoderKLMiniMaxH3) -> VideoVAEConfig:
    return video_parts(oracle)[0]


@pytest.mark.parametrize(
    ("length", "starts", "overlaps"),
    [
        (256, (0,), ()),
        (96, (0,), ()),
        (512, (0, 128, 256), (128, 128)),
        (544, (0, 144, 288), (112, 112)),
        (768, (0, 160, 336, 512), (96, 80, 80)),
        (896, (0, 160, 320, 480, 640), (96, 96, 96, 96)),
        (960, (0, 176, 352, 528, 704), (80, 80, 80, 80)),
        (1024, (0, 192, 384, 576, 768), (64, 64, 64, 64)),
        (1344, (0, 176, 352, 528, 704, 896, 1088), (80, 80, 80, 80, 64, 64)),
        (1376, (0, 176, 352, 544, 736, 928, 1120), (80, 80, 64, 64, 64, 64)),
    ],
)
def test_published_tiles(length: int, starts: tuple[int, ...], overlaps: tuple[int, ...]) -> None:
    assert split_axis(length, 256, 64, 16) == AxisTiles(starts, min(length, 256), overlaps)


@pytest.mark.parametrize(("width", "height", "count"), [(1344, 768, 28), (768, 768, 16), (1024, 768, 20)])
def test_tiles_of_published_canvases(width: int, height: int, count: int) -> None:
    plan = TilePlan.of_canvas(height, width, 16)

    assert len(plan.rows.starts) * len(plan.cols.starts) == count


@given(st.data())
def test_planner_equals_the_reference(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([4, 8, 16]))
    tile = step * data.draw(st.integers(2, 20))
    overlap = step * data.draw(st.integers(1, tile // step - 1))
    length = step * data.draw(st.integers(1, 160))

    tiles = split_axis(length, tile, overlap, step)

    planner = AutoencoderKLMiniMaxH3._split_tiles
    starts, lengths, overlaps = planner(
        SimpleNamespace(spatial_compression_ratio=step), length, tile, overlap
    )
    assert tiles == AxisTiles(tuple(starts), lengths[0], tuple(overlaps))
    assert set(lengths) == {tiles.size}


@given(st.integers(1, 256).map(lambda n: 16 * n))
def test_tiles_cover_the_side_on_latent_borders(length: int) -> None:
    tiles = split_axis(length, 256, 64, 16)

    assert tiles.length == length
    assert all(start % 16 == 0 for start in tiles.starts)
    assert all(overlap >= 64 for overlap in tiles.overlaps)
    assert sum(tiles.kept(i) for i in range(len(tiles.starts))) == length
    assert tiles.divided(16).length == length // 16


@pytest.mark.parametrize(
    ("length", "tile", "overlap"),
    [(300, 256, 64), (0, 256, 64), (512, 256, 256), (512, 250, 64), (512, 256, 60)],
)
def test_sizes_that_cannot_be_tiled_are_refused(length: int, tile: int, overlap: int) -> None:
    with pytest.raises(InternalError, match=f"'length': {length}.*multiples of 16"):
        split_axis(length, tile, overlap, 16)


@pytest.mark.parametrize(
    ("height", "width"),
    [(96, 112), (160, 64), (64, 208), (48, 48), (80, 80), (208, 176)],
    ids=lambda v: f"C69-{v}",
)
@pytest.mark.parametrize("seed", range(3))
def test_stitch_equals_the_reference(
    oracle: AutoencoderKLMiniMaxH3, height: int, width: int, seed: int
) -> None:
    plan = TilePlan.of_canvas(height, width, 16, SMALL)
    num_rows, num_cols = len(plan.rows.starts), len(plan.cols.starts)
    torch.manual_seed(seed)
    tiles = list(torch.randn(num_rows * num_cols, 3, 2, plan.rows.size, plan.cols.size))

    canvas = stitch(tiles, plan)

    rows = [tiles[i * num_cols : (i + 1) * num_cols] for i in range(num_rows)]
    expected = oracle._stitch_tiles(rows, list(plan.rows.overlaps), list(plan.cols.overlaps))
    assert torch.equal(canvas, expected)
    assert canvas.shape == (3, 2, height, width)


def test_diagonal_neighbour_never_contributes() -> None:
    """C69: with constant tiles the corner of four is (1-a) left + a ((1-b) above + b own), without the fourth tile."""
    plan = TilePlan.of_canvas(112, 112, 16, SMALL)  # two tiles per axis, overlap 16
    diagonal, above, left, own = 1e6, 3.0, 5.0, 7.0
    tiles = [torch.full((1, 64, 64), value) for value in (diagonal, above, left, own)]

    corner = stitch(tiles, plan)[0, 48:64, 48:64]

    fade = torch.arange(16) / 16
    own_rows = (1 - fade) * above + fade * own
    expected = (1 - fade)[None, :] * left + fade[None, :] * own_rows[:, None]
    torch.testing.assert_close(corner, expected, rtol=0, atol=1e-6)


def test_tiles_cut_from_a_canvas_stitch_back_to_it() -> None:
    canvas = torch.randn(3, 160, 208, dtype=torch.float64)
    plan = TilePlan.of_canvas(160, 208, 16, SMALL)

    # (1-w) x + w x rounds; nothing else changes.
    torch.testing.assert_close(stitch(plan.cut(canvas), plan), canvas, rtol=1e-14, atol=1e-14)


def test_blend_begins_with_the_first_and_ends_before_the_second() -> None:
    before, after = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0]), torch.full((6,), 4.0)

    assert blend(before, after, 4, 0).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0]


def test_blend_weights_have_the_dtype_of_the_second() -> None:
    half = torch.ones(8, dtype=torch.float16)

    assert blend(half, half, 5, 0).dtype == torch.float16


@pytest.mark.parametrize(
    ("num_latents", "units"), [(7, 1), (12, 2), (17, 3), (22, 4), (37, 7), (72, 14), (107, 21)]
)
def test_units_of_whole_videos(config: VideoVAEConfig, num_latents: int, units: int) -> None:
    plan = UnitPlan.of_length(config, num_latents)

    assert (plan.units, plan.num_frames) == (units, 17 * units + 5)
    assert (plan.pad_latents, plan.surplus, plan.window, plan.fade) == (0, 0, 7, 5)
    assert (plan.head, plan.tail) == (slice(3, 20), slice(23, 28))
    assert plan.window_indices(units - 1, num_latents) == list(range(num_latents - 7, num_latents))


# Frames by hand: 22 for one unit, minus 4 per repeated latent, or 1 where it would have begun a clip's last frame.
@pytest.mark.parametrize(
    ("num_latents", "frames"), [(3, 9), (4, 13), (5, 17), (6, 18), (8, 26), (9, 30), (11, 35)]
)
def test_other_lengths_are_filled_and_cut(config: VideoVAEConfig, num_latents: int, frames: int) -> None:
    plan = UnitPlan.of_length(config, num_latents)

    assert plan.num_frames == frames
    last = plan.window_indices(plan.units - 1, num_latents)
    assert last[-1] == num_latents - 1
    assert last.count(num_latents - 1) == plan.pad_latents + 1


@pytest.mark.parametrize("num_latents", [1, 2])
def test_too_few_latents_are_refused(config: VideoVAEConfig, num_latents: int) -> None:
    with pytest.raises(InternalError, match=rf"found {num_latents}; allowed: at least 3 .*5n \+ 2"):
        UnitPlan.of_length(config, num_latents)


@pytest.mark.parametrize("change", [{"token_drop": 0}, {"token_drop": 5}, {"clip_length": 1}])
def test_clips_that_do_not_overlap_are_refused(config: VideoVAEConfig, change: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="clip_length, token_drop"):
        UnitPlan.of_length(dataclasses.replace(config, **change), 12)
