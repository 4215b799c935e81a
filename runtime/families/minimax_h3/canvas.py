"""Picture size and clip length: what a request may ask, what it is served, what that is in latents.

Canvas: sides are multiples of 32 (VAE ratio times patch). Without an explicit size the canvas follows an aspect
ratio: short edge 768, area brought down to 1344 x 768, each side rounded to the nearest multiple (diffusers 0.42.1,
modular_pipelines/minimax_h3, resolve_canvas_size). Clip: 24 frames a second, 17n + 5 frames, rounded up; limits hold
for the frames *asked for*, so 15 s asks for 360 and is served 362. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loader.errors import RequestError
from runtime.families.minimax_h3.config import FPS, H3Config

FRAMES_PER_CLIP, EXTRA_FRAMES = 17, 5  # legal counts are 17n + 5
LATENTS_PER_CLIP, EXTRA_LATENTS = 5, 2  # … and have 5n + 2 latent frames
AUDIO_LATENTS_PER_SECOND = 40


@dataclass(frozen=True)
class CanvasLimits:
    """What an explicit canvas may be, in pixels, and the rule for the others. The defaults are the published model's."""

    min_edge: int = 256
    short_edge: int = 768
    max_pixels: int = 1344 * 768
    max_aspect: float = 4.0
    default_aspect: tuple[int, int] = (16, 9)


@dataclass(frozen=True)
class FrameLimits:
    """Frames that a request may ask for (before rounding up) and the count served by default."""

    min_frames: int = 96  # 4 s, served as 107
    max_frames: int = 362
    max_seconds: float = 15.0
    default_frames: int = 124


# diffusers checks 5 … 15 s after rounding up: 108 … 345 asked are 124 … 345 served
STRICT_FRAMES = FrameLimits(min_frames=108, max_frames=345)
# models that are not the released one have no published limits: small and short clips for tests and demonstrations
SMALL_CANVAS = CanvasLimits(min_edge=32, short_edge=64)
SMALL_FRAMES = FrameLimits(min_frames=22, max_frames=362, default_frames=22)


def canvas_multiple(config: H3Config) -> int:
    """Pixels that both sides are multiples of: VAE ratio times the transformer's patch, 32 in the release."""
    return config.video_vae.spatial_ratio * config.transformer.patch_size[1]


def resolve_canvas(
    width: float, height: float, limits: CanvasLimits, multiple: int, where: str
) -> tuple[int, int]:
    """(width, height) of the canvas for an aspect ratio or a picture's size.

    Rounding may leave the area slightly above `max_pixels`, as in the reference.
    Raises: RequestError naming `where`: the ratio is outside 1:4 … 4:1, or a side is not positive.
    """
    if width <= 0 or height <= 0 or not 1 / limits.max_aspect <= width / height <= limits.max_aspect:
        raise RequestError(
            "unsupported aspect ratio",
            where=where,
            found=f"{width:g}:{height:g}",
            expected=f"1:{limits.max_aspect:g} … {limits.max_aspect:g}:1",
            hint="give width and height to choose the canvas yourself" if where.endswith("_frame") else None,
        )
    ratio = width / height
    if ratio >= 1.0:
        new_width, new_height = limits.short_edge * ratio, float(limits.short_edge)
    else:
        new_width, new_height = float(limits.short_edge), limits.short_edge / ratio
    area = new_width * new_height
    if area > limits.max_pixels:
        scale = (limits.max_pixels / area) ** 0.5
        new_width, new_height = new_width * scale, new_height * scale
    return _round_side(new_width, multiple), _round_side(new_height, multiple)


def check_canvas(
    width: int, height: int, limits: CanvasLimits, multiple: int, where: str = "width, height"
) -> None:
    """Refuse an explicit canvas that the model cannot take; the message lists every problem and a legal pair.

    The area limit counts sides before rounding (half a multiple less), so every canvas that `resolve_canvas` returns
    can also be asked for. Raises: RequestError.
    """
    problems = []
    if width % multiple or height % multiple:
        problems.append(f"both must be multiples of {multiple}")
    if min(width, height) < limits.min_edge:
        problems.append(f"the smaller must be at least {limits.min_edge} pixels")
    elif max(width, height) > limits.max_aspect * min(width, height):
        problems.append(f"the aspect ratio must be at most {limits.max_aspect:g}:1")
    if min(width, height) > 0 and (width - multiple / 2) * (height - multiple / 2) > limits.max_pixels:
        problems.append(f"the size is past the budget of {limits.max_pixels} pixels (up to rounding)")
    if problems:
        near = nearest_canvas(width, height, limits, multiple)
        raise RequestError(
            "the canvas cannot be used: " + ", ".join(problems),
            where=where,
            found=f"width {width}, height {height}",
            expected=f"multiples of {multiple} from {limits.min_edge}, at most {limits.max_pixels} pixels",
            hint=f"the nearest legal size is {near[0]}x{near[1]}",
        )


def nearest_canvas(width: int, height: int, limits: CanvasLimits, multiple: int) -> tuple[int, int]:
    """A legal (width, height) near any pair of integers."""
    lowest = math.ceil(limits.min_edge / multiple) * multiple
    short = max(lowest, _round_side(min(width, height), multiple))
    long = min(max(short, width, height), int(limits.max_aspect * short))
    if short * long > limits.max_pixels:
        scale = math.sqrt(limits.max_pixels / (short * long))
        short = max(lowest, int(short * scale) // multiple * multiple)
        long = int(min(long * scale + multiple / 2, limits.max_aspect * short, limits.max_pixels / short))
        long = max(short, long // multiple * multiple)
    else:
        long = min(_round_side(long, multiple), int(limits.max_aspect * short) // multiple * multiple)
    return (long, short) if width >= height else (short, long)


def aligned_frames(frames: int) -> int:
    """The next 17n + 5 from `frames` (at least 1) on."""
    return frames + (EXTRA_FRAMES - frames) % FRAMES_PER_CLIP


def check_frames(frames: int, limits: FrameLimits, where: str = "num_frames") -> int:
    """Frames served for `frames` asked. Raises: RequestError naming the limits, the rule and the nearest counts."""
    if limits.min_frames <= frames <= limits.max_frames:
        return aligned_frames(frames)
    lowest, highest = aligned_frames(limits.min_frames), aligned_frames(limits.max_frames)
    short = frames < limits.min_frames
    raise RequestError(
        f"the clip is too {'short' if short else 'long'}",
        where=where,
        found=f"{frames} frames" if abs(frames) < 2**64 else f"an integer of {frames.bit_length()} bits",
        expected=(
            f"num_frames {limits.min_frames} … {limits.max_frames} ({limits.min_frames / FPS:g} … "
            f"{limits.max_seconds:g} s at {FPS} fps), served as the next 17n+5"
        ),
        hint=(
            f"the minimum is {lowest} frames, then {lowest + FRAMES_PER_CLIP}"
            if short
            else f"the maximum is {highest} frames"
        ),
    )


def frames_of_seconds(seconds: float, limits: FrameLimits, where: str = "seconds") -> int:
    """Frames served for a duration: round(24 * seconds), rounded up to 17n + 5. Raises: RequestError."""
    shortest = limits.min_frames / FPS
    if not shortest <= seconds <= limits.max_seconds:
        raise RequestError(
            "the duration is out of range",
            where=where,
            found=f"{seconds:g} s",
            expected=f"{shortest:g} … {limits.max_seconds:g} s",
        )
    return check_frames(round(FPS * seconds), limits, where)


def latent_frames(frames: int) -> int:
    """Latent frames of 17n + 5 frames: 5n + 2."""
    return (frames - EXTRA_FRAMES) // FRAMES_PER_CLIP * LATENTS_PER_CLIP + EXTRA_LATENTS


def audio_latents(frames: int) -> int:
    """Audio latents per channel: 40 a second, rounded half to even."""
    return round(frames / FPS * AUDIO_LATENTS_PER_SECOND)


def audio_samples(frames: int, sample_rate: int) -> int:
    """Samples per channel of the finished file, nearest to the length of the picture."""
    return round(frames * sample_rate / FPS)


def latent_shape(config: H3Config, width: int, height: int, frames: int) -> tuple[int, int, int]:
    """(latent frames, latent height, latent width) of a canvas and an aligned frame count."""
    ratio = config.video_vae.spatial_ratio
    return latent_frames(frames), height // ratio, width // ratio


def _round_side(side: float, multiple: int) -> int:
    return max(multiple, round(side / multiple) * multiple)
