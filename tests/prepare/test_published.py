"""Published tensor lists against the oracles' own modules, at random sizes and at the released ones."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Mapping

import pytest
import torch

from prepare.families.minimax_h3.native import native_rows, native_tensors
from prepare.families.minimax_h3.published import published_tensors
from prepare.recipe import TensorSpec
from runtime.families.minimax_h3.config import H3Config
from scripts.tiny_presets import preset

pytestmark = pytest.mark.oracle


def _random_sizes(seed: int) -> H3Config:
    """The test preset with other counts and widths in every component."""
    rng, small = random.Random(seed), preset("test").model
    dit = dataclasses.replace(
        small.transformer,
        num_layers=rng.randint(1, 4),
        num_refiner_layers=rng.randint(0, 3),
        num_attention_heads=rng.randint(1, 4),
        hidden_size=rng.choice([40, 56]),
        ffn_dim=rng.choice([72, 88]),
    )
    levels = rng.choice([(2, 2), (2, 1, 2)])
    vae = dataclasses.replace(
        small.video_vae,
        block_out_channels=tuple(rng.choice([32, 64]) for _ in levels),
        spatial_downsample_factors=levels,
        temporal_downsample_factors=tuple(rng.choice([1, 2]) for _ in levels),
        layers_per_block=rng.randint(1, 3),
        decoder_num_layers=rng.randint(1, 3),
    )
    audio = dataclasses.replace(
        small.audio_vae,
        encoder_rates=(2, 3),
        decoder_rates=(3, 2),
        decoder_kernel_sizes=(5, 4),
        resblock_kernel_sizes=(3, 5),
        resblock_dilation_sizes=((1,), (1, 2, 4)),
    )
    text = dataclasses.replace(
        small.text, num_hidden_layers=rng.randint(1, 5), num_key_value_heads=rng.choice([1, 2, 4])
    )
    vision = dataclasses.replace(
        small.vision, depth=rng.randint(2, 5), deepstack_visual_indexes=(0, 1)[: rng.randint(1, 2)]
    )
    return dataclasses.replace(
        small, transformer=dit, video_vae=vae, audio_vae=audio, text=text, vision=vision
    )


CONFIGS = [pytest.param(_random_sizes(seed), id=f"seed{seed}") for seed in range(3)]
# The released counts and bytes have a quick test of their own below.
CONFIGS.append(pytest.param(preset("full").model, id="full", marks=pytest.mark.slow))


def _oracle_shapes(config: H3Config) -> dict[str, dict[str, tuple[int, ...]]]:
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = dataclasses.asdict(config.text)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": list(text.pop("mrope_section")),
        "mrope_interleaved": True,
    }
    qwen = Qwen3VLConfig(
        text_config=text, vision_config=dataclasses.asdict(config.vision), tie_word_embeddings=False
    )
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore", FutureWarning)  # the audio VAE uses the old weight norm on purpose
        modules = {
            "transformer": MiniMaxH3Transformer3DModel(**dataclasses.asdict(config.transformer)),
            "text_encoder": Qwen3VLForConditionalGeneration(qwen),
            "vae": AutoencoderKLMiniMaxH3(**dataclasses.asdict(config.video_vae)),
            "audio_vae": AutoencoderKLMiniMaxH3Audio(**dataclasses.asdict(config.audio_vae)),
        }
    return {
        component: {name: tuple(value.shape) for name, value in module.state_dict().items()}
        for component, module in modules.items()
    }


@pytest.mark.parametrize("config", CONFIGS)
def test_names_and_shapes_are_the_oracles(config: H3Config) -> None:
    ours = {c: {n: s.shape for n, s in tensors.items()} for c, tensors in published_tensors(config).items()}
    assert ours == _oracle_shapes(config)


def _sizes(tensors: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, tuple[int, int]]:
    return {c: (len(specs), sum(spec.num_bytes for spec in specs.values())) for c, specs in tensors.items()}


def test_released_sizes_have_the_released_counts_and_bytes() -> None:
    published = published_tensors(preset("full").model)
    assert _sizes(published) == {
        "transformer": (638, 66_280_430_080),
        "text_encoder": (1058, 66_714_780_128),
        "vae": (703, 10_415_475_936),
        "audio_vae": (1087, 605_306_340),
    }
    assert _sizes(native_tensors(preset("full").model, published)) == {
        "transformer": (535, 66_280_430_144),
        "text_encoder": (1058, 66_714_780_128),
        "vae": (560, 10_415_484_128),
        "audio_vae": (1087, 605_306_340),
    }


def test_only_the_published_twelve_tensors_of_the_transformer_are_float32() -> None:
    transformer = published_tensors(preset("full").model)["transformer"]
    wide = {name for name, spec in transformer.items() if spec.dtype == "F32"}
    prefixes = (
        "proj_in",
        "audio_proj_in",
        "time_embedder.linear_1",
        "time_embedder.linear_2",
        "proj_out",
        "audio_proj_out",
    )
    assert wide == {f"{prefix}.{kind}" for prefix in prefixes for kind in ("weight", "bias")}


NATIVE_NAMES = [  # component, Diffusers name, native name
    ("transformer", "proj_in.weight", "video_patch_proj.weight"),
    ("transformer", "audio_proj_in.bias", "audio_patch_proj.bias"),
    ("transformer", "context_embedder.weight", "condition_proj.weight"),
    ("transformer", "time_embedder.linear_1.weight", "time_embedder.proj_in.weight"),
    ("transformer", "time_embedder.linear_2.bias", "time_embedder.proj_out.bias"),
    ("transformer", "token_refiner.refiner_blocks.1.norm1.weight", "token_refiner.blocks.1.norm1.weight"),
    (
        "transformer",
        "token_refiner.refiner_blocks.0.attn.to_v.weight",
        "token_refiner.blocks.0.attn.qkv_proj.weight",
    ),
    ("transformer", "token_refiner.final_norm.weight", "token_refiner.final_norm.weight"),
    ("transformer", "transformer_blocks.2.attn.to_q.weight", "blocks.2.attn.qkv_proj.weight"),
    ("transformer", "transformer_blocks.2.attn.norm_q.weight", "blocks.2.attn.q_norm.weight"),
    ("transformer", "transformer_blocks.2.attn.norm_k.weight", "blocks.2.attn.k_norm.weight"),
    ("transformer", "transformer_blocks.2.attn.to_out.0.weight", "blocks.2.attn.out_proj.weight"),
    ("transformer", "transformer_blocks.2.ff.net.0.proj.weight", "blocks.2.mlp.fc1.weight"),
    ("transformer", "transformer_blocks.2.ff.net.2.weight", "blocks.2.mlp.fc2.weight"),
    ("transformer", "transformer_blocks.2.adaln_proj.linear.bias", "blocks.2.adaln_proj.linear.bias"),
    ("transformer", "norm_out.norm.weight", "final_layer.norm.weight"),
    ("transformer", "norm_out.linear.weight", "final_layer.adaln_proj.linear.weight"),
    ("transformer", "proj_out.bias", "final_layer.video_out.bias"),
    ("transformer", "audio_proj_out.weight", "final_layer.audio_out.weight"),
    ("vae", "encoder.conv_in.weight", "encoder.conv_in.weight"),
    ("vae", "encoder.down_blocks.2.resnets.0.conv1.weight", "encoder.down.2.block.0.conv1.weight"),
    ("vae", "encoder.down_blocks.0.downsamplers.0.conv.bias", "encoder.down.0.downsample.conv.bias"),
    ("vae", "quant_conv.weight", "quant_conv.weight"),
    ("vae", "decoder.proj_in.weight", "decoder.x_embedder.weight"),
    ("vae", "decoder.transformer_blocks.1.attn.to_k.bias", "decoder.transformer_blocks.1.attn.to_qkv.bias"),
    (
        "vae",
        "decoder.transformer_blocks.1.attn.to_out.0.weight",
        "decoder.transformer_blocks.1.attn.to_out.weight",
    ),
    ("vae", "decoder.transformer_blocks.1.ff.net.0.proj.bias", "decoder.transformer_blocks.1.ff.w1.bias"),
    ("vae", "decoder.transformer_blocks.1.ff.net.2.weight", "decoder.transformer_blocks.1.ff.w2.weight"),
    ("vae", "decoder.transformer_blocks.1.scale1", "decoder.transformer_blocks.1.scale1"),
    ("vae", "decoder.proj_out.weight", "decoder.proj_out.weight"),
    ("audio_vae", "decoder.ups.0.0.weight_v", "decoder.ups.0.0.weight_v"),
    ("text_encoder", "model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"),
]


@pytest.mark.parametrize(("component", "name", "native"), NATIVE_NAMES, ids=[row[1] for row in NATIVE_NAMES])
def test_native_name(component: str, name: str, native: str) -> None:
    config = preset("test").model
    rows = native_rows(component, name, published_tensors(config)[component][name], config)
    assert {row.tensor for row in rows} == {native}


def test_native_shortcut_name() -> None:
    config = preset("demo").model  # its third level widens
    name = "encoder.down_blocks.2.resnets.0.conv_shortcut.weight"
    rows = native_rows("vae", name, published_tensors(config)["vae"][name], config)
    assert [row.tensor for row in rows] == ["encoder.down.2.block.0.nin_shortcut.weight"]
