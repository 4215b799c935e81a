"""Video latents to frames on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.model.finite import require_finite
from runtime.families.minimax_h3.model.job import JobInput
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.model.video_vae_pixels import to_uint8
from runtime.families.minimax_h3.packing import unpatchify
from runtime.family import Latents
from runtime.parallel.control import Control
from runtime.parallel.ranks import Ranks, gather_parts
from runtime.parallel.units import UnitRelay

if TYPE_CHECKING:
    import numpy


class RanksVideoUnits:
    """`job.VideoUnits` over several ranks: rank 0 gets all frames, the others none. One video."""

    def __init__(self, given: JobInput, decoder: VideoDecoder, ranks: Ranks, control: Control) -> None:
        self._given, self._decoder = given, decoder
        self._ranks, self._control = ranks, control
        self._open: Iterator[Tensor | None] | None = None

    @torch.inference_mode()
    def start(self, latents: Latents) -> None:
        """On rank 0: let all ranks decode their first unit; they do while this rank does something else."""
        require_finite(latents["video"], "video latents")
        given = self._given
        video = unpatchify(latents["video"], given.sequence.latent_shape, given.config.transformer.patch_size)
        self._units = _Units(self._decoder, video[0])
        self._open = UnitRelay(self._ranks, self._control, self._units).frames()
        if self._control.leads:
            next(self._open)

    @torch.inference_mode()
    def units(self, latents: Latents) -> Iterator[numpy.ndarray[Any, Any]]:
        """[F, H, W, 3] uint8 per temporal unit, in order. Raises: Cancelled; InternalError: latents or pixels are not
        finite (on all ranks, when the last unit is decoded)."""
        if self._open is None:
            self.start(latents)
        assert self._open is not None, "start has just made it"
        for frames in self._open:
            assert frames is not None, "the first value was taken by start"
            yield frames.cpu().numpy()
        with self._control.section("check of the pixels"):
            low, high = self._units.bounds(self._ranks)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InternalError(
                "output is constant or not finite",
                where="decoded video",
                found=f"values from {low} to {high}",
            )

    def close(self) -> None:
        """Finish the round under way, so that rank 0 may give the request up."""
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]


class _Units:
    """`parallel.units.UnitDecoder` of one video; keeps the range of its pixels."""

    def __init__(self, decoder: VideoDecoder, latents: Tensor) -> None:
        self.device = decoder.device
        self._decoder, self._latents = decoder, latents
        self._plan = decoder.plan(latents)
        self._low = torch.full((), torch.inf, device=self.device)
        self._high = torch.full((), -torch.inf, device=self.device)

    @property
    def num_units(self) -> int:
        return self._plan.units

    def decode(self, unit: int) -> tuple[Tensor, Tensor]:
        return self._decoder.decode_unit(self._latents, unit, self._plan)

    def join(self, head: Tensor, before: Tensor | None, tail: Tensor, unit: int) -> Tensor:
        frames = self._decoder.join(head, before, tail, unit, self._plan)
        low, high = torch.aminmax(frames)  # NaN propagates to both
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)
        return to_uint8(frames)

    def frames_shape(self, unit: int) -> tuple[int, ...]:
        plan, ratio = self._plan, self._decoder.config.spatial_ratio
        is_last = unit == plan.units - 1
        frames = plan.clip_frames + (plan.fade - plan.surplus if is_last else 0)
        return (frames, self._latents.shape[2] * ratio, self._latents.shape[3] * ratio, 3)

    def bounds(self, ranks: Ranks) -> tuple[float, float]:
        """Least and greatest value of all ranks' frames; NaN if there is one."""
        both = gather_parts(ranks, torch.stack((self._low, self._high)))  # [P, 2]
        return float(both[:, 0].min()), float(both[:, 1].max())
