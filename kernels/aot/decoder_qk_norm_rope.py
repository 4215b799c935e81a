"""Video decoder: RMSNorm without weight and rotary embedding of q and k, float32 throughout, one rounding to fp16.

A head is read as two tiles of K / 2 lanes, as in `qk_norm_rope`: lanes below HALF hold the partners of a rotation, the
others the channels that pass through.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoder_qk_norm_rope(
    in_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    in_stride,
    out_stride,
    angle_stride,
    tokens,
    heads,
    tiles,
    eps,
    K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """in [S, >= heads * K] fp16 -> out, same layout, may be `in`. heads = q heads + k heads.

    cos, sin [tokens, >= HALF] fp32; row s uses row s % tokens. A program does up to BLOCK heads of one row.
    """
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    angle = (program // tiles) % tokens
    head = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, K // 2)
    first = tl.where(lane < HALF, lane, lane + HALF)
    second = tl.where(lane < HALF, lane + HALF, lane + K // 2)
    valid = (head < heads)[:, None]
    source = in_ptr + row * in_stride + head[:, None] * K
    a = tl.load(source + first[None, :], mask=valid, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=valid, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / K + eps)[:, None]
    a = a * rstd
    b = b * rstd
    # Lanes that pass through multiply by one and add zero.
    cos = tl.load(cos_ptr + angle * angle_stride + lane, mask=lane < HALF, other=1.0)[None, :]
    sin = tl.load(sin_ptr + angle * angle_stride + lane, mask=lane < HALF, other=0.0)[None, :]
    rotated = a * cos - b * sin
    b = b * cos + a * sin
    target = out_ptr + row * out_stride + head[:, None] * K
    tl.store(target + first[None, :], rotated.to(tl.float16), mask=valid)
    tl.store(target + second[None, :], b.to(tl.float16), mask=valid)
