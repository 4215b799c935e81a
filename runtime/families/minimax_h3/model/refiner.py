"""Token refiner: the conditioner's rows become the DiT's text rows, once per request.

The result depends on the prompt alone (no timestep, no position), so it is computed before the first step.
"""

from __future__ import annotations

from torch import Tensor

from runtime.families.minimax_h3.config import H3Config, TransformerConfig
from runtime.families.minimax_h3.model.block import (
    BlockWeights,
    SelfAttention,
    feed_forward,
    self_attention,
)
from runtime.families.minimax_h3.model.weight_views import take
from runtime.ops.attention import Attention, attention
from runtime.ops.linear import linear
from runtime.ops.norms import rms_norm
from runtime.weights import WeightSource


def refine_text(
    config: H3Config,
    weights: WeightSource,
    prompt_embeds: Tensor,
    attention: Attention = attention,
    attend: SelfAttention = self_attention,
) -> Tensor:
    """Project and refine the conditioner's rows.

    Args:
        prompt_embeds: [N, text_dim]; rows of vision blocks are text rows here.
        attend: `self_attention` or a replacement of the same form.
    Returns: [N, D] in the dtype of the matrices.
    Source: diffusers 0.42.1, transformer_minimax_h3.
    """
    prelude = weights.tensors("transformer/prelude")
    weight, bias, final_norm = take(
        prelude, "", ("context_embedder.weight", "context_embedder.bias", "token_refiner.final_norm.weight")
    )
    x = linear(prompt_embeds, weight, bias)  # [N, D]
    for i in range(config.transformer.num_refiner_layers):
        w = BlockWeights.view(prelude, f"token_refiner.refiner_blocks.{i}.")
        x = refiner_block_forward(x, w, config.transformer, attention, attend)
    return rms_norm(x, final_norm, config.transformer.final_norm_eps)


def refiner_block_forward(
    x: Tensor,
    w: BlockWeights,
    config: TransformerConfig,
    attention: Attention,
    attend: SelfAttention = self_attention,
) -> Tensor:
    """Pre-norm block without modulation and without rotary embedding. [N, D] -> [N, D]."""
    x = x + attend(rms_norm(x, w.norm1, config.norm_eps), w, config, None, attention)
    return x + feed_forward(rms_norm(x, w.norm2, config.norm_eps), w)
