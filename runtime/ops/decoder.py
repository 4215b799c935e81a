"""Operators of the video decoder's blocks: the float32 chains around its float16 products. Eager reference.

Symbols: B tiles, N tokens, D width, H heads, K head dim, R rotated channels of a head, I feed-forward width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class DecoderOperators:
    """Replaceable by fused ones with the same roundings."""

    def rotated_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """RMSNorm without weight and rotation of queries and keys, float32 throughout, one rounding at the end.

        Args:
            qkv: [B, N, 3 H K], all q, all k, all v; its values may be overwritten.
            cos, sin: [N, 1, R] float32; channel j < R/2 pairs with j + R/2, channels from R on pass through.
        Returns: q, k, v, each [B, N, H, K] of `qkv`'s dtype.
        """
        batch, tokens, _ = qkv.shape
        q, k, v = qkv.view(batch, tokens, 3, num_heads, -1).unbind(2)
        q, k = (
            rotate(F.rms_norm(x.float(), x.shape[-1:], None, eps), cos, sin).to(qkv.dtype) for x in (q, k)
        )
        return q, k, v

    def residual_norm(
        self, hidden: Tensor, update: Tensor, scale: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """hidden + update * scale, and its RMSNorm times `weight`.

        Args:
            hidden: [B, N, D] float32; may be overwritten. update: [B, N, D]. scale, weight: [D] float32.
        Returns: the sum, float32; the norm of the unrounded sum in `update`'s dtype.
        """
        hidden = hidden + update * scale
        return hidden, F.rms_norm(hidden, hidden.shape[-1:], weight, eps).to(update.dtype)

    def swiglu(self, inner: Tensor) -> Tensor:
        """[B, N, 2 I], up then gate → up * silu(gate) [B, N, I]; silu and the product round to the input's dtype."""
        up, gate = inner.chunk(2, dim=-1)
        return up * F.silu(gate)


EAGER = DecoderOperators()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading channels of every head of [B, N, H, K] float32."""
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat([rotated * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)
