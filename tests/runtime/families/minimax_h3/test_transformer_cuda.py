"""Conditioner, refiner and DiT on a CUDA device against the same code on the CPU. Run by hand: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from runtime.families.minimax_h3.model import adaln
from runtime.families.minimax_h3.model.conditioner import EMBEDDING, encode_prompt
from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.families.minimax_h3.model.transformer import Transformer
from runtime.families.minimax_h3.packing import pack
from runtime.families.minimax_h3.tokens import ImageSpan, TokenStream
from tests.fakes.h3_weights import (
    build_encoder,
    build_transformer,
    conditioner_groups,
    modulation_groups,
    random_config,
    transformer_groups,
)
from tests.fakes.weights import DictWeights

# Largest difference, as a part of the largest value. fp32: other summation orders through all layers (TF32 would be
# 100 times more). bf16: a few last bits (2^-8 each) through all layers.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 5e-2}


def run_request(device: str, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Prompt embeds, video velocity, audio velocity of one keyframe request, on the CPU."""
    config = random_config(seed)
    encoder, dit = (
        build_encoder(config, seed, dtype)[1],
        build_transformer(config.transformer, seed, dtype)[1],
    )
    plans = adaln.plan_timesteps([0.0, 0.5], [0.0, 0.8], has_condition=True)
    groups = (
        conditioner_groups(encoder)
        | transformer_groups(dit)
        | modulation_groups(dit, config.transformer, "x.y", plans, "canonical")
    )
    weights = DictWeights(
        {
            group: {name: value.to(device) for name, value in tensors.items()}
            for group, tensors in groups.items()
        },
        {EMBEDDING: encoder["model.language_model.embed_tokens.weight"]},
    )
    pad, generator = config.tokens.image_token_id, torch.Generator().manual_seed(seed)
    tokens = TokenStream(
        (1, 2, 93, *[pad] * 6, 94, 3, 4, 5), (1, 1, *[0] * 8, 1, 1, 1), (ImageSpan(3, 4, 6),)
    )
    sequence = pack(config, tokens.tags, (7, 4, 6), 37, ["first"])
    patches = [torch.randn(24, 1536, generator=generator)]
    video_rows = sequence.num_condition + sequence.num_video
    video = torch.randn(video_rows, config.transformer.video_row_dim, generator=generator)
    audio = torch.randn(sequence.num_audio, config.transformer.audio_in_channels, generator=generator)

    prompt_embeds = encode_prompt(config, weights, tokens, patches, device)
    transformer = Transformer(config, weights, adaln.ModulationTables(weights, "x.y", (0, 1)))
    transformer.begin(refine_text(config, weights, prompt_embeds), sequence)
    velocity = transformer.forward(video.to(device), audio.to(device), 1)
    return [x.float().cpu() for x in (prompt_embeds, velocity.video, velocity.audio)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "mixed_bf16"])
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_cuda_agrees_with_the_cpu(seed, dtype):
    found, expected = run_request("cuda", dtype, seed), run_request("cpu", dtype, seed)

    for mine, reference in zip(found, expected, strict=True):
        assert reference.abs().max() > 0.05
        assert (mine - reference).abs().max() <= TOLERANCES[dtype] * reference.abs().max()
