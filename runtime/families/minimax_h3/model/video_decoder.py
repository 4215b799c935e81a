"""Latents to frames: temporal units one after the other, each decoded as a batch of tiles.

A unit's frames are final once it and the unit before it are decoded, so they stream out while later units wait, and
memory does not depend on the length of the video (C70).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.config import VideoVAEConfig
from runtime.families.minimax_h3.model.decoder_memory import fitting_tiles, free_memory
from runtime.families.minimax_h3.model.tiling import (
    RELEASED_TILES,
    TileGeometry,
    TilePlan,
    UnitPlan,
    blend,
    stitch,
)
from runtime.families.minimax_h3.model.video_decoder_network import DecoderNetwork, Precision
from runtime.families.minimax_h3.model.video_vae_pixels import denormalize
from runtime.ops.decoder import EAGER, DecoderOperators
from runtime.weights import WeightSource

log = logging.getLogger(__name__)


class VideoDecoder:
    """Decoder of one prepared directory.

    Args:
        precision: recipe of the network, see `video_decoder_network`; None: that of the published fast path on CUDA,
            float32 elsewhere.
        tile_batch: most tiles per forward; it changes rounding only. None: all tiles of a unit if they fit into the
            memory that is free at a video's first unit, else as many as do. Halved for good, with a warning, when the
            device runs out of memory all the same.
        tiles: tile geometry; leave the default except in tests (C68).
    """

    def __init__(
        self,
        config: VideoVAEConfig,
        weights: WeightSource,
        device: torch.device | str,
        *,
        precision: Precision | None = None,
        tile_batch: int | None = None,
        tiles: TileGeometry = RELEASED_TILES,
        operators: DecoderOperators = EAGER,
    ) -> None:
        if tile_batch is not None and tile_batch < 1:
            raise InternalError("no tiles per forward", where="video decoder: tile_batch", found=tile_batch)
        self.config = config
        self.device = torch.device(device)
        self.tile_batch = tile_batch
        self.tiles = tiles
        self.precision = precision or ("fp16_linears" if self.device.type == "cuda" else "fp32")
        self._network = DecoderNetwork(config, weights, self.device, self.precision, operators)
        self._mean, self._std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )

    def units(self, latents: Tensor) -> Iterator[Tensor]:
        """Frames in order, one part per decoded unit.

        Args:
            latents: [C, T, h, w] float32, normalised, on any device; T = 5n + 2 makes 17n + 5 frames. Another T >= 3
                is filled with copies of the last latent and the frames of those copies are cut.
        Yields: [F, 3, 16h, 16w] float32 in [0, 1] on the decoder's device, new memory: 17 frames, 22 in the last part.
        Raises: InternalError: another rank or channel count, or T below 3 (at once, not at the first part); out of
            memory with one tile per forward.
        """
        return self._decode_units(latents, self.plan(latents))

    def plan(self, latents: Tensor) -> UnitPlan:
        """How `units` cuts these latents. Raises: InternalError: they do not fit, see `units`."""
        channels = self.config.latent_channels
        if latents.ndim != 4 or latents.shape[0] != channels:
            raise InternalError(
                "latents do not fit the decoder",
                where="video decoder: latents",
                found=tuple(latents.shape),
                expected=f"[{channels}, T, h, w]",
            )
        return UnitPlan.of_length(self.config, latents.shape[1])

    def decode(self, latents: Tensor) -> Tensor:
        """All parts of `units` in one tensor [F, 3, 16h, 16w]."""
        return torch.cat(list(self.units(latents)))

    @torch.inference_mode()
    def _decode_units(self, latents: Tensor, plan: UnitPlan) -> Iterator[Tensor]:
        tail: Tensor | None = None
        for unit in range(plan.units):
            head, next_tail = self.decode_unit(latents, unit, plan)
            yield self.join(head, tail, next_tail, unit, plan)
            tail = next_tail

    def join(self, head: Tensor, before: Tensor | None, tail: Tensor, unit: int, plan: UnitPlan) -> Tensor:
        """Frames [F, 3, H, W] of one part of `units`, from a unit's head and tail and the tail of the unit before it
        (None for the first unit)."""
        if before is not None:
            head = blend(before, head, plan.fade, dim=1)
        if unit == plan.units - 1:
            head = torch.cat([head, tail], dim=1)
            head = head[:, : head.shape[1] - plan.surplus]
        return denormalize(head)

    def decode_unit(self, latents: Tensor, unit: int, plan: UnitPlan) -> tuple[Tensor, Tensor]:
        """Decode one unit, which needs no other.

        Args:
            latents: as in `units`. plan: `UnitPlan.of_length` for them.
        Returns: head [3, 17, H, W] and tail [3, 5, H, W], float32 in the network's pixel scale.
        """
        indices = plan.window_indices(unit, latents.shape[1])
        # A slice and copies of the last latent: a list as index would be copied to the device, and waited for.
        frames = latents[:, indices[0] : indices[-1] + 1].to(self.device, torch.float32)
        filler = frames[:, -1:].expand(-1, len(indices) - frames.shape[1], -1, -1)
        window = torch.cat([frames, filler], dim=1) * self._std + self._mean  # [C, 7, h, w]
        ratio = self.config.spatial_ratio
        canvas = TilePlan.of_canvas(window.shape[2] * ratio, window.shape[3] * ratio, ratio, self.tiles)
        tiles = torch.stack(canvas.divided(ratio).cut(window))
        if self.tile_batch is None:
            self.tile_batch = self._fitting_tiles(tiles, canvas)
        pixels = self._decode_tiles(tiles, self.tile_batch)
        head = stitch([tile[:, plan.head] for tile in pixels], canvas)
        tail = stitch([tile[:, plan.tail] for tile in pixels], canvas)
        return head, tail

    def _fitting_tiles(self, tiles: Tensor, canvas: TilePlan) -> int:
        free = free_memory(self.device)
        if free is None:
            return len(tiles)
        grid = (tiles.shape[2], tiles.shape[3], tiles.shape[4])
        size = (canvas.rows.length, canvas.cols.length)
        compute_bytes = self._network.compute_dtype.itemsize
        return fitting_tiles(self.config, grid, compute_bytes, len(tiles), size, free)

    def _decode_tiles(self, tiles: Tensor, batch: int) -> list[Tensor]:
        """[tiles, C, 7, h, w] → [3, 28, H, W] each."""
        while True:
            try:
                return [tile for part in torch.split(tiles, batch) for tile in self._network.forward(part)]
            except torch.OutOfMemoryError as error:
                if batch == 1:
                    raise InternalError(
                        "out of memory with one tile per forward",
                        where="video decoder",
                        hint="the latents are intact; free memory on the device and decode them again",
                    ) from error
            # Outside the handler: the error's traceback keeps the failed forward's tensors alive.
            batch = self.tile_batch = max(1, min(batch, len(tiles)) // 2)
            log.warning("video decoder out of memory, smaller batch", extra={"tile_batch": batch})
