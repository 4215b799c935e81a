"""Keyframes of fl2va on the canvas, as the released model was conditioned.

The anchor (the first frame, or a last frame alone) is stretched to the canvas; the follower (the last frame when both
are given) keeps its proportions and is cut centrally (diffusers 0.42.1, modular_pipelines/minimax_h3, resize step).
Both use Pillow's antialiased Lanczos filter on 8-bit RGB. The default canvas follows the anchor, so its stretch is
small unless a canvas is asked for; `crop_anchor` is the named option for those who prefer cutting to parity.
Pillow is imported on use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from runtime.families.minimax_h3.packing import Anchor

if TYPE_CHECKING:
    from PIL.Image import Image

Transform = Literal["none", "stretch", "cover_crop"]


@dataclass(frozen=True)
class Keyframe:
    """A decoded keyframe: upright RGB, any size."""

    anchor: Anchor
    image: Image


@dataclass(frozen=True)
class FittedKeyframe:
    """A keyframe at the canvas size, with what was done to it (part of the result's metadata)."""

    anchor: Anchor
    image: Image
    transform: Transform


def fit_keyframes(
    keyframes: Sequence[Keyframe], width: int, height: int, *, crop_anchor: bool = False
) -> tuple[FittedKeyframe, ...]:
    """Put every keyframe on the canvas; packed order (first before last) is kept."""
    fitted = []
    for index, keyframe in enumerate(keyframes):
        if keyframe.image.size == (width, height):
            fitted.append(FittedKeyframe(keyframe.anchor, keyframe.image, "none"))
        elif index == 0 and not crop_anchor:
            fitted.append(
                FittedKeyframe(keyframe.anchor, fit_anchor(keyframe.image, width, height), "stretch")
            )
        else:
            fitted.append(
                FittedKeyframe(keyframe.anchor, fit_follower(keyframe.image, width, height), "cover_crop")
            )
    return tuple(fitted)


def fit_anchor(image: Image, width: int, height: int) -> Image:
    """Stretch to the canvas; the proportions follow the canvas."""
    from PIL.Image import Resampling

    return image.resize((width, height), Resampling.LANCZOS)


def fit_follower(image: Image, width: int, height: int) -> Image:
    """Scale to cover the canvas, rounding each side half to even, and cut the middle."""
    from PIL.Image import Resampling

    scale = max(width / image.width, height / image.height)
    covered = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, top = (covered[0] - width) // 2, (covered[1] - height) // 2
    return image.resize(covered, Resampling.LANCZOS).crop((left, top, left + width, top + height))
