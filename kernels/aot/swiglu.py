"""SwiGLU on the fused feed-forward buffer: up * silu(gate), with silu rounded to bf16 before the product."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.rounding import mul_bf16, to_bf16


@triton.jit
def silu(x, NATIVE: tl.constexpr):
    """x / (1 + exp(-x)) in fp32, to about 4 ulp.

    The plain form spends half of its instructions on subnormals and infinities of the division; here values below
    -87.3 become zero instead of one of magnitude 1e-36.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.rn.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.rn.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.rn.f32 $0, $1, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def swiglu(
    up_ptr,
    gate_ptr,
    out_ptr,
    in_stride,
    out_stride,
    width,
    tiles,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """up, gate [S, F] bf16 (halves of one buffer, in either order) -> out [S, F] bf16, may be either half."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    cols = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_ptr + row * in_stride + cols, mask=mask, other=0.0, cache_modifier=".cg").to(
        tl.float32
    )
    up = tl.load(up_ptr + row * in_stride + cols, mask=mask, other=0.0, cache_modifier=".cg")
    activated = to_bf16(silu(gate, NATIVE), NATIVE)
    tl.store(out_ptr + row * out_stride + cols, mul_bf16(up, activated, NATIVE), mask=mask)
