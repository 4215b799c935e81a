"""Video decoder: up * silu(gate) in fp16, with silu rounded before the product."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.swiglu import silu


@triton.jit
def decoder_swiglu(
    in_ptr,
    out_ptr,
    in_stride,
    out_stride,
    width,
    tiles,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """in [S, 2 F] fp16, up then gate -> out [S, F] fp16. The product of two fp16 values is exact in fp32."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    cols = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    up = tl.load(in_ptr + row * in_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(in_ptr + row * in_stride + width + cols, mask=mask, other=0.0).to(tl.float32)
    activated = silu(gate, NATIVE).to(tl.float16).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, (up * activated).to(tl.float16), mask=mask)
