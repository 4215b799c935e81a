"""The pixel convention of the video VAE: ImageNet-normalised RGB over a [0, 1] base range."""

from __future__ import annotations

import torch
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def normalize(pixels: Tensor) -> Tensor:
    """[F, H, W, 3] uint8 → [3, F, H, W] float32, what the encoder reads."""
    mean, std = _channel_constants(pixels.device)
    rgb = pixels.permute(3, 0, 1, 2).to(torch.float32).div(255.0)
    return (rgb - mean) / std


def denormalize(decoded: Tensor) -> Tensor:
    """[3, F, H, W] float32, what the decoder writes → [F, 3, H, W] float32 in [0, 1], contiguous."""
    mean, std = _channel_constants(decoded.device)
    return (decoded * std + mean).clamp_(0, 1).transpose(0, 1).contiguous()


def to_uint8(frames: Tensor) -> Tensor:
    """[F, 3, H, W] in [0, 1] → [F, H, W, 3] uint8, rounded half to even."""
    return frames.permute(0, 2, 3, 1).mul(255).round_().to(torch.uint8).contiguous()


def _channel_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as [3, 1, 1, 1] float32."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1, 1) for values in (MEAN, STD))
    return mean, std
