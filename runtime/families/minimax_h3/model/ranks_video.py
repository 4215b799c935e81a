"""Video latents to pictures on all ranks; rank 0 hands them to its encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.families.minimax_h3.model.finite import require_finite, require_finite_bounds
from runtime.families.minimax_h3.model.job import JobInput
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.model.video_vae_pixels import to_yuv420
from runtime.families.minimax_h3.packing import unpatchify
from runtime.family import Latents
from runtime.parallel.control import Control
from runtime.parallel.ranks import Ranks, gather_parts
from runtime.parallel.units import UnitRelay

if TYPE_CHECKING:
    from runtime.media.unit_encoder import Layout


class ArrivedUnit:
    """A `runtime.media.units.PictureUnit` of pixels that are on rank 0's device. pixels: [F, 3/2 H W] uint8."""

    layout: Layout = "yuv420p"

    def __init__(self, pixels: Tensor) -> None:
        self.num_frames = len(pixels)
        self._pixels = pixels

    def copy_into(self, target: memoryview) -> Callable[[], None] | None:
        """Queued behind the work of the device's stream."""
        host = torch.frombuffer(target, dtype=torch.uint8, count=self._pixels.numel())
        host.copy_(self._pixels.flatten(), non_blocking=True)
        if self._pixels.device.type == "cpu":
            return None
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self._pixels.device))
        return arrived.synchronize


class RanksVideoUnits:
    """`decode_units.VideoUnits` over several ranks: rank 0 gets all units, the others none. One video."""

    def __init__(self, given: JobInput, decoder: VideoDecoder, ranks: Ranks, control: Control) -> None:
        self._given, self._decoder = given, decoder
        self._ranks, self._control = ranks, control
        self._open: Iterator[Tensor | None] | None = None

    @torch.inference_mode()
    def start(self, latents: Latents) -> None:
        """Let all ranks decode their first unit; they do while rank 0 does something else."""
        require_finite(latents["video"], "video latents")
        given = self._given
        video = unpatchify(latents["video"], given.sequence.latent_shape, given.config.transformer.patch_size)
        self._units = VideoUnitDecoder(self._decoder, video[0])
        self._open = UnitRelay(self._ranks, self._control, self._units).frames()
        if self._control.leads:
            next(self._open)

    @torch.inference_mode()
    def units(self, latents: Latents) -> Iterator[ArrivedUnit]:
        """One per temporal unit, in order. Raises: Cancelled; InternalError: latents or, after the last unit and on all
        ranks, pixels are not finite."""
        if self._open is None:
            self.start(latents)
        assert self._open is not None, "start has just made it"
        for pixels in self._open:
            assert pixels is not None, "the first value was taken by start"
            yield ArrivedUnit(pixels)
        with self._control.section("check of the pixels"):
            low, high = self._units.bounds(self._ranks)
        require_finite_bounds(low, high, "decoded video")

    def close(self) -> None:
        """Finish the round under way, so that rank 0 may give the request up."""
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]


class VideoUnitDecoder:
    """`parallel.units.UnitDecoder` of one video, to bytes as the encoders want them; keeps the range of its pixels."""

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
        return to_yuv420(frames)

    def frames_shape(self, unit: int) -> tuple[int, ...]:
        plan, ratio = self._plan, self._decoder.config.spatial_ratio
        frames = plan.clip_frames + (plan.fade - plan.surplus if unit == plan.units - 1 else 0)
        return (frames, self._latents.shape[2] * ratio * self._latents.shape[3] * ratio * 3 // 2)

    def bounds(self, ranks: Ranks) -> tuple[float, float]:
        """Least and greatest value of all ranks' frames; NaN if there is one."""
        both = gather_parts(ranks, torch.stack((self._low, self._high)))  # [P, 2]
        return float(both[:, 0].min()), float(both[:, 1].max())
