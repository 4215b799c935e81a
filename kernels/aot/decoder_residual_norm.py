"""Video decoder: residual + update * scale in float32, and the RMSNorm of that unrounded sum in fp16."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoder_residual_norm(
    residual_ptr,
    update_ptr,
    scale_ptr,
    weight_ptr,
    out_ptr,
    residual_stride,
    update_stride,
    out_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """residual [S, D] fp32, replaced by the sum; update [S, D] fp16; scale, weight [D] fp32 -> out [S, D] fp16."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    place = residual_ptr + row * residual_stride + cols
    residual = tl.load(place, mask=mask, other=0.0)
    update = tl.load(update_ptr + row * update_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + cols, mask=mask, other=0.0)
    total = residual + update * scale
    tl.store(place, total, mask=mask)
    rstd = tl.rsqrt(tl.sum(total * total, axis=0) / D + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * out_stride + cols, (total * rstd * weight).to(tl.float16), mask=mask)
