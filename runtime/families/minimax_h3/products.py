"""Shapes of the matrix products that a request runs, as (rows, columns) of the matrices, and their memory. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.families.minimax_h3.config import TextConfig, TransformerConfig

Shape = tuple[int, int]


def text_products(text: TextConfig, ranks: int = 1) -> tuple[Shape, ...]:
    """Of one text layer: qkv_proj, o_proj, gate_up_proj, down_proj. ranks: that share it; the largest part."""
    D, F = text.hidden_size, -(-text.intermediate_size // ranks)
    queries, keys = (heads * text.head_dim for heads in text_heads(text, ranks))
    return (queries + 2 * keys, D), (D, queries), (2 * F, D), (D, F)


def text_heads(text: TextConfig, ranks: int = 1) -> tuple[int, int]:
    """Query and key heads of a text layer, or of the largest part of one."""
    keys = -(-text.num_key_value_heads // ranks)
    return keys * (text.num_attention_heads // text.num_key_value_heads), keys


def block_products(
    transformer: TransformerConfig, ranks: int = 1, one_by_one: bool = False
) -> tuple[Shape, ...]:
    """Of one block, of the DiT or of the refiner: to_qkv, to_out, ff.net.0.proj, ff.net.2.

    Args:
        ranks: that share the heads of `to_qkv`; the others are whole on all of them.
        one_by_one: q, k and v are projected one after the other, as where projected heads travel.
    """
    D, F, A = transformer.hidden_size, transformer.ffn_dim, transformer.inner_dim
    return (A if one_by_one else 3 * A // ranks, D), (D, A), (2 * F, D), (D, F)


def refiner_products(transformer: TransformerConfig, one_by_one: bool = False) -> tuple[Shape, ...]:
    """Of the refiner: context_embedder, which alone has a bias, and its blocks."""
    blocks = block_products(transformer, one_by_one=one_by_one) if transformer.num_refiner_layers else ()
    return (transformer.hidden_size, transformer.text_dim), *blocks


def end_products(transformer: TransformerConfig) -> tuple[tuple[str, int, int], ...]:
    """The float32 ones before the first block and after the last, all with a bias: rows' modality, then the shape."""
    D, V, A = transformer.hidden_size, transformer.video_row_dim, transformer.audio_in_channels
    return ("video", D, V), ("audio", D, A), ("video", V, D), ("audio", A, D)


def activation_bytes(transformer: TransformerConfig, rows: int, itemsize: int) -> int:
    """Most that a block holds at once: around the feed-forward, its two buffers and four of the hidden width."""
    return rows * itemsize * (3 * transformer.ffn_dim + 4 * transformer.hidden_size)


def largest(shapes: Sequence[Shape]) -> int:
    """Values of the largest matrix."""
    return max(rows * columns for rows, columns in shapes)
