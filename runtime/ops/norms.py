"""Normalisations. The two RMSNorms differ in where they round and must not share a kernel without a flag."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, weight inside: fp32 throughout, one rounding to the dtype of `x`.

    Args:
        x: [..., D].
        weight: [D], dtype of `x`.
    Returns: [..., D], new memory.
    Source: `torch.nn.RMSNorm`; every norm of the MiniMax-H3 DiT and refiner.
    """
    return functional.rms_norm(x, weight.shape, weight, eps)


def rms_norm_rounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis that rounds before the weight: round(norm(x)), then round(weight * that).

    Args:
        x: [..., D].
        weight: [D], dtype of `x`.
    Returns: [..., D], new memory.
    Source: transformers 5.24, qwen3_vl text layers.
    """
    wide = x.float()
    scaled = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return weight * scaled.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis: fp32 inside, one rounding. [..., D] -> [..., D], new memory."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
