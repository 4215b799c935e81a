"""Eager torch form of every operator: the CPU path, the fallback on a GPU without kernels, and the oracle of tests.

Values are rounded to the dtype of the tensors wherever the published models' eager code rounds them, so bf16 results
equal theirs bit for bit; in float32 the same code rounds nowhere beyond float32. Functions have the signatures of
`kernels.ops.Operators`, trust their arguments and return new memory, except where they take `out`.

Symbols: S rows, N picked rows, R table rows, D hidden, H query heads, G key heads, K head dim, F feed-forward width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, round_before_weight: bool = False) -> Tensor:
    """RMSNorm over the last axis. [..., D] -> [..., D].

    Rounding: once, after the weight; or (`round_before_weight`) of the normalised value and of its product with the
    weight. The two differ in a quarter of all bf16 elements.
    Source: torch.nn.RMSNorm in the MiniMax-H3 DiT; transformers 5.24, qwen3_vl (`round_before_weight`).
    """
    if not round_before_weight:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scaled = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return weight * scaled.to(x.dtype)


def norm_modulate(
    x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, index: Tensor, eps: float
) -> Tensor:
    """`rms_norm(x) * (1 + scale[index]) + shift[index]`: [S, D], four roundings.

    Source: diffusers 0.42.1, transformer_minimax_h3.
    """
    return rms_norm(x, weight, eps) * (1 + scale[index]) + shift[index]


def gate_residual(residual: Tensor, update: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """`residual + gate[index] * update`: [S, D], two roundings."""
    return residual + gate[index] * update


def gate_norm_modulate(
    residual: Tensor,
    update: Tensor,
    gate: Tensor,
    weight: Tensor,
    shift: Tensor,
    scale: Tensor,
    index: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`gate_residual`, then `norm_modulate` of its rounded result: both, each [S, D]."""
    total = gate_residual(residual, update, gate, index)
    return total, norm_modulate(total, weight, shift, scale, index, eps)


def final_norm_modulate(
    x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor, rows: Tensor, index: Tensor, eps: float
) -> Tensor:
    """`norm_modulate` of the picked rows, cast for the float32 heads: [S, D] -> [N, D] float32."""
    return norm_modulate(x[rows], weight, shift, scale, index, eps).float()


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    *,
    round_before_weight: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [S, (H + 2 G) K], norm q and k per head, rotate: q [S, H, K], k [S, G, K], v [S, G, K] (a view).

    cos, sin: [S, r], r pairs rotated: channel j with j + r; None rotates nothing. With `out`
    [S, (H + G) K], q and k are written there and are views of it.
    """
    head_dim = q_weight.shape[0]
    normed = num_heads + num_kv_heads
    heads = qkv.view(len(qkv), normed + num_kv_heads, head_dim)  # [S, H + 2 G, K]
    q = rms_norm(heads[:, :num_heads], q_weight, eps, round_before_weight=round_before_weight)
    k = rms_norm(heads[:, num_heads:normed], k_weight, eps, round_before_weight=round_before_weight)
    if cos is not None and sin is not None:
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    if out is not None:
        target = out.view(len(out), normed, head_dim)
        target.copy_(torch.cat((q, k), dim=1))
        q, k = target[:, :num_heads], target[:, num_heads:]
    return q, k, heads[:, normed:]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[S, H, K]; each product and the sum round."""
    cos, sin = cos[:, None], sin[:, None]  # [S, 1, r]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def swiglu(buffer: Tensor, *, gate_first: bool = False, in_place: bool = False) -> Tensor:
    """`up * silu(gate)` over [S, 2 F] holding [up; gate] (`gate_first`: [gate; up]): [S, F], two roundings.

    `in_place` is a permission that this form does not use.
    """
    first, second = buffer.chunk(2, dim=-1)  # each [S, F]
    up, gate = (second, first) if gate_first else (first, second)
    return up * functional.silu(gate)
