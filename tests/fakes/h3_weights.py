"""Tiny MiniMax-H3 configurations and prepared groups of the DiT and the conditioner, cut from oracle modules."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from runtime.families.minimax_h3.config import (
    AudioVAEConfig,
    H3Config,
    ImageProcessorConfig,
    SpecialTokens,
    TextConfig,
    TransformerConfig,
    VideoVAEConfig,
    VisionConfig,
)
from runtime.families.minimax_h3.model import adaln
from tests.fakes.weights import DictWeights


def random_config(seed: int) -> H3Config:
    """A random small configuration; sizes are odd where the model allows it, so that no two are confused."""
    rng = random.Random(seed)
    text_dim = rng.choice([24, 40])
    return H3Config(
        transformer=_transformer(rng, text_dim),
        text=_text(rng, text_dim),
        vision=_vision(rng, text_dim),
        tokens=SpecialTokens(91, 92, 93, 94),
        image_processor=ImageProcessorConfig(min_pixels=1024, max_pixels=16_384),
        video_vae=VideoVAEConfig(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            spatial_downsample_factors=(2, 2, 2, 2),
            temporal_downsample_factors=(1, 2, 2, 1),
            norm_num_groups=32,
            norm_eps=1e-6,
            spatial_padding_mode="reflect",
            decoder_num_layers=2,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=32,
            decoder_num_register_tokens=4,
            decoder_ffn_mult=2,
            decoder_rope_theta=100.0,
            decoder_rope_dim_ratio=0.75,
            decoder_norm_eps=1e-5,
            clip_length=17,
            token_drop=3,
            latents_mean=(0.1,) * 4,
            latents_std=(1.5,) * 4,
        ),
        audio_vae=AudioVAEConfig(
            encoder_dim=4,
            encoder_rates=(2, 2),
            latent_dim=32,
            latent_channels=6,
            num_attention_heads=2,
            decoder_dim=16,
            decoder_rates=(2, 2),
            decoder_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
            sampling_rate=160,
            latents_mean=(0.0,) * 6,
            latents_std=(1.0,) * 6,
        ),
    )


def _transformer(rng: random.Random, text_dim: int) -> TransformerConfig:
    head_dim = rng.choice([24, 32])
    return TransformerConfig(
        num_attention_heads=rng.choice([1, 2, 3]),
        attention_head_dim=head_dim,
        hidden_size=rng.choice([48, 56]),
        num_layers=rng.choice([1, 2, 3]),
        num_refiner_layers=rng.choice([1, 2]),
        ffn_dim=rng.choice([72, 96]),
        in_channels=4,
        audio_in_channels=6,
        patch_size=(1, 2, 2),
        text_dim=text_dim,
        freq_dim=rng.choice([16, 20]),
        time_embed_hidden_dim=rng.choice([40, 48]),
        time_embed_dim=rng.choice([24, 28]),
        rope_freq_dim=rng.choice([2, 3, 4]),
        rope_theta=rng.choice([100.0, 10000.0]),
        norm_eps=rng.choice([1e-5, 1e-2]),
        qk_norm_eps=rng.choice([1e-5, 2e-2]),
        final_norm_eps=rng.choice([1e-5, 3e-2]),
    )


def _text(rng: random.Random, text_dim: int) -> TextConfig:
    kv_heads = rng.choice([1, 2])
    head_dim = rng.choice([8, 16])
    height, width = (1, 1) if head_dim == 8 else rng.choice([(2, 2), (3, 2)])
    return TextConfig(
        vocab_size=100,
        hidden_size=text_dim,
        intermediate_size=rng.choice([48, 64]),
        num_hidden_layers=7,
        num_attention_heads=kv_heads * rng.choice([1, 2, 4]),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=rng.choice([1e-6, 1e-2]),
        rope_theta=rng.choice([100.0, 5e6]),
        mrope_section=(head_dim // 2 - height - width, height, width),
        conditioning_layer=rng.choice([4, 5]),
    )


def _vision(rng: random.Random, text_dim: int) -> VisionConfig:
    heads = rng.choice([1, 2])
    return VisionConfig(
        depth=4,
        hidden_size=heads * 16,
        intermediate_size=48,
        num_heads=heads,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=text_dim,
        num_position_embeddings=rng.choice([16, 36, 64]),
        deepstack_visual_indexes=tuple(sorted(rng.sample(range(4), rng.choice([2, 3])))),
    )


def randomize(module: torch.nn.Module, std: float) -> None:
    """Re-initialise in place so that every path contributes: weights N(0, std), norms near one, small biases."""
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn_like(parameter, dtype=torch.float32)
            is_norm_weight = parameter.ndim == 1 and bool((parameter == 1).all())
            parameter.copy_(1 + 0.1 * noise if is_norm_weight else std * noise)


FP32_MODULES = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope")


class FusedRows(torch.nn.Module):
    """A linear layer as a slice of the product with a taller matrix.

    A BLAS may sum in another order for another number of output features. Giving the oracle the same matrix as the
    prepared directory lets tests ask for equality on any machine.
    """

    def __init__(self, weight: Tensor, rows: slice) -> None:
        super().__init__()
        self.weight, self.rows = weight, rows

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)[..., self.rows]


class PatchMatrix(torch.nn.Module):
    """A convolution without overlap as a product with its flattened kernel, for the same reason."""

    def __init__(self, convolution: torch.nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.flatten(1), self.weight.flatten(1), self.bias)


def fuse(model: torch.nn.Module) -> None:
    """Let every group of sibling projections of an oracle read slices of one product, in place."""
    for module in list(model.modules()):
        for names in (("to_q", "to_k", "to_v"), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if not hasattr(module, names[0]):
                continue
            weights = [getattr(module, name).weight.detach() for name in names]
            fused, start = torch.cat(weights), 0
            for name, weight in zip(names, weights, strict=True):
                setattr(module, name, FusedRows(fused, slice(start, start + len(weight))))
                start += len(weight)
        if isinstance(getattr(module, "proj", None), torch.nn.Conv3d):
            module.proj = PatchMatrix(module.proj)


def build_transformer(
    config: TransformerConfig, seed: int, dtype: torch.dtype, *, fused: bool = True
) -> tuple[MiniMaxH3Transformer3DModel, dict[str, Tensor]]:
    """The oracle DiT with random weights, and its state with the published names.

    Matrices are in `dtype`, the float32 modules in float32. fused: see `FusedRows`.
    """
    torch.manual_seed(seed)
    model = MiniMaxH3Transformer3DModel(**dataclasses.asdict(config)).eval()
    randomize(model, 0.08)
    for name, module in model.named_children():
        module.to(torch.float32 if name in FP32_MODULES else dtype)
    state = model.state_dict()
    if fused:
        fuse(model)
    return model, state


def build_encoder(
    config: H3Config, seed: int, dtype: torch.dtype, *, fused: bool = True
) -> tuple[Qwen3VLForConditionalGeneration, dict[str, Tensor]]:
    """The oracle Qwen3-VL with random weights, all in `dtype`, and its state. fused: see `FusedRows`."""
    torch.manual_seed(seed)
    text = dataclasses.asdict(config.text)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": list(text.pop("mrope_section")),
        "mrope_interleaved": True,
    }
    del text["conditioning_layer"]
    vision = dataclasses.asdict(config.vision)
    vision["deepstack_visual_indexes"] = list(vision["deepstack_visual_indexes"])
    published = Qwen3VLConfig(
        text_config={**text, "max_position_embeddings": 4096},
        vision_config=vision,
        tie_word_embeddings=False,
        **dataclasses.asdict(config.tokens),
    )
    model = Qwen3VLForConditionalGeneration(published).eval()
    randomize(model, 0.1)
    model.to(dtype)
    # As loaded from a checkpoint: the frequencies are not stored and stay float32, which `to` does not know.
    model.model.visual.rotary_pos_emb = type(model.model.visual.rotary_pos_emb)(published.vision_config)
    model.model.language_model.rotary_emb = type(model.model.language_model.rotary_emb)(published.text_config)
    state = model.state_dict()
    if fused:
        fuse(model)
    return model, state


def transformer_groups(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Published DiT tensors -> prepared groups with fused q, k, v."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, value in _fuse(state, "attn.", ("to_q", "to_k", "to_v"), "to_qkv").items():
        if name.startswith("transformer_blocks."):
            group = f"transformer/blocks.{name.split('.')[1]}"
        elif name.startswith(("norm_out.", "proj_out.", "audio_proj_out.")):
            group = "transformer/heads"
        else:
            group = "transformer/prelude"
        groups.setdefault(group, {})[name] = value
    return groups


def conditioner_groups(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Published Qwen3-VL tensors (names from `model.` on) -> prepared groups with fused projections."""
    state = _fuse(state, "self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    state = _fuse(state, "mlp.", ("gate_proj", "up_proj"), "gate_up_proj")
    groups: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if name.startswith("model.visual."):
            groups.setdefault("text_encoder/visual", {})[name] = value
        elif name.startswith("model.language_model.layers."):
            groups.setdefault(f"text_encoder/layers.{name.split('.')[3]}", {})[name] = value
    return groups


def _fuse(state: Mapping[str, Tensor], parent: str, parts: tuple[str, ...], fused: str) -> dict[str, Tensor]:
    """Stack `<parent><part>.weight` along the rows under `<parent><fused>.weight`."""
    result = {}
    for name, value in state.items():
        if name.endswith(tuple(f"{parent}{part}.weight" for part in parts[1:])):
            continue
        if name.endswith(f"{parent}{parts[0]}.weight"):
            stem = name.removesuffix(f"{parts[0]}.weight")
            result[f"{stem}{fused}.weight"] = torch.cat([state[f"{stem}{part}.weight"] for part in parts])
        else:
            result[name] = value
    return result


def modulation_groups(
    state: Mapping[str, Tensor],
    config: TransformerConfig,
    key: str,
    plans: Sequence[adaln.TimestepPlan],
    mode: adaln.ProjectionMode = "match",
) -> dict[str, dict[str, Tensor]]:
    """Modulation tables of the plans, one condition row per evaluation (`condition_index` = 0, 1, 2, …)."""
    groups: dict[str, dict[str, Tensor]] = {}
    conditions = []
    for evaluation, plan in enumerate(plans):
        temb = adaln.timestep_embedding(torch.tensor(plan.timesteps), state, config)
        a = adaln.adaln_input(temb, state["norm_out.linear.weight"].dtype)
        sites = [f"transformer_blocks.{i}.adaln_proj.linear" for i in range(config.num_layers)]
        *blocks, final = (
            adaln.project(a, state[f"{site}.weight"], state[f"{site}.bias"], mode)
            for site in [*sites, "norm_out.linear"]
        )
        name = f"step.{evaluation:03d}"
        groups[f"adaln/{key}/{name}"] = {
            f"{name}.blocks": torch.stack([adaln.block_rows(block, plan) for block in blocks]),
            f"{name}.final": adaln.final_rows(final, plan),
        }
        if plan.condition is not None:
            conditions.append(torch.stack([adaln.condition_rows(block, plan) for block in blocks]))
    if conditions:
        groups[f"adaln/{key}/condition"] = {"condition.blocks": torch.stack(conditions, dim=1)}
    return groups


def on_meta(weights: DictWeights) -> DictWeights:
    """The same weights without data, on the meta device; gathered tables stay on the CPU as in a worker."""
    groups = {
        group: {name: value.to("meta") for name, value in tensors.items()}
        for group, tensors in weights.groups.items()
    }
    return DictWeights(groups, weights.tables)
