"""How a video is cut for the VAE and put together again: spatial tiles, temporal units.

Tile size, overlap and the blend are constants of the trained model, not options: the decoder knows positions only
inside a 256-pixel tile (C68), and the reference picture at tile corners comes from blending with raw neighbours, not
from a normalised overlap-add (C69).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loader.errors import ArtifactError, InternalError
from runtime.families.minimax_h3.config import VideoVAEConfig


@dataclass(frozen=True)
class TileGeometry:
    """Pixels of a square tile and the least overlap of two neighbours. Other values than the default are for tests:
    the released weights were trained with these."""

    size: int = 256
    min_overlap: int = 64


RELEASED_TILES = TileGeometry()


@dataclass(frozen=True)
class AxisTiles:
    """Tiles along one axis, all of one length: tile i covers [starts[i], starts[i] + size)."""

    starts: tuple[int, ...]
    size: int
    overlaps: tuple[int, ...]  # of tile i and tile i+1

    @property
    def length(self) -> int:
        return self.starts[-1] + self.size

    def kept(self, index: int) -> int:
        """Leading part of tile `index` that the next tile does not take over."""
        return self.size - self.overlaps[index] if index < len(self.overlaps) else self.size

    def divided(self, ratio: int) -> AxisTiles:
        """The same tiles on a grid `ratio` times coarser (pixels → latents)."""
        return AxisTiles(
            tuple(s // ratio for s in self.starts),
            self.size // ratio,
            tuple(o // ratio for o in self.overlaps),
        )


def split_axis(length: int, tile: int, min_overlap: int, step: int) -> AxisTiles:
    """Fewest tiles that cover `length` with every overlap at least `min_overlap`.

    Overlaps grow from `min_overlap` in whole `step`s, one overlap after the other from the first, round robin, until
    the tiles end exactly at `length`. A side no longer than a tile is one tile of that length.

    Raises: InternalError: a size is not a multiple of `step`, or no number of tiles can cover the length.
    """
    sizes = {"length": length, "tile": tile, "min_overlap": min_overlap}
    if length <= 0 or any(size % step for size in sizes.values()) or not 0 <= min_overlap < tile:
        raise InternalError(
            "sizes cannot be tiled",
            where="tiling",
            found=sizes,
            expected=f"multiples of {step}, length > 0, 0 <= min_overlap < tile",
        )
    if length <= tile:
        return AxisTiles((0,), length, ())
    # Tiles at the least overlap advance by tile - min_overlap; the first one brings min_overlap more.
    count = math.ceil((length - min_overlap) / (tile - min_overlap))
    steps = (tile * count - min_overlap * (count - 1) - length) // step
    share, extra = divmod(steps, count - 1)
    overlaps = tuple(min_overlap + step * (share + (i < extra)) for i in range(count - 1))
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + tile - overlap)
    return AxisTiles(tuple(starts), tile, overlaps)


@dataclass(frozen=True)
class TilePlan:
    """Tiles of a canvas in raster order."""

    rows: AxisTiles
    cols: AxisTiles

    @classmethod
    def of_canvas(cls, height: int, width: int, step: int, tiles: TileGeometry = RELEASED_TILES) -> TilePlan:
        """Plan in pixels; `step` is the VAE's spatial ratio."""
        return cls(
            split_axis(height, tiles.size, tiles.min_overlap, step),
            split_axis(width, tiles.size, tiles.min_overlap, step),
        )

    def divided(self, ratio: int) -> TilePlan:
        return TilePlan(self.rows.divided(ratio), self.cols.divided(ratio))

    def cut(self, canvas: Tensor) -> list[Tensor]:
        """Views [..., tile height, tile width] of `canvas` [..., H, W]."""
        return [
            canvas[..., y : y + self.rows.size, x : x + self.cols.size]
            for y in self.rows.starts
            for x in self.cols.starts
        ]


def blend(before: Tensor, after: Tensor, extent: int, dim: int) -> Tensor:
    """Linear cross-fade of `before`'s last `extent` entries into `after`'s first ones along `dim`.

    Entry k of the result is `(1 - k/extent) * before + (k/extent) * after`; the rest of `after` follows unchanged.
    Weights have the dtype of `after`.
    """
    shape = [1] * after.ndim
    shape[dim] = extent
    positions = torch.arange(extent, device=after.device, dtype=after.dtype)
    weight = (positions / extent).view(shape)
    faded = before.narrow(dim, before.shape[dim] - extent, extent) * (1 - weight)
    faded += after.narrow(dim, 0, extent) * weight
    return torch.cat([faded, after.narrow(dim, extent, after.shape[dim] - extent)], dim=dim)


def stitch(tiles: Sequence[Tensor], plan: TilePlan) -> Tensor:
    """One canvas [..., H, W] from its tiles in raster order.

    A tile fades in from the raw tile above it, then from the raw tile to its left, then gives its bottom and right
    overlaps to the next tiles. Raw: the left neighbour is taken before its own vertical fade, and the diagonal
    neighbour never contributes, so where four tiles meet the result is not a separable average.
    """
    width = len(plan.cols.starts)
    canvas = tiles[0].new_empty(*tiles[0].shape[:-2], plan.rows.length, plan.cols.length)
    for i, y in enumerate(plan.rows.starts):
        for j, x in enumerate(plan.cols.starts):
            tile = tiles[i * width + j]
            if i:
                tile = blend(tiles[(i - 1) * width + j], tile, plan.rows.overlaps[i - 1], -2)
            if j:
                tile = blend(tiles[i * width + j - 1], tile, plan.cols.overlaps[j - 1], -1)
            rows, cols = plan.rows.kept(i), plan.cols.kept(j)
            canvas[..., y : y + rows, x : x + cols] = tile[..., :rows, :cols]
    return canvas


@dataclass(frozen=True)
class UnitPlan:
    """How T latent frames are decoded in independent units, and which decoded frames of a unit are kept.

    Released model: unit u decodes latents 5u … 5u+6 to 28 frames; frames 3 … 19 are its head, frames 23 … 27 its
    tail, which fades into the first frames of the next head; the last unit ends with its tail. 5n+2 latents make n
    units and 17n+5 frames.
    """

    units: int
    stride: int  # latents from one unit to the next
    window: int  # latents that a unit decodes
    pad_latents: int  # copies of the last latent, appended to fill the last unit
    surplus: int  # frames of those copies, cut from the end
    head: slice  # of a unit's decoded frames
    tail: slice
    clip_frames: int  # frames of a head
    fade: int  # frames of the cross-fade; the whole tail

    @classmethod
    def of_length(cls, config: VideoVAEConfig, num_latents: int) -> UnitPlan:
        """Raises: InternalError: too few latents for one unit. ArtifactError: a clip geometry without overlap."""
        ratio = config.temporal_ratio
        stride = math.ceil(config.clip_length / ratio)
        lead = stride * ratio - config.clip_length  # frames before a clip that its first latent stands for
        overlap = -config.token_drop % stride
        fade = overlap * ratio - lead
        if not 0 < fade <= config.clip_length:
            raise ArtifactError(
                "consecutive clips would not overlap",
                where="config.video_vae: clip_length, token_drop",
                found=(config.clip_length, config.token_drop),
                expected="an overlap of 1 to clip_length frames",
            )
        pad = -(num_latents + config.token_drop) % stride
        units = (num_latents + config.token_drop + pad) // stride - 1
        if units < 1:
            raise InternalError(
                "too few latent frames for one decoder unit",
                where="video decoder: latents",
                found=num_latents,
                expected=f"at least {stride - config.token_drop + 1} (whole videos have {stride}n + {overlap}, n >= 1)",
            )
        # The last latent of a clip stands for the frames that remain of it: 1 of 4 in the release.
        short = config.clip_length % ratio or ratio
        surplus = sum(short if (num_latents + k) % stride == 0 else ratio for k in range(pad))
        tail = slice(stride * ratio + lead, (stride + overlap) * ratio)
        return cls(
            units=units,
            stride=stride,
            window=stride + overlap,
            pad_latents=pad,
            surplus=surplus,
            head=slice(lead, stride * ratio),
            tail=tail,
            clip_frames=config.clip_length,
            fade=fade,
        )

    @property
    def num_frames(self) -> int:
        return self.units * self.clip_frames + self.fade - self.surplus

    def window_indices(self, unit: int, num_latents: int) -> list[int]:
        """Latent frames that `unit` decodes; past the end the last one repeats."""
        first = unit * self.stride
        return [min(t, num_latents - 1) for t in range(first, first + self.window)]
