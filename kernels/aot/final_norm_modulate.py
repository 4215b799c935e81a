"""The norm before the float32 heads: gathers rows, modulates per target kind, stores the bf16 result as float32."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.rounding import modulate, scale_by_norm


@triton.jit
def final_norm_modulate(
    x_ptr,
    weight_ptr,
    shift_ptr,
    scale_ptr,
    rows_ptr,
    index_ptr,
    out_ptr,
    x_stride,
    table_stride,
    out_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x [S, D] bf16, rows [N] int32, index [N] int32 into shift and scale [R, D] bf16 -> out [N, D] fp32."""
    target = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    row = tl.load(rows_ptr + target).to(tl.int64)
    entry = tl.load(index_ptr + target).to(tl.int64) * table_stride
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    # after the sum: 42 registers a thread instead of 75, so six rows are in flight on an SM, not three
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + entry + cols, mask=mask, other=0.0)
    shift = tl.load(shift_ptr + entry + cols, mask=mask, other=0.0)
    y = modulate(scale_by_norm(x, rstd, weight, False, NATIVE), shift, scale, NATIVE)
    tl.store(out_ptr + target * out_stride + cols, y.to(tl.float32), mask=mask)
