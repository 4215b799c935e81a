"""bf16 arithmetic with the roundings of torch's eager operators: every product and sum rounds once, to nearest even.

`NATIVE` picks the instructions of sm_90 and later (packed pairs, explicit `.rn`, so nothing is contracted to a
fused multiply-add). Without it the same values are computed in fp32 and rounded by integer arithmetic, for
Triton's interpreter, whose own conversion to bf16 truncates. The two agree bit for bit on finite values: fp32 has
24 significant bits, at least 2 * 8 + 2, so rounding a product or sum of two bf16 values to fp32 first is harmless.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_bf16(x, NATIVE: tl.constexpr):
    """fp32 -> bf16, nearest even."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def mul_bf16(a, b, NATIVE: tl.constexpr):
    """bf16 x bf16 -> bf16, shapes broadcast."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return to_bf16(a.to(tl.float32) * b.to(tl.float32), NATIVE)


@triton.jit
def add_bf16(a, b, NATIVE: tl.constexpr):
    """bf16 + bf16 -> bf16, shapes broadcast."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return to_bf16(a.to(tl.float32) + b.to(tl.float32), NATIVE)


@triton.jit
def sub_bf16(a, b, NATIVE: tl.constexpr):
    """bf16 - bf16 -> bf16, shapes broadcast."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return to_bf16(a.to(tl.float32) - b.to(tl.float32), NATIVE)


@triton.jit
def one_plus_bf16(a, NATIVE: tl.constexpr):
    """1 + bf16 -> bf16."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x3f803f80; add.rn.bf16x2 $0, $1, one; }",
            "=r,r",
            [a],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return to_bf16(a.to(tl.float32) + 1.0, NATIVE)


@triton.jit
def modulate(y, shift, scale, NATIVE: tl.constexpr):
    """y * (1 + scale) + shift, bf16 after each of the three operations."""
    return add_bf16(mul_bf16(y, one_plus_bf16(scale, NATIVE), NATIVE), shift, NATIVE)


@triton.jit
def scale_by_norm(x, rstd, weight, ROUND_FIRST: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 x, fp32 rstd, bf16 weight -> bf16: one rounding at the end, or (ROUND_FIRST) one before the weight too."""
    if ROUND_FIRST:
        return mul_bf16(to_bf16(x * rstd, NATIVE), weight, NATIVE)
    else:
        return to_bf16(x * rstd * weight.to(tl.float32), NATIVE)
