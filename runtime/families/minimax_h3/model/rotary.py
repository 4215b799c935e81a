"""Rotary tables of the packed DiT sequence: three axes (t, h, w) share one list of frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.families.minimax_h3.config import TransformerConfig
from runtime.ops.rotary import RotaryTable, inverse_frequencies, rotary_table


def packed_rotary_table(position_ids: Tensor, config: TransformerConfig, dtype: torch.dtype) -> RotaryTable:
    """Angles `[t * f, h * f, w * f]` of each row, f = `rope_freq_dim` frequencies.

    Args:
        position_ids: [S, 3] fp64; rounded to fp32 before the product, as published.
    Returns: cos and sin, [S, 3 * rope_freq_dim] each, computed in fp32 and rounded to `dtype`.
    Source: diffusers 0.42.1, transformer_minimax_h3.
    """
    frequencies = inverse_frequencies(config.rope_freq_dim, config.rope_theta).to(position_ids.device)
    angles = position_ids.float()[:, :, None] * frequencies  # [S, 3, rope_freq_dim]
    return rotary_table(angles.flatten(1)).to(dtype)
