"""The JSON files beside the weights, with the published keys of either layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prepare.families.minimax_h3.contract import (
    CONTRACT_NAME,
    CONTRACT_SCHEMA,
    SPARSE_BACKEND,
    SPARSITY,
    TILE_ROWS,
)
from prepare.families.minimax_h3.tree import PARTITIONS, Partition
from runtime.families.minimax_h3.config import H3Config, VideoVAEConfig
from runtime.schedules import AUDIO_SHIFT, FASTH3_STEPS, FASTH3_VIDEO_SHIFT, VIDEO_SHIFT

_DIFFUSERS_VERSION = "0.42.1"
_COMPONENTS = {
    "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
    "processor": ("transformers", "Qwen3VLProcessor"),
    "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
    "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
    "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
}
# Diffusers key -> native key of the transformer configuration, where they differ.
_NATIVE_TRANSFORMER_KEYS = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}


def write_configs(
    root: Path, model: H3Config, layout: str, variant: str = "base", partition: str = "fl2va"
) -> None:
    """Write every configuration file of the tree under `root` except the tokenizer's."""
    if layout == "native":
        files = _native_files(model, PARTITIONS[partition])
    else:
        files = _diffusers_files(model, PARTITIONS[partition].diffusers, variant)
    files |= {"text_encoder/config.json": _text_encoder(model), **_processor_files(model)}
    for path, content in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        target.write_text(text, encoding="utf-8")


def _diffusers_files(model: H3Config, transformer: str, variant: str) -> dict[str, Any]:
    def component(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"_class_name": _COMPONENTS[name][1], "_diffusers_version": _DIFFUSERS_VERSION, **values}

    index = {name: list(entry) for name, entry in _COMPONENTS.items()}
    modular = {
        name: [
            *entry,
            {"type_hint": entry, "pretrained_model_name_or_path": ".", "subfolder": name, "variant": None},
        ]
        for name, entry in _COMPONENTS.items()
    }
    version = {"_diffusers_version": _DIFFUSERS_VERSION}
    is_distilled = variant == "fasth3"
    video_shift = FASTH3_VIDEO_SHIFT if is_distilled else VIDEO_SHIFT
    return {
        **({CONTRACT_NAME: _contract()} if is_distilled else {}),
        "model_index.json": {"_class_name": "MiniMaxH3Pipeline", **version, **index},
        "modular_model_index.json": {
            "_class_name": "MiniMaxH3ModularPipeline",
            **version,
            "_blocks_class_name": "MiniMaxH3Blocks",
            **modular,
        },
        f"{transformer}/config.json": component("transformer", asdict(model.transformer)),
        "vae/config.json": component("vae", asdict(model.video_vae)),
        "audio_vae/config.json": component("audio_vae", asdict(model.audio_vae)),
        "scheduler/scheduler_config.json": component("scheduler", {"shift": video_shift}),
        "audio_scheduler/scheduler_config.json": component("audio_scheduler", {"shift": AUDIO_SHIFT}),
    }


def _contract() -> dict[str, Any]:
    """The inference contract that a distilled release carries."""
    return {
        "schema_version": CONTRACT_SCHEMA,
        "model_id": "FastVideo/FastVideo-FastH3-8-Step-V2",
        "task": "t2av",
        "dmd_denoising_steps": list(FASTH3_STEPS),
        "transformer_forwards": len(FASTH3_STEPS),
        "num_inference_steps": len(FASTH3_STEPS) + 1,
        "video_scheduler_shift": FASTH3_VIDEO_SHIFT,
        "audio_scheduler_shift": AUDIO_SHIFT,
        "guidance_scale": 1.0,
        "attention_backend": SPARSE_BACKEND,
        "vsa_sparsity": SPARSITY,
        "vsa_tile_size": TILE_ROWS,
    }


def _native_files(model: H3Config, partition: Partition) -> dict[str, Any]:
    index: dict[str, Any] = {
        "_class_name": "MiniMaxH3Pipeline",
        "scheduler": None,
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "text_encoder": ["minimax_h3", "MiniMaxH3Qwen3VLHFEncoder"],
        "transformer": ["minimax_h3", "MiniMaxH3DiTModel"],
        "video_vae": ["minimax_h3", "MiniMaxH3VideoVAE"],
        "audio_vae": ["minimax_h3", "MiniMaxH3AudioVAE"],
        "_minimax_h3": {
            "schema_version": 1,
            "partition": partition.name,
            "tasks": list(partition.tasks),
            "task_aliases": {},
            "sigma_shift_scales": {"video": VIDEO_SHIFT, "audio": AUDIO_SHIFT},
        },
    }
    return {
        "model_index.json": index,
        "transformer/config.json": _native_transformer(model),
        "video_vae/config.json": _native_video_vae(model.video_vae),
        "video_vae/source/config.json": _native_video_source(model.video_vae),
        **_native_audio_files(model),
    }


def _native_transformer(model: H3Config) -> dict[str, Any]:
    c = model.transformer
    values = {
        _NATIVE_TRANSFORMER_KEYS.get(key, key): value
        for key, value in asdict(c).items()
        if key != "rope_theta"
    }
    return {
        "_class_name": "MiniMaxH3DiTModel",
        **values,
        "adaln_out_features": 18 * c.hidden_size,
        "final_adaln_out_features": 2 * c.hidden_size,
    }


def _native_video_vae(c: VideoVAEConfig) -> dict[str, Any]:
    return {
        "_class_name": "MiniMaxH3VideoVAE",
        "source_path": "source",
        "source_safetensors_path": "model.safetensors",
        "vae_clip_length": c.clip_length,
        "vae_token_drop": c.token_drop,
        "vae_encoder_tiling": 1,
        "vae_decoder_tiling": 1,
        "vae_parallel_tiling": 1,
        "vae_tile_size": 256,
        "vae_tile_overlap_min": 64,
        "latent_channels": c.latent_channels,
        "latents_mean": c.latents_mean,
        "latents_std": c.latents_std,
    }


def _native_video_source(c: VideoVAEConfig) -> dict[str, Any]:
    base = c.block_out_channels[0]
    return {
        "_class_name": "AutoencoderKLLegacy",
        "in_channels": c.in_channels,
        "out_ch": c.out_channels,
        "ch": base,
        "ch_mult": [width // base for width in c.block_out_channels],
        "num_res_blocks": c.layers_per_block,
        "z_channels": c.latent_channels,
        "embed_dim": c.latent_channels,
        "space_down": c.spatial_downsample_factors,
        "time_down": c.temporal_downsample_factors,
        "use_3d_conv": True,
        "use_vit_decoder": True,
        "causal_encoder": True,
        "causal_decoder": False,
        "use_t_isolated_gn": True,
        "padding_mode": c.spatial_padding_mode,
        "pixel_norm_type": "imagenet",
        "vit_decoder_kwargs": {
            "heads": c.decoder_num_attention_heads,
            "dim_head": c.decoder_attention_head_dim,
            "num_layers": c.decoder_num_layers,
            "norm_type": "rms_norm",
            "qk_norm_type": "rms_norm",
            "qk_norm_affine": False,
            "ffn_activation_fn": "silu",
            "ffn_use_gated": True,
            "rope_theta": c.decoder_rope_theta,
            "rope_dim_ratio": c.decoder_rope_dim_ratio,
        },
    }


def _native_audio_files(model: H3Config) -> dict[str, Any]:
    c = model.audio_vae
    kwargs = {
        "sample_rate": c.sampling_rate,
        "encoder_dim": c.encoder_dim,
        "encoder_rates": c.encoder_rates,
        "latent_dim": c.latent_dim,
        "vae_latent_channels": c.latent_channels,
        "decoder_dim": c.decoder_dim,
        "decoder_rates": c.decoder_rates,
        "decoder_type": "bigvgan",
        "attn_proj": True,
    }
    return {
        "audio_vae/config.json": {
            "_class_name": "MiniMaxH3AudioVAE",
            "latent_channels": c.latent_channels,
            "sample_rate": c.sampling_rate,
            "latents_mean": c.latents_mean,
            "latents_std": c.latents_std,
        },
        "audio_vae/metadata.json": {"metadata": {"kwargs": kwargs}},
        "audio_vae/config.yaml": f"sample_rate: {c.sampling_rate}\n",
    }


def _text_encoder(model: H3Config) -> dict[str, Any]:
    text, vision = model.text, model.vision
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        **asdict(model.tokens),
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": text.head_dim,
            "hidden_act": "silu",
            "hidden_size": text.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": text.intermediate_size,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": text.num_attention_heads,
            "num_hidden_layers": text.num_hidden_layers,
            "num_key_value_heads": text.num_key_value_heads,
            "rms_norm_eps": text.rms_norm_eps,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": text.mrope_section,
                "rope_type": "default",
            },
            "rope_theta": text.rope_theta,
            "use_cache": True,
            "vocab_size": text.vocab_size,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            **asdict(vision),
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "model_type": "qwen3_vl",
        },
    }


def _processor_files(model: H3Config) -> dict[str, Any]:
    limits = {
        "shortest_edge": model.image_processor.min_pixels,
        "longest_edge": model.image_processor.max_pixels,
    }
    patches = {
        "patch_size": model.vision.patch_size,
        "temporal_patch_size": model.vision.temporal_patch_size,
        "merge_size": model.vision.spatial_merge_size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = {
        "size": limits,
        **patches,
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    video = {
        "size": limits,
        **patches,
        "processor_class": "Qwen3VLProcessor",
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    return {"processor/preprocessor_config.json": image, "processor/video_preprocessor_config.json": video}
