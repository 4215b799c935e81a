"""Token refiner against diffusers."""

from __future__ import annotations

import pytest
import torch

from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.ops.attention import attention
from tests.fakes.h3_weights import build_transformer, random_config, transformer_groups
from tests.fakes.weights import DictWeights


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "mixed_bf16"])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_refined_text_equals_diffusers(seed, rows, dtype):
    config = random_config(seed)
    model, state = build_transformer(config.transformer, seed, dtype)
    weights = DictWeights(transformer_groups(state))
    embeds = torch.randn(rows, config.transformer.text_dim).to(dtype)

    refined = refine_text(config, weights, embeds)

    expected = model.token_refiner(model.context_embedder(embeds[None]))[0]
    assert refined.dtype == dtype
    assert torch.equal(refined, expected)
    assert weights.asked == ["transformer/prelude"]


@torch.inference_mode()
def test_prompt_rows_are_rounded_to_the_matrices_dtype():
    config = random_config(1)
    _, state = build_transformer(config.transformer, 1, torch.bfloat16)
    weights = DictWeights(transformer_groups(state))
    embeds = torch.randn(5, config.transformer.text_dim)

    assert torch.equal(refine_text(config, weights, embeds), refine_text(config, weights, embeds.bfloat16()))


@torch.inference_mode()
def test_attention_hook_sees_every_refiner_block():
    config = random_config(2)
    _, state = build_transformer(config.transformer, 2, torch.float32)
    weights = DictWeights(transformer_groups(state))
    calls = []

    def watched(q, k, v, *, causal=False, scale=None):
        calls.append(causal)
        return attention(q, k, v, causal=causal, scale=scale)

    refine_text(config, weights, torch.randn(5, config.transformer.text_dim), watched)

    assert calls == [False] * config.transformer.num_refiner_layers
