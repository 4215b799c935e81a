"""Gated residual and the modulated norm that follows it, in one pass; both results are stored."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.rounding import add_bf16, modulate, mul_bf16, scale_by_norm


@triton.jit
def gate_norm_modulate(
    residual_ptr,
    update_ptr,
    gate_ptr,
    weight_ptr,
    shift_ptr,
    scale_ptr,
    index_ptr,
    sum_ptr,
    out_ptr,
    residual_stride,
    update_stride,
    gate_stride,
    table_stride,
    sum_stride,
    out_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """residual, update [S, D] bf16; gate, shift, scale [R, D] bf16; index [S] int32 -> sum, out [S, D] bf16.

    The norm reads the rounded sum, as a second pass over memory would. `sum` may be `residual`. Gate and
    shift/scale come from different tables where the next norm belongs to the next block.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    kind = tl.load(index_ptr + row).to(tl.int64)
    update = tl.load(update_ptr + row * update_stride + cols, mask=mask, other=0.0, cache_modifier=".cg")
    residual = tl.load(
        residual_ptr + row * residual_stride + cols, mask=mask, other=0.0, cache_modifier=".cg"
    )
    gate = tl.load(gate_ptr + kind * gate_stride + cols, mask=mask, other=0.0)
    total = add_bf16(residual, mul_bf16(gate, update, NATIVE), NATIVE)
    tl.store(sum_ptr + row * sum_stride + cols, total, mask=mask)
    x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    # after the sum: 42 registers a thread instead of 75, so six rows are in flight on an SM, not three
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + kind * table_stride + cols, mask=mask, other=0.0)
    shift = tl.load(shift_ptr + kind * table_stride + cols, mask=mask, other=0.0)
    y = scale_by_norm(x, rstd, weight, False, NATIVE)
    tl.store(out_ptr + row * out_stride + cols, modulate(y, shift, scale, NATIVE), mask=mask)
