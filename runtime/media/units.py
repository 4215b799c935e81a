"""Pictures of one temporal unit on their way from a decoder to an encoder. numpy on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from loader.errors import InternalError
from runtime.media.unit_encoder import Layout, PictureOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SAMPLES = 1 << 14


class PictureUnit(Protocol):
    """Frames that may still be computed on a device."""

    @property
    def num_frames(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def copy_into(self, target: memoryview) -> Callable[[], None] | None:
        """Copy all bytes in `layout` to `target`.

        Returns: None if they are there; otherwise a call that returns once they are, to be made exactly once.
        Raises: InternalError, here or in the returned call: the pictures are unusable.
        """
        ...


class HostUnit:
    """RGB frames in host memory, [F, H, W, 3] uint8."""

    layout: Layout = "rgb24"

    def __init__(self, frames: NDArray[Any], options: PictureOptions) -> None:
        """Raises: InternalError: another shape or dtype, or no frame."""
        size = [options.height, options.width, 3]
        if (
            frames.dtype.name != "uint8"
            or frames.ndim != 4
            or list(frames.shape[1:]) != size
            or not len(frames)
        ):
            raise InternalError(
                "wrong frames",
                where="video decoder",
                found=f"{frames.dtype} {list(frames.shape)}",
                expected=f"uint8 [F, {options.height}, {options.width}, 3]",
            )
        self._frames = frames
        self.num_frames = len(frames)

    def copy_into(self, target: memoryview) -> None:
        import numpy as np

        size = self._frames.size
        np.copyto(np.frombuffer(target, np.uint8, size).reshape(self._frames.shape), self._frames)


class BlankCheck:
    """Whether all pictures so far are one colour, from samples of every frame."""

    def __init__(self, options: PictureOptions) -> None:
        self._options = options
        self._low = [255, 255, 255]
        self._high = [0, 0, 0]

    def add(self, pixels: memoryview, count: int, layout: Layout) -> None:
        import numpy as np

        frames = np.frombuffer(pixels, np.uint8, count * self._options.frame_bytes(layout)).reshape(count, -1)
        for index, component in enumerate(self._components(frames, layout)):
            step = max(1, component.shape[1] // _SAMPLES)
            sample = component[:, ::step]
            self._low[index] = min(self._low[index], int(sample.min()))
            self._high[index] = max(self._high[index], int(sample.max()))

    @property
    def is_blank(self) -> bool:
        return self._low == self._high

    @property
    def colour(self) -> str:
        return "/".join(str(value) for value in self._low)

    def _components(self, frames: NDArray[np.uint8], layout: Layout) -> list[NDArray[np.uint8]]:
        if layout == "rgb24":
            return [frames[:, channel::3] for channel in range(3)]
        luma = self._options.width * self._options.height
        return [frames[:, :luma], frames[:, luma : luma * 5 // 4], frames[:, luma * 5 // 4 :]]
