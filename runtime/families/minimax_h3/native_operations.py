"""The operators of a request's conditioner and refiner, each once, through torch's C interface. No torch.

Kernels are loaded to the device on their first launch, by operator and type, products by shape, so types and shapes are
those of `model.conditioner` and `model.refiner`; values are undefined and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from runtime.families.minimax_h3.config import H3Config, TextConfig
from runtime.families.minimax_h3.products import largest, refiner_products, text_products
from runtime.native_torch import NativeTorch


def operations(
    native: NativeTorch, items: Collection[str], config: H3Config, num_text: int, num_rows: int
) -> Iterator[str]:
    """See `runtime.native_warm_up.Operations`.

    Args:
        num_text: N, rows of the conditioner. num_rows: S, rows of the denoiser.
    """
    if "operators" in items:
        yield from _products(native, config, num_text)
        yield from _attention(native, config, num_text)
    if "attention" in items:
        transformer = config.transformer
        H, K = transformer.num_attention_heads, transformer.attention_head_dim
        fused = native.empty(num_rows, 3 * H * K)
        native.zero_(fused)
        q, k, v = (native.heads(fused, num_rows, H, K, offset=part * H * K) for part in range(3))
        native.cudnn_attention(q, k, v)
        yield "attention plan"
    if "operators" in items:  # last: of these functions an older torch may lack one, which ends the warm-up
        yield from _elementwise(native, config.text, num_text)


def _elementwise(native: NativeTorch, text: TextConfig, rows: int) -> Iterator[str]:
    """Norms, rotation and gate of a text layer."""
    D, K = text.hidden_size, text.head_dim
    x, wide, weight = native.empty(rows, D), native.empty(rows, D, dtype="float32"), native.empty(D)
    native.zero_(x)
    yield "memory and fill"
    native.copy_(wide, x)
    scale = native.add_number(native.view(native.power(wide, 2.0), rows, 1), 1e-6)
    native.mean(wide)
    native.copy_(x, native.multiply(wide, native.unary("rsqrt", scale)))
    native.multiply(weight, x)
    yield "norm"
    angles = native.empty(rows, K // 2, dtype="float32")
    native.zero_(angles)
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


def _products(native: NativeTorch, config: H3Config, rows: int) -> Iterator[str]:
    """Matrix products of both; the weights are one piece of memory."""
    (D, T), *blocks = refiner_products(config.transformer)
    shapes = [*text_products(config.text), *blocks]
    memory = native.empty(largest([(D, T), *shapes]))
    native.zero_(memory)
    for width, inner in shapes:
        x = native.empty(rows, inner)
        native.zero_(x)
        native.linear(x, native.view(memory, width, inner))
        yield f"product {width} x {inner}"
    out, x, bias = native.empty(rows, D), native.empty(rows, T), native.empty(D)
    native.add_product(out, bias, x, native.transposed(native.view(memory, D, T), D, T))
    yield "refiner's input"


def _attention(native: NativeTorch, config: H3Config, rows: int) -> Iterator[str]:
    text, transformer = config.text, config.transformer
    H = transformer.num_attention_heads
    for name, heads, groups, K, causal in (
        ("text", text.num_attention_heads, text.num_key_value_heads, text.head_dim, True),
        ("refiner", H, H, transformer.attention_head_dim, False),
    ):
        fused = native.empty(rows, (heads + 2 * groups) * K)
        native.zero_(fused)
        offsets = (0, heads * K, (heads + groups) * K)
        counts = (heads, groups, groups)
        q, k, v = (
            native.heads(fused, rows, count, K, offset) for count, offset in zip(counts, offsets, strict=True)
        )
        native.flash_attention(q, k, v, causal)
        yield f"{name} attention"
