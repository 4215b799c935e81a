"""Per-head RMSNorm of q and k and rotary embedding of the first 2 * HALF channels, over the fused q | k | v rows.

A head is read as two tiles of K / 2 lanes: lanes below HALF hold the partners of a rotation (channel j and
j + HALF), the others the channels that pass through. So every lane works, loads stay 16 bytes wide, and no value
moves between threads.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.aot.rounding import add_bf16, mul_bf16, scale_by_norm, sub_bf16


@triton.jit
def qk_norm_rope(
    in_ptr,
    out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    in_stride,
    out_stride,
    angle_stride,
    q_heads,
    heads,
    tiles,
    eps,
    K: tl.constexpr,
    HALF: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """in [S, >= heads * K] bf16 -> out, same layout, may be `in`. heads = q heads + k heads.

    cos, sin [S, >= HALF] bf16. HALF = 0: no rotation. A program does up to BLOCK heads of one row, all of q or all of k;
    tiles = ceil(q heads / BLOCK) + ceil(k heads / BLOCK).
    """
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    tile = program % tiles
    q_tiles = tl.cdiv(q_heads, BLOCK)
    if tile < q_tiles:
        start = tile * BLOCK
        stop = q_heads
        weight_ptr = q_weight_ptr
    else:
        start = q_heads + (tile - q_tiles) * BLOCK
        stop = heads
        weight_ptr = k_weight_ptr
    head = start + tl.arange(0, BLOCK)
    lane = tl.arange(0, K // 2)
    if HALF == 0:
        first = lane
        second = lane + K // 2
    else:
        first = tl.where(lane < HALF, lane, lane + HALF)
        second = tl.where(lane < HALF, lane + HALF, lane + K // 2)
    valid = (head < stop)[:, None]
    source = in_ptr + row * in_stride + head[:, None] * K
    a = tl.load(source + first[None, :], mask=valid, other=0.0, cache_modifier=".cg").to(tl.float32)
    b = tl.load(source + second[None, :], mask=valid, other=0.0, cache_modifier=".cg").to(tl.float32)
    weight_a = tl.load(weight_ptr + first)[None, :]
    weight_b = tl.load(weight_ptr + second)[None, :]
    rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / K + eps)[:, None]
    a = scale_by_norm(a, rstd, weight_a, ROUND_FIRST, NATIVE)
    b = scale_by_norm(b, rstd, weight_b, ROUND_FIRST, NATIVE)
    if HALF > 0:
        # Lanes that pass through multiply by one and add zero: the same value, without a select per element.
        cos = tl.load(cos_ptr + row * angle_stride + lane, mask=lane < HALF, other=1.0)[None, :]
        sin = tl.load(sin_ptr + row * angle_stride + lane, mask=lane < HALF, other=0.0)[None, :]
        rotated = sub_bf16(mul_bf16(a, cos, NATIVE), mul_bf16(b, sin, NATIVE), NATIVE)
        b = add_bf16(mul_bf16(b, cos, NATIVE), mul_bf16(a, sin, NATIVE), NATIVE)
        a = rotated
    target = out_ptr + row * out_stride + head[:, None] * K
    tl.store(target + first[None, :], a, mask=valid)
    tl.store(target + second[None, :], b, mask=valid)
