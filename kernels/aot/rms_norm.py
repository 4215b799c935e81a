"""RMSNorm of whole rows, one program a row: the row stays in registers between the sum and the scaling."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.rounding import scale_by_norm


@triton.jit
def rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    out_stride,
    eps,
    D: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x [S, D] bf16 -> out [S, D] bf16; BLOCK = next power of two of D."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    weight = tl.load(
        weight_ptr + cols, mask=mask, other=0.0
    )  # after the sum: fewer registers, more rows in flight
    y = scale_by_norm(x, rstd, weight, ROUND_FIRST, NATIVE)
    tl.store(out_ptr + row * out_stride + cols, y, mask=mask)
