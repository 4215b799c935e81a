"""The operators of a waiting request, each once, through torch's C interface. No torch.

Kernels are loaded to the device on their first launch, by operator and type, products by shape, so types and shapes are
those of `model.conditioner`, `model.refiner` and `model.transformer`; values are undefined and nothing is kept. Every operand is a
view of one piece of memory.

    kernels     the conditioner's and the refiner's norms, rotation and gates, at any number of rows
    operators   their products and attention
    step        products of one evaluation: the float32 ones at both ends, then a block's
    attention   cuDNN's plan for the denoiser
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from runtime.families.minimax_h3.config import H3Config, TextConfig
from runtime.families.minimax_h3.packing import PackedSequence
from runtime.families.minimax_h3.products import (
    activation_bytes,
    block_products,
    end_products,
    largest,
    refiner_products,
    text_heads,
    text_products,
)
from runtime.families.minimax_h3.shards import WHOLE, Share
from runtime.native_torch import Handle, NativeTorch
from runtime.parallel.split import RETURN_CHUNK_ROWS

_BF16 = 2  # bytes
_ANY_ROWS = 16


def operations(
    native: NativeTorch,
    items: Collection[str],
    config: H3Config,
    sequence: PackedSequence | None,
    share: Share = WHOLE,
) -> Iterator[str]:
    """See `runtime.native_warm_up.Operations`. What the conditioner needs comes first: it is needed first.

    Args:
        sequence: None: only items that need none.
        share: on several ranks, over how many of them what is spread. Where parts differ in size, the largest one; a rank may
            have fewer rows of a modality than are used here, and projects gathered rows in chunks.
    """
    if "kernels" in items:
        yield from _elementwise(native, config.text, _ANY_ROWS)
        if share.conditioner > 1:
            part = native.empty(_ANY_ROWS, config.text.hidden_size, dtype="float32")
            native.add(part, part)
            yield "sum over ranks"
    if sequence is None:
        return
    if "operators" in items:
        yield from _products(native, config, sequence.num_text, share)
        yield from _attention(native, config, sequence.num_text, share)
    if "attention" in items:
        yield _plan(native, config, sequence.num_rows, share)
    if "step" in items:
        yield from _step(native, config, sequence, share)


def _plan(native: NativeTorch, config: H3Config, rows: int, share: Share) -> str:
    """cuDNN's, for the operands of a block."""
    transformer = config.transformer
    H, K = transformer.num_attention_heads // share.rows, transformer.attention_head_dim
    fused = native.empty(rows, 3 * H * K)
    native.zero_(fused)
    q, k, v = (native.heads(fused, rows, H, K, offset=part * H * K) for part in range(3))
    native.cudnn_attention(q, k, v)
    return "attention plan"


def _elementwise(native: NativeTorch, text: TextConfig, rows: int) -> Iterator[str]:
    """Norms, rotation and gate of a text layer."""
    D, K = text.hidden_size, text.head_dim
    x, wide = native.empty(rows + 1, D), native.empty(rows, D, dtype="float32")
    native.zero_(x)
    x, weight = native.view(x, rows, D), native.view(x, D)
    yield "memory and fill"
    native.copy_(wide, x)
    scale = native.add_number(native.view(native.power(wide, 2.0), rows, 1), 1e-6)
    native.mean(wide)
    native.copy_(x, native.multiply(wide, native.unary("rsqrt", scale)))
    native.multiply(weight, x)
    yield "norm"
    angles = native.view(wide, rows, K // 2)
    table = native.empty(rows, 1, K // 2)
    for name in ("cos", "sin"):
        native.copy_(native.view(table, rows, K // 2), native.unary(name, angles))
    half = native.empty(rows, text.num_attention_heads, K // 2)
    turned = native.multiply(half, table)
    native.concatenate([native.add(turned, turned), turned], axis=-1)
    yield "rotation"
    native.multiply(native.unary("silu", x), x)
    index = native.empty(rows, dtype="int64")
    native.zero_(index)
    native.pick_rows(x, index)
    yield "gate and embedding"
    native.rms_norm(x, weight, D)
    yield "refiner's norm"


def _products(native: NativeTorch, config: H3Config, rows: int, share: Share) -> Iterator[str]:
    """Matrix products of both; weights and operands are one piece of memory."""
    (D, T), *blocks = refiner_products(config.transformer, one_by_one=share.rows > 1)
    text, refined = text_products(config.text, share.conditioner), share.part(rows)
    inner_most = max(T, *(inner for _, inner in (*text, *blocks)))
    memory = native.empty(max(largest([(D, T), *text, *blocks]), rows * inner_most, D))
    native.zero_(memory)
    for shape in text:
        yield _product(native, memory, rows, *shape)
    for shape in blocks:
        yield _product(native, memory, refined, *shape)
    _with_bias(native, memory, refined, D, T)
    yield "refiner's input"


def _product(native: NativeTorch, memory: Handle, rows: int, width: int, inner: int) -> str:
    """One without a bias; its name."""
    with native.scratch():
        native.linear(native.view(memory, rows, inner), native.view(memory, width, inner))
    return f"product {width} x {inner}"


def _with_bias(
    native: NativeTorch, memory: Handle, rows: int, width: int, inner: int, dtype: str = "bfloat16"
) -> None:
    with native.scratch():
        weight = native.transposed(native.view(memory, width, inner), width, inner)
        out = native.empty(rows, width, dtype=dtype)
        native.add_product(out, native.view(memory, width), native.view(memory, rows, inner), weight)


def _attention(native: NativeTorch, config: H3Config, rows: int, share: Share) -> Iterator[str]:
    text, transformer = config.text, config.transformer
    H = transformer.num_attention_heads // share.rows
    for name, heads, groups, K, causal in (
        ("text", *text_heads(text, share.conditioner), text.head_dim, True),
        ("refiner", H, H, transformer.attention_head_dim, False),
    ):
        fused = native.empty(rows, (heads + 2 * groups) * K)
        offsets = (0, heads * K, (heads + groups) * K)
        counts = (heads, groups, groups)
        q, k, v = (
            native.heads(fused, rows, count, K, offset) for count, offset in zip(counts, offsets, strict=True)
        )
        native.flash_attention(q, k, v, causal)
        yield f"{name} attention"


def _step(native: NativeTorch, config: H3Config, sequence: PackedSequence, share: Share) -> Iterator[str]:
    """The device memory of one evaluation, taken in one piece and left to torch's allocator; then products out of it."""
    transformer, rows_of_rank = config.transformer, share.part(sequence.num_rows)
    with native.scratch():
        native.empty(activation_bytes(transformer, rows_of_rank, _BF16) // _BF16)
    yield "memory of a step"
    counts = {
        "video": min(rows_of_rank, sequence.num_condition + sequence.num_video),
        "audio": min(rows_of_rank, sequence.num_audio),
    }
    shapes = [(counts[stream], *shape) for stream, *shape in end_products(transformer)]
    with native.scratch():
        most = max(max(width * inner, rows * inner, width) for rows, width, inner in shapes)
        memory = native.empty(most, dtype="float32")
        native.zero_(memory)
        for rows, width, inner in shapes:
            if rows:
                _with_bias(native, memory, rows, width, inner, "float32")
                yield f"float32 product {width} x {inner}"
    with native.scratch():
        blocks = block_products(transformer, share.projection, one_by_one=share.rows > share.projection)
        memory = native.empty(max(largest(blocks), rows_of_rank * max(inner for _, inner in blocks)))
        native.zero_(memory)
        back = rows_of_rank if share.rows == 1 else min(rows_of_rank, RETURN_CHUNK_ROWS)
        for shape, rows in zip(blocks, (rows_of_rank, back, rows_of_rank, rows_of_rank), strict=True):
            yield f"block's {_product(native, memory, rows, *shape)}"
