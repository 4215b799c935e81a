"""Rotary position embedding, rotate-half form: channel j of a head is paired with channel j + R/2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """cos, sin: [S, R/2], one angle per pair; R rotated channels of each head, the rest pass through."""

    cos: Tensor
    sin: Tensor

    def to(self, dtype: torch.dtype) -> RotaryTable:
        return RotaryTable(self.cos.to(dtype), self.sin.to(dtype))


def inverse_frequencies(count: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """theta^(-2k / 2count) for k = 0 … count-1: [count] fp32, in the operation order of the published models."""
    dim = 2 * count
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


def rotary_table(angles: Tensor) -> RotaryTable:
    """[S, R/2] fp32 angles -> fp32 table."""
    return RotaryTable(angles.cos(), angles.sin())


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate the first R channels of every head.

    Args:
        x: [S, H, K], K >= R.
        table: in the dtype of `x`.
    Returns: [S, H, K], new contiguous memory.
    Rounding: each product and the sum round to the dtype of `x` (in fp32: none beyond fp32's own).
    """
    cos, sin = table.cos[:, None], table.sin[:, None]  # [S, 1, R/2]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotate_wide(x: Tensor, table: RotaryTable) -> Tensor:
    """`rotate` computed in fp32 with one rounding at the end; `table` is fp32."""
    return rotate(x.float(), table).to(x.dtype)
