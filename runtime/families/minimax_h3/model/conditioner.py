"""Conditioner: Qwen3-VL up to its conditioning layer, one decoder layer at a time behind the load.

Returns the residual stream after that layer, before any final norm. No cache, no mask beyond causality, one prompt.
Callers run it under `torch.inference_mode()`. Source: transformers 5.24, qwen3_vl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.families.minimax_h3.config import H3Config, TextConfig
from runtime.families.minimax_h3.model.vision import encode_images
from runtime.families.minimax_h3.model.weight_views import take
from runtime.families.minimax_h3.tokens import TokenStream
from runtime.ops.attention import Attention, attention
from runtime.ops.feed_forward import swiglu_gate_first
from runtime.ops.linear import linear
from runtime.ops.norms import rms_norm_rounded
from runtime.ops.rotary import RotaryTable, inverse_frequencies, rotary_table, rotate
from runtime.weights import WeightSource

EMBEDDING = "text_encoder_embed/model.language_model.embed_tokens.weight"


@dataclass(frozen=True)
class TextLayerWeights:
    """Views of one decoder layer. D hidden, H query heads, G key heads, K head dim, F feed-forward width."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 G) K, D], all q rows, all k rows, all v rows
    q_norm: Tensor  # [K]
    k_norm: Tensor  # [K]
    out: Tensor  # [D, H K]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F, D], gate first
    down: Tensor  # [D, F]

    @classmethod
    def view(cls, tensors: Mapping[str, Tensor], prefix: str) -> TextLayerWeights:
        """The layer whose names start with `prefix` (`"model.language_model.layers.3."`)."""
        names = (
            "input_layernorm.weight",
            "self_attn.qkv_proj.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "self_attn.o_proj.weight",
            "post_attention_layernorm.weight",
            "mlp.gate_up_proj.weight",
            "mlp.down_proj.weight",
        )
        return cls(*take(tensors, prefix, names))


class LayerForward(Protocol):
    """The form of `layer_forward`."""

    def __call__(
        self, x: Tensor, w: TextLayerWeights, config: TextConfig, rope: RotaryTable, attention: Attention
    ) -> Tensor: ...


def layer_forward(
    x: Tensor, w: TextLayerWeights, config: TextConfig, rope: RotaryTable, attention: Attention
) -> Tensor:
    """One causal decoder layer. [N, D] -> [N, D], new memory; `rope` in the dtype of `x`.

    Rounding: the norms round before their weight (unlike the DiT's); RoPE rounds each product and the sum.
    """
    x = x + attention_sum(x, w, config, rope, attention)
    return x + feed_forward_sum(x, w, config)


def attention_sum(
    x: Tensor, w: TextLayerWeights, config: TextConfig, rope: RotaryTable, attention: Attention
) -> Tensor:
    """What attention adds to `x`, [N, D]; with the rows of a few key heads and their query heads, their share of it."""
    kv_heads = len(w.qkv) // (
        config.head_dim * (config.num_attention_heads // config.num_key_value_heads + 2)
    )
    heads, eps = len(w.qkv) // config.head_dim - 2 * kv_heads, config.rms_norm_eps
    n = rms_norm_rounded(x, w.input_norm, eps)
    qkv = linear(n, w.qkv).view(len(x), heads + 2 * kv_heads, config.head_dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    q = rotate(rms_norm_rounded(q, w.q_norm, eps), rope)  # [N, H, K]
    k = rotate(rms_norm_rounded(k, w.k_norm, eps), rope)  # [N, G, K]
    return linear(attention(q, k, v, causal=True).flatten(1), w.out)


def feed_forward_sum(x: Tensor, w: TextLayerWeights, config: TextConfig) -> Tensor:
    """What the feed-forward network adds to `x`, [N, D]; with a few of its columns, their share of it."""
    return swiglu_gate_first(rms_norm_rounded(x, w.post_norm, config.rms_norm_eps), w.gate_up, w.down)


def encode_prompt(
    config: H3Config,
    weights: WeightSource,
    tokens: TokenStream,
    patches: Sequence[Tensor],
    device: torch.device | str,
    attention: Attention = attention,
    layer: LayerForward = layer_forward,
) -> Tensor:
    """Conditioning rows of one request.

    Each layer's group is asked for when the layer runs, so layers compute while later ones load; the vision tower's
    group is asked for first, and only if there are pictures.

    Args:
        patches: one entry per `tokens.images`, from `image_patches`.
        layer: `layer_forward` or a replacement of the same form.
    Returns: [N, text_dim] in the dtype of the encoder.
    Raises: InternalError: pictures and token stream disagree.
    """
    x = embed_tokens(weights, tokens.ids, device)  # [N, D]
    deepstack: tuple[Tensor, ...] = ()
    image_rows = _image_rows(tokens, config.vision.spatial_merge_size).to(device)
    if tokens.images or patches:
        features = encode_images(config, weights, patches, tokens.images, device, attention)
        x[image_rows] = features.tokens
        deepstack = features.deepstack
    positions = mrope_positions(tokens, config.vision.spatial_merge_size)
    rope = _rotary_table(positions.to(device), config.text).to(x.dtype)
    for i in range(config.text.conditioning_layer):
        tensors = weights.tensors(f"text_encoder/layers.{i}")
        w = TextLayerWeights.view(tensors, f"model.language_model.layers.{i}.")
        x = layer(x, w, config.text, rope, attention)
        if i < len(deepstack):
            x[image_rows] += deepstack[i]
    return x


def embed_tokens(weights: WeightSource, ids: Sequence[int], device: torch.device | str) -> Tensor:
    """Embedding rows [N, D]; each distinct id is read from storage once (a picture repeats one id a thousand times)."""
    distinct = sorted(set(ids))
    place = {token: row for row, token in enumerate(distinct)}
    rows = weights.rows(EMBEDDING, distinct).to(device)
    return rows[torch.tensor([place[token] for token in ids], device=device)]


def mrope_positions(tokens: TokenStream, merge: int) -> Tensor:
    """Encoder positions (t, h, w) of every row: [3, N] int64.

    Text advances all axes by one. A picture starting at position p has t = p, h = p + row, w = p + column of its
    merged grid, and text goes on at p + max(merged height, merged width).
    """
    parts, row, position = [], 0, 0
    for image in tokens.images:
        height, width = image.grid_h // merge, image.grid_w // merge
        parts.append(torch.arange(position, position + image.start - row).expand(3, -1))
        position += image.start - row
        t, h, w = torch.meshgrid(
            torch.zeros(1).long(), torch.arange(height), torch.arange(width), indexing="ij"
        )
        parts.append(torch.stack((t, h, w)).flatten(1) + position)
        row, position = image.start + height * width, position + max(height, width)
    parts.append(torch.arange(position, position + len(tokens.ids) - row).expand(3, -1))
    return torch.cat(parts, dim=1)


def _rotary_table(positions: Tensor, config: TextConfig) -> RotaryTable:
    """Interleaved M-RoPE: frequency i follows h if i % 3 == 1, w if i % 3 == 2 (inside their sections), else t.

    positions: [3, N]. Returns cos and sin, [N, K/2] fp32.
    """
    half = config.head_dim // 2
    _, height, width = config.mrope_section
    axis = torch.zeros(half, dtype=torch.long)
    axis[1 : 3 * height : 3] = 1
    axis[2 : 3 * width : 3] = 2
    frequencies = inverse_frequencies(half, config.rope_theta).to(positions.device)
    return rotary_table(positions.float()[axis.to(positions.device)].T * frequencies)


def _image_rows(tokens: TokenStream, merge: int) -> Tensor:
    """Rows of all `<|image_pad|>` tokens, in order: [V] int64."""
    spans = [
        torch.arange(image.start, image.start + image.grid_h * image.grid_w // merge**2)
        for image in tokens.images
    ]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long)
