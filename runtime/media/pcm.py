"""Decoded sound → exactly as long as the picture, finite, within [-1, 1].

The audio decoder makes 800 samples per latent and 40 latents a second, rounded; that misses the picture's length by at
most half a latent (267 samples for five of fourteen lengths). The picture decides: up to half a latent is cut or
filled with silence, anything more is a fault of the caller and refused. numpy is imported on use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loader.errors import InternalError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STAGE = "audio decoder"
MAX_SHIFTS_PER_SECOND = 80  # 1/80 s: half of a 40 Hz latent; 400 samples at 32 kHz


@dataclass(frozen=True)
class FittedPcm:
    """`samples` float32 [2, round(frames * rate / fps)]; `shift` samples were added (positive) or cut (negative)."""

    samples: NDArray[np.float32]
    shift: int
    clipped: int
    peak: float


def fit_pcm(audio: NDArray[Any], sample_rate: int, frames: int, fps: int) -> FittedPcm:
    """Check decoded sound and fit it to `frames` pictures.

    Args:
        audio: float [2, samples]; values beyond [-1, 1] are clamped and counted.

    Raises: InternalError naming the stage: not stereo, not float, empty, NaN or infinite (with the count), or off
        by more than half an audio latent.
    """
    import numpy as np

    if audio.ndim != 2 or audio.shape[0] != 2 or not np.issubdtype(audio.dtype, np.floating):
        raise InternalError(
            "the sound is not stereo float",
            where=STAGE,
            found=f"{audio.dtype} {list(audio.shape)}",
            expected="float [2, samples]",
        )
    if not audio.shape[1]:
        raise InternalError(
            "the sound is empty", where=STAGE, found="0 samples", expected="audio as long as the picture"
        )
    bad = audio.size - int(np.isfinite(audio).sum())
    if bad:
        raise InternalError(
            "the sound is not finite", where=STAGE, found=f"{bad} NaN or infinite of {audio.size} samples"
        )
    wanted, most = round(frames * sample_rate / fps), sample_rate // MAX_SHIFTS_PER_SECOND
    shift = wanted - audio.shape[1]
    if abs(shift) > most:
        raise InternalError(
            f"the audio is too {'short' if shift > 0 else 'long'} for the picture: the length differs by {abs(shift)} samples",
            where=STAGE,
            found=f"{audio.shape[1]} samples for {frames} frames",
            expected=f"{wanted} ± {most}",
        )
    samples = np.zeros((2, wanted), dtype=np.float32)
    kept = min(wanted, audio.shape[1])
    np.clip(audio[:, :kept], -1.0, 1.0, out=samples[:, :kept], casting="same_kind")
    peak = float(np.abs(audio).max())
    return FittedPcm(samples, shift, int((np.abs(audio) > 1.0).sum()), peak)


def resample_linear(samples: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """[2, n] → [2, count] over the same time by linear interpolation.

    Good enough for the toy rates of test models, whose sound is noise; the released model's rate never comes here.
    """
    import numpy as np

    places = np.arange(count) * (samples.shape[1] / count)
    known = np.arange(samples.shape[1])
    return np.stack([np.interp(places, known, channel) for channel in samples]).astype(np.float32)
