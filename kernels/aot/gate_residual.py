"""Gated residual: residual + gate[index] * update, the gate picked per row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.rounding import add_bf16, mul_bf16


@triton.jit
def gate_residual(
    residual_ptr,
    update_ptr,
    gate_ptr,
    index_ptr,
    out_ptr,
    residual_stride,
    update_stride,
    gate_stride,
    out_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """residual, update [S, D] bf16, gate [R, D] bf16, index [S] int32 -> out [S, D] bf16; out may be residual."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    entry = tl.load(index_ptr + row).to(tl.int64) * gate_stride
    update = tl.load(update_ptr + row * update_stride + cols, mask=mask, other=0.0, cache_modifier=".cg")
    residual = tl.load(
        residual_ptr + row * residual_stride + cols, mask=mask, other=0.0, cache_modifier=".cg"
    )
    gate = tl.load(gate_ptr + entry + cols, mask=mask, other=0.0)
    out = add_bf16(residual, mul_bf16(gate, update, NATIVE), NATIVE)
    tl.store(out_ptr + row * out_stride + cols, out, mask=mask)
