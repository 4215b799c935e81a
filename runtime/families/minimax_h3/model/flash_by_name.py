"""torch's flash attention asked for by name, for warming up beside a thread that chooses backends.

Choosing one holds a lock of the process for the whole call (`kernels.attention.backends`), and the first call of the denoiser's
backend builds a plan: on an H200 0.15–0.2 s, for which the conditioner's warm-up would wait.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.attention import DenseAttention
from runtime.compute import Compute
from runtime.ops.attention import Attention

_WIDEST_HEAD = 256


class FlashByName:
    """An `Attention` over the kernel that the flash backend runs; what it does not take goes to `otherwise`."""

    def __init__(self, otherwise: Attention) -> None:
        self._otherwise = otherwise

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        if not is_taken(q):
            return self._otherwise(q, k, v, causal=causal, scale=scale)
        return flash_attention(q, k, v, causal=causal, scale=scale)


def is_taken(q: Tensor) -> bool:
    """Half precision, heads of up to 256 channels in eights, on sm_80 or newer: as torch's own choice has it."""
    K = q.shape[-1]
    is_known = q.dtype in (torch.bfloat16, torch.float16) and K % 8 == 0 and K <= _WIDEST_HEAD
    return is_known and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor:
    """See `runtime.ops.attention.Attention`."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))  # each [1, H or G, S, K]
    out: Tensor = forward(*heads, 0.0, causal, False, scale=scale)[0]
    return out[0].transpose(0, 1)


def without_choosing(compute: Compute) -> Compute:
    """The same, but a short attention that would choose the flash backend asks for it by name."""
    short = compute.short_attention
    if isinstance(short, DenseAttention) and short.choice.backend == "flash":
        return dataclasses.replace(compute, short_attention=FlashByName(short))
    return compute
