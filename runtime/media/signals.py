"""What decoded brightness and sound say: flashes, clicks, single bright frames, steps at unit seams. numpy on use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNIT_FRAMES = 17  # the VAE decodes 17 new frames at a time
SYNC_SECONDS = 0.010
_QUIET_SECONDS = 0.05
_MIN_SPIKE = 4.0  # grey levels of 255: below that nobody sees a single frame
_SPIKE_RATIO = 5.0


@dataclass(frozen=True)
class Brightness:
    """Per-frame mean luma and what stands out in it. `seam_ratio`: mean step at seams over mean step elsewhere."""

    luma: tuple[float, ...]
    spikes: tuple[int, ...]
    seam_ratio: float | None


def analyse_brightness(luma: NDArray[np.float64]) -> Brightness:
    """Find single frames that leave the course of their neighbours, and compare steps at unit seams with the rest."""
    import numpy as np

    steps = np.abs(np.diff(luma))
    seams = np.arange(1, len(luma)) % UNIT_FRAMES == 0
    usable = seams.any() and (~seams).any() and steps[~seams].mean() > 0
    ratio = float(steps[seams].mean() / steps[~seams].mean()) if usable else None
    return Brightness(tuple(float(value) for value in luma), tuple(find_spikes(luma)), ratio)


def find_spikes(luma: NDArray[np.float64]) -> list[int]:
    """Frames brighter or darker than both neighbours by far more than those differ from each other and usual steps."""
    import numpy as np

    if len(luma) < 3:
        return []
    before, here, after = luma[:-2], luma[1:-1], luma[2:]
    height = np.minimum(np.abs(here - before), np.abs(here - after))
    same_side = (here - before) * (here - after) > 0
    usual = float(np.median(np.abs(np.diff(luma))))
    limit = np.maximum(_MIN_SPIKE, _SPIKE_RATIO * np.maximum(usual, np.abs(after - before)))
    return [int(index) + 1 for index in np.flatnonzero(same_side & (height > limit))]


def find_flashes(luma: NDArray[np.float64]) -> list[int]:
    """Frames at which the picture becomes bright: above the middle of its usual and greatest brightness."""
    import numpy as np

    bright = luma > (np.median(luma) + luma.max()) / 2
    return [int(index) for index in np.flatnonzero(bright & ~np.concatenate([[False], bright[:-1]]))]


def find_clicks(samples: NDArray[np.float32], sample_rate: int) -> list[int]:
    """Samples at which sound sets in after at least 50 ms of quiet. `samples`: [channels, samples]."""
    import numpy as np

    level = np.abs(samples).max(axis=0)
    peak = float(level.max(initial=0.0))
    if peak == 0.0:
        return []
    quiet = round(_QUIET_SECONDS * sample_rate)
    loud = np.flatnonzero(level > 0.25 * peak)
    gaps = np.diff(loud, prepend=-quiet - 1)
    return [int(index) for index in loud[gaps > quiet]]


def sync_problems(flashes: list[int], clicks: list[int], fps: int, sample_rate: int) -> list[str]:
    """Every flash needs a click within 10 ms, and nothing else may click."""
    if not flashes or len(flashes) != len(clicks):
        return [f"{len(flashes)} flashes but {len(clicks)} clicks"]
    late = [click / sample_rate - frame / fps for frame, click in zip(flashes, clicks, strict=True)]
    return [
        f"click {index} is {delay * 1000:+.1f} ms from its flash (allowed ±{SYNC_SECONDS * 1000:g})"
        for index, delay in enumerate(late)
        if abs(delay) > SYNC_SECONDS
    ]
