"""Tiny models with random prepared groups, whole or as one rank's shards. No oracle: ranks start quickly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.job import JobInput
from runtime.families.minimax_h3.packing import pack
from runtime.families.minimax_h3.shards import cut_of
from runtime.families.minimax_h3.tokens import TokenStream
from runtime.family import MediaPlan
from runtime.parallel.split import Cut
from runtime.schedules import explicit_schedule
from tests.fakes.weights import DictWeights
from tests.runtime.families.minimax_h3.small_config import small_config

Groups = dict[str, dict[str, Tensor]]


def tiny_config(heads: int = 8, kv_heads: int = 8, layers: int = 2) -> H3Config:
    """Eight DiT heads of 16 channels, eight key heads with two query heads each, by default."""
    base = small_config(vocab_size=100)
    transformer = dataclasses.replace(
        base.transformer,
        num_attention_heads=heads,
        attention_head_dim=16,
        num_layers=layers,
        num_refiner_layers=2,
        rope_freq_dim=2,
    )
    text = dataclasses.replace(
        base.text,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=51,
        conditioning_layer=3,
    )
    return dataclasses.replace(base, transformer=transformer, text=text)


def random_groups(config: H3Config, seed: int, evaluations: int = 2) -> Groups:
    """Every group of the DiT, the conditioner's text layers and the tables `x.t2va` and `x.fl2va`, in float32."""
    torch.manual_seed(seed)
    c, t = config.transformer, config.text
    width, ffn, size = c.hidden_size, c.ffn_dim, c.inner_dim

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape) * shape[-1] ** -0.5

    def norm(width: int) -> Tensor:
        return 1 + 0.1 * torch.randn(width)

    def block(prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}norm1.weight": norm(width),
            f"{prefix}attn.to_qkv.weight": matrix(3 * size, width),
            f"{prefix}attn.norm_q.weight": norm(c.attention_head_dim),
            f"{prefix}attn.norm_k.weight": norm(c.attention_head_dim),
            f"{prefix}attn.to_out.0.weight": matrix(width, size),
            f"{prefix}norm2.weight": norm(width),
            f"{prefix}ff.net.0.proj.weight": matrix(2 * ffn, width),
            f"{prefix}ff.net.2.weight": matrix(width, ffn),
        }

    groups: Groups = {"transformer/prelude": {}, "transformer/heads": {"norm_out.norm.weight": norm(width)}}
    prelude, heads = groups["transformer/prelude"], groups["transformer/heads"]
    for name, inputs in (("proj_in", c.video_row_dim), ("audio_proj_in", c.audio_in_channels)):
        prelude |= {f"{name}.weight": matrix(width, inputs), f"{name}.bias": 0.1 * torch.randn(width)}
    prelude |= {
        "context_embedder.weight": matrix(width, c.text_dim),
        "context_embedder.bias": torch.randn(width),
    }
    for i in range(c.num_refiner_layers):
        prelude |= block(f"token_refiner.refiner_blocks.{i}.")
    prelude["token_refiner.final_norm.weight"] = norm(width)
    for i in range(c.num_layers):
        groups[f"transformer/blocks.{i}"] = block(f"transformer_blocks.{i}.")
    for name, outputs in (("proj_out", c.video_row_dim), ("audio_proj_out", c.audio_in_channels)):
        heads |= {f"{name}.weight": matrix(outputs, width), f"{name}.bias": 0.1 * torch.randn(outputs)}
    for task in ("t2va", "fl2va"):
        for e in range(evaluations):
            groups[f"adaln/x.{task}/step.{e:03d}"] = {
                f"step.{e:03d}.blocks": 0.3 * torch.randn(c.num_layers, 3, 6, width),
                f"step.{e:03d}.final": 0.3 * torch.randn(2, 2, width),
            }
    groups["adaln/x.fl2va/condition"] = {"condition.blocks": 0.3 * torch.randn(c.num_layers, 1, 6, width)}
    kv, heads_, dim = t.num_key_value_heads, t.num_attention_heads, t.head_dim
    for i in range(t.conditioning_layer):
        root = f"model.language_model.layers.{i}."
        groups[f"text_encoder/layers.{i}"] = {
            f"{root}input_layernorm.weight": norm(t.hidden_size),
            f"{root}self_attn.qkv_proj.weight": matrix((heads_ + 2 * kv) * dim, t.hidden_size),
            f"{root}self_attn.q_norm.weight": norm(dim),
            f"{root}self_attn.k_norm.weight": norm(dim),
            f"{root}self_attn.o_proj.weight": matrix(t.hidden_size, heads_ * dim),
            f"{root}post_attention_layernorm.weight": norm(t.hidden_size),
            f"{root}mlp.gate_up_proj.weight": matrix(2 * t.intermediate_size, t.hidden_size),
            f"{root}mlp.down_proj.weight": matrix(t.hidden_size, t.intermediate_size),
        }
    return groups


def embedding_table(config: H3Config, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    rows = torch.randn(config.text.vocab_size, config.text.hidden_size)
    return {"text_encoder_embed/model.language_model.embed_tokens.weight": rows}


def rank_weights(
    config: H3Config, groups: Groups, rank: int, size: int, tables: Mapping[str, Tensor] | None = None
) -> DictWeights:
    """What one rank of a directory with shards sees."""
    return DictWeights(
        {
            group: {name: cut(tensor, cut_of(config, name, rank, size)) for name, tensor in members.items()}
            for group, members in groups.items()
        },
        tables,
    )


def cut(tensor: Tensor, part: Cut | None) -> Tensor:
    if part is None:
        return tensor
    if part.columns is not None:
        return tensor[:, part.columns.start : part.columns.stop].contiguous()
    assert part.rows is not None
    return torch.cat([tensor[rows.start : rows.stop] for rows in part.rows])


def decoder_groups(config: H3Config, seed: int) -> Groups:
    """Random groups of the video and the audio decoder, named and shaped as prepare writes them."""
    from prepare.families.minimax_h3.recipe import build_recipe

    torch.manual_seed(seed)
    groups: Groups = {}
    for group in build_recipe(config, "diffusers", ("t2va",), "F32").groups:
        if group.name is None or group.component not in ("vae", "audio_vae"):
            continue
        groups[group.name] = {t.name: _random(t.name, t.spec.shape) for t in group.tensors}
    return groups


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1 or name.endswith(("weight_g", "alpha", "beta")):
        near_one = "norm" in name or "scale" in name or name.endswith("weight_g")
        return (1.0 if near_one else 0.0) + 0.1 * torch.randn(shape)
    return torch.randn(shape) * (torch.Size(shape[1:]).numel()) ** -0.5


def job_input(num_text: int = 5, num_units: int = 3, seed: int = 11) -> JobInput:
    """A t2va request of 64x64 pixels and two evaluations on the default `tiny_config`."""
    config = tiny_config()
    tokens = TokenStream(ids=tuple(range(3, 3 + num_text)), tags=(1,) * num_text, images=())
    frames, audio = 5 * num_units + 2, 7
    return JobInput(
        config=config,
        media=MediaPlan(64, 64, 17 * num_units + 5, 24, 160),
        schedule=explicit_schedule("x", (1.0, 0.6, 0.0), (1.0, 0.4, 0.0)),
        tokens=tokens,
        sequence=pack(config, tokens.tags, (frames, 4, 4), audio),
        keyframes=(),
        seed=seed,
        noise_mode="single_stream",
        table_key="x.t2va",
        condition_index=None,
    )
