"""Decoded units on their way from the device to an encoder: converted there, copied without waiting, checked on arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.families.minimax_h3.model.finite import require_finite_bounds
from runtime.families.minimax_h3.model.video_vae_pixels import to_yuv420

if TYPE_CHECKING:
    from runtime.media.unit_encoder import Layout


class DecodedUnit:
    """See `runtime.media.units.PictureUnit`. Holds the pictures' bytes, not the decoder's floats.

    Args:
        frames: [F, 3, H, W] float32 in [0, 1], on any device; may still be being computed.
    """

    layout: Layout = "yuv420p"

    def __init__(self, frames: Tensor) -> None:
        self.num_frames = len(frames)
        self._bounds = torch.stack(torch.aminmax(frames))  # NaN propagates to both
        self._pixels = to_yuv420(frames)

    def copy_into(self, target: memoryview) -> Callable[[], None] | None:
        """On a CUDA device the copy is queued behind the decoder's kernels, on their stream: the 0.6 ms that it takes
        at 1344x768 are not worth a second one. Pixels are checked when they have arrived: asking earlier would make the
        device idle.

        Raises: InternalError, here or in the returned call: a pixel is not finite.
        """
        host = torch.frombuffer(target, dtype=torch.uint8, count=self._pixels.numel())
        host.copy_(self._pixels.flatten(), non_blocking=True)
        if self._pixels.device.type == "cpu":
            low, high = self._bounds.tolist()
            require_finite_bounds(low, high, "decoded video")
            return None
        bounds = torch.empty(2, pin_memory=True)
        bounds.copy_(
            self._bounds, non_blocking=True
        )  # asking the device later would wait for the units behind this
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self._pixels.device))

        def wait() -> None:
            arrived.synchronize()
            low, high = bounds.tolist()
            require_finite_bounds(low, high, "decoded video")

        return wait
