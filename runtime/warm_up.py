"""Pay for first use before first use: libraries are initialised on dummy data while weights stream in.

Measured on an H200 (design figures): the first cuDNN attention of a process costs up to 1 s, a new sequence length
0.06 s, the first matrix product and norm 0.09 s. None of it may fall into the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class AttentionShape(NamedTuple):
    """One attention call that the request will make."""

    rows: int
    query_heads: int
    key_heads: int
    head_dim: int
    is_causal: bool


def warm_up(shapes: Sequence[AttentionShape]) -> None:
    """Run every kind of library call once on the current CUDA device, attention at exactly the given shapes."""
    import torch

    from runtime.ops.attention import attention

    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            a = torch.zeros(64, 256, dtype=dtype, device="cuda")
            torch.nn.functional.linear(a, torch.zeros(128, 256, dtype=dtype, device="cuda"))
            torch.nn.functional.silu(a).add_(a).pow(2).mean(-1).rsqrt()
        for shape in shapes:
            q = torch.zeros(
                shape.rows, shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda"
            )
            k = torch.zeros(shape.rows, shape.key_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
            attention(q, k, k, causal=shape.is_causal)
        torch.cuda.synchronize()
