"""The pixel convention of the video VAE: ImageNet-normalised RGB over a [0, 1] base range."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_KR, _KB = 0.2126, 0.0722  # BT.709: share of red and blue in luma


def normalize(pixels: Tensor) -> Tensor:
    """[F, H, W, 3] uint8 → [3, F, H, W] float32, what the encoder reads."""
    mean, std = _channel_constants(pixels.device)
    rgb = pixels.permute(3, 0, 1, 2).to(torch.float32).div(255.0)
    return (rgb - mean) / std


def denormalize(decoded: Tensor) -> Tensor:
    """[3, F, H, W] float32, what the decoder writes → [F, 3, H, W] float32 in [0, 1], contiguous.

    Constants are scalars, not tensors: those would have to be copied to the device, and the host would wait for it.
    """
    channels = zip(decoded, STD, MEAN, strict=True)
    return torch.stack([channel * std + mean for channel, std, mean in channels], dim=1).clamp_(0, 1)


def to_uint8(frames: Tensor) -> Tensor:
    """[F, 3, H, W] in [0, 1] → [F, H, W, 3] uint8, rounded half to even."""
    return frames.permute(0, 2, 3, 1).mul(255).round_().to(torch.uint8).contiguous()


def to_yuv420(frames: Tensor) -> Tensor:
    """[F, 3, H, W] in [0, 1], even sides → [F, 3/2 H W] uint8, what H.264 stores: Y [H, W], U and V [H/2, W/2].

    BT.709, limited range, one rounding from the decoder's values. Chroma samples lie on the left pixel of each pair
    and between the two rows, as H.264 has it unless told otherwise: weights 1, 2, 1 across, 1, 1 down.
    """
    red, green, blue = frames.unbind(1)  # each [F, H, W]
    luma = red * _KR + green * (1 - _KR - _KB) + blue * _KB
    parts = [(luma * 219 + 16).flatten(1)]
    for channel, weight in ((blue, _KB), (red, _KR)):
        difference = (channel - luma) / (2 * (1 - weight))  # -0.5 … 0.5
        difference = (difference[:, ::2] + difference[:, 1::2]) / 2
        before = F.pad(difference, (1, 0), mode="replicate")[..., :-1:2]
        difference = (before + difference[..., 1::2]) / 4 + difference[..., ::2] / 2
        parts.append((difference * 224 + 128).flatten(1))
    return torch.cat(parts, dim=1).round_().to(torch.uint8)


def _channel_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as [3, 1, 1, 1] float32."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1, 1) for values in (MEAN, STD))
    return mean, std
