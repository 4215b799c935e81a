"""RMSNorm followed by scale and shift that each row picks from a table (AdaLN): one read and one write of the row.

A row is read as one padded tile, or as up to three tiles without padding (PART_A + PART_B + PART_C = D); the catalog says which,
how many rows a program does at once or one after the other (LOOP, always padded), and whether the tables are asked for
before the sum or after it. None of it changes more than the order of the sum.
"""

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
    rows,
    eps,
    D: tl.constexpr,
    PART_A: tl.constexpr,
    PART_B: tl.constexpr,
    PART_C: tl.constexpr,
    ROWS: tl.constexpr,
    LOOP: tl.constexpr,
    EARLY: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """x [S, D] bf16, shift and scale [R, D] bf16, index [S] int32 -> out [S, D] bf16.

    PART_A = 0: one tile of BLOCK columns. Neighbouring rows share table rows, so those and the weight stay in L1; `.cg`
    keeps the stream of rows out of it.
    """
    if LOOP > 1:
        loop_over_rows(
            x_ptr, weight_ptr, shift_ptr, scale_ptr, index_ptr, out_ptr, x_stride, table_stride, out_stride, rows, eps,
            D, LOOP, STREAM, BLOCK, NATIVE,
        )  # fmt: skip
        return
    WIDE: tl.constexpr = PART_A if PART_A else BLOCK
    B: tl.constexpr = WIDE + PART_B
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    entry = tl.load(index_ptr + row, mask=live, other=0).to(tl.int64) * table_stride
    source = x_ptr + row * x_stride
    target = out_ptr + row * out_stride
    a = row_part(source, live, 0, WIDE, D)
    total = tl.sum(a * a, axis=1)
    if PART_B:
        b = row_part(source, live, WIDE, PART_B, D)
        total += tl.sum(b * b, axis=1)
    if PART_C:
        c = row_part(source, live, B, PART_C, D)
        total += tl.sum(c * c, axis=1)
    if EARLY:
        wa, ua, va = table_part(weight_ptr, shift_ptr, scale_ptr, entry, 0, WIDE, D)
    rstd = tl.rsqrt(total / D + eps)[:, None]
    if not EARLY:
        # after the sum: 42 registers a thread instead of 75, so five rows are in flight on an SM, not three
        wa, ua, va = table_part(weight_ptr, shift_ptr, scale_ptr, entry, 0, WIDE, D)
    put_part(target, live, a, rstd, wa, ua, va, 0, WIDE, D, STREAM, NATIVE)
    if PART_B:
        wb, ub, vb = table_part(weight_ptr, shift_ptr, scale_ptr, entry, WIDE, PART_B, D)
        put_part(target, live, b, rstd, wb, ub, vb, WIDE, PART_B, D, STREAM, NATIVE)
    if PART_C:
        wc, uc, vc = table_part(weight_ptr, shift_ptr, scale_ptr, entry, B, PART_C, D)
        put_part(target, live, c, rstd, wc, uc, vc, B, PART_C, D, STREAM, NATIVE)


@triton.jit
def loop_over_rows(
    x_ptr,
    weight_ptr,
    shift_ptr,
    scale_ptr,
    index_ptr,
    out_ptr,
    x_stride,
    table_stride,
    out_stride,
    rows,
    eps,
    D: tl.constexpr,
    LOOP: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """LOOP neighbouring rows, the next one on its way while one is normed; the weight is read once for all."""
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    first = tl.program_id(0).to(tl.int64) * LOOP
    last = tl.minimum(first + LOOP, rows)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    ahead = tl.load(x_ptr + first * x_stride + cols, mask=inside, other=0.0, cache_modifier=".cg")
    for row in range(first, last):
        x = ahead.to(tl.float32)
        more = inside & (row + 1 < last)
        ahead = tl.load(x_ptr + (row + 1) * x_stride + cols, mask=more, other=0.0, cache_modifier=".cg")
        entry = tl.load(index_ptr + row).to(tl.int64) * table_stride
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        scale = tl.load(scale_ptr + entry + cols, mask=inside, other=0.0)
        shift = tl.load(shift_ptr + entry + cols, mask=inside, other=0.0)
        y = modulate(scale_by_norm(x, rstd, weight, False, NATIVE), shift, scale, NATIVE)
        tl.store(out_ptr + row * out_stride + cols, y, mask=inside, cache_modifier=".cs" if STREAM else "")


@triton.jit
def row_part(source, live, START: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr):
    """[ROWS, SIZE] fp32: columns from START; zero beyond D and in rows that do not exist."""
    cols = START + tl.arange(0, SIZE)[None, :]
    mask = live[:, None] & (cols < D) if START + SIZE > D else live[:, None]
    return tl.load(source[:, None] + cols, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def table_part(
    weight_ptr, shift_ptr, scale_ptr, entry, START: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr
):
    """Weight [1, SIZE], shift and scale [ROWS, SIZE], bf16."""
    cols = START + tl.arange(0, SIZE)[None, :]
    if START + SIZE > D:
        weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0)
        scale = tl.load(scale_ptr + entry[:, None] + cols, mask=cols < D, other=0.0)
        shift = tl.load(shift_ptr + entry[:, None] + cols, mask=cols < D, other=0.0)
    else:
        weight = tl.load(weight_ptr + cols)
        scale = tl.load(scale_ptr + entry[:, None] + cols)
        shift = tl.load(shift_ptr + entry[:, None] + cols)
    return weight, shift, scale


@triton.jit
def put_part(
    target,
    live,
    x,
    rstd,
    weight,
    shift,
    scale,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    STREAM: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """STREAM: the result is not read soon, so it is the first to leave the caches."""
    cols = START + tl.arange(0, SIZE)[None, :]
    mask = live[:, None] & (cols < D) if START + SIZE > D else live[:, None]
    y = modulate(scale_by_norm(x, rstd, weight, False, NATIVE), shift, scale, NATIVE)
    tl.store(target[:, None] + cols, y, mask=mask, cache_modifier=".cs" if STREAM else "")
