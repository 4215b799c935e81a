"""RMSNorm followed by scale and shift that each row picks from a table (AdaLN): one read and one write of the row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.rounding import modulate, scale_by_norm


@triton.jit
def norm_modulate(
    x_ptr,
    weight_ptr,
    shift_ptr,
    scale_ptr,
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
    """x [S, D] bf16, shift and scale [R, D] bf16, index [S] int32 -> out [S, D] bf16.

    Neighbouring rows share table rows, so those and the weight stay in L1; `.cg` keeps the stream of rows out of it.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    entry = tl.load(index_ptr + row).to(tl.int64) * table_stride
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    # after the sum: 42 registers a thread instead of 75, so six rows are in flight on an SM, not three
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + entry + cols, mask=mask, other=0.0)
    shift = tl.load(shift_ptr + entry + cols, mask=mask, other=0.0)
    y = scale_by_norm(x, rstd, weight, False, NATIVE)
    tl.store(out_ptr + row * out_stride + cols, modulate(y, shift, scale, NATIVE), mask=mask)
