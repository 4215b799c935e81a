"""Initial noise of a request, drawn on the CPU so that it is the same on every device and rank count.

Two published draw orders give different media for the same seed:
- `single_stream` (diffusers 0.42.1): one generator; keyframe noise in packed order, then video, then audio;
- `reseed` (sglang 0.5.23): every stream starts a generator of its own with the same seed; a keyframe draws as many
  latent frames as the target plus the number of keyframes and keeps the first.

Target video noise is drawn as a latent, audio noise directly in row order. t2va gets the same video noise from both.
The noise is not scaled by the first sigma. torch is imported on use.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loader.errors import InternalError
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.packing import AUDIO_CHANNELS
from runtime.schedules import round_float32

if TYPE_CHECKING:
    from torch import Generator, Tensor

NoiseMode = Literal["single_stream", "reseed"]
NOISE_MODES: tuple[NoiseMode, ...] = ("single_stream", "reseed")


@dataclass(frozen=True)
class Noise:
    """Standard normal float32 CPU tensors.

    Attributes:
        keyframes: one [1, C, 1, h, w] per keyframe, packed order.
        video: [1, C, T, h, w].
        audio: [2 * audio latents, audio channels] rows, left channel first.
    """

    keyframes: tuple[Tensor, ...]
    video: Tensor
    audio: Tensor

    def sha256(self) -> str:
        """Digest of all values in draw order, little-endian float32: part of the result's metadata."""
        digest = hashlib.sha256()
        for tensor in (*self.keyframes, self.video, self.audio):
            digest.update(tensor.numpy().astype("<f4", copy=False).tobytes())
        return digest.hexdigest()


def draw_noise(
    config: H3Config,
    seed: int,
    latent_shape: tuple[int, int, int],
    num_audio_latents: int,
    num_keyframes: int = 0,
    mode: NoiseMode = "single_stream",
) -> Noise:
    """Noise of one request.

    Args:
        seed: 0 … 2^63 - 1.
        latent_shape: (latent frames, latent height, latent width) of the target.
        num_audio_latents: per channel.
        mode: draw order, see above.

    Raises: InternalError: unknown mode (requests are checked before).
    """
    import torch

    frames, height, width = latent_shape
    channels = config.transformer.in_channels
    video_shape = (1, channels, frames, height, width)
    audio_shape = (AUDIO_CHANNELS * num_audio_latents, config.transformer.audio_in_channels)
    if mode == "single_stream":
        stream = torch.Generator().manual_seed(seed)
        keyframes = [_normal((1, channels, 1, height, width), stream) for _ in range(num_keyframes)]
        return Noise(tuple(keyframes), _normal(video_shape, stream), _normal(audio_shape, stream))
    if mode == "reseed":
        taller = (1, channels, frames + num_keyframes, height, width)
        keyframes = [
            _normal(taller, torch.Generator().manual_seed(seed))[:, :, :1].contiguous()
            for _ in range(num_keyframes)
        ]
        video = _normal(video_shape, torch.Generator().manual_seed(seed))
        return Noise(tuple(keyframes), video, _normal(audio_shape, torch.Generator().manual_seed(seed)))
    raise InternalError(
        "unknown noise mode", where="noise", found=repr(mode), expected=", ".join(NOISE_MODES)
    )


def noised_keyframe(latents: Tensor, noise: Tensor, level: float) -> Tensor:
    """`level * latents + (1 - level) * noise`, all in float32, `level` rounded to float32 first.

    Args: latents, noise: float32 of one shape, [1, C, 1, h, w].
    """
    time = round_float32(level)
    return time * latents + round_float32(1.0 - time) * noise


def _normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    import torch

    return torch.randn(shape, generator=generator, dtype=torch.float32)
