"""The configuration files of either published layout → one `H3Config` and the sigma shifts that the checkpoint states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.errors import ArtifactError
from prepare.checkpoint import read_json
from prepare.families.minimax_h3.contract import check_scheduler_shifts, check_shift
from prepare.families.minimax_h3.tree import DIFFUSERS, SourceTree
from runtime.families.minimax_h3.config import H3Config
from runtime.schedules import AUDIO_SHIFT, VIDEO_SHIFT

_COMMON_FILES = (
    "text_encoder/config.json",
    "processor/preprocessor_config.json",
    "audio_vae/config.json",
    "model_index.json",
)
_LAYOUT_FILES = {
    DIFFUSERS: (
        "vae/config.json",
        "scheduler/scheduler_config.json",
        "audio_scheduler/scheduler_config.json",
    ),
    "native": ("video_vae/config.json", "video_vae/source/config.json", "audio_vae/metadata.json"),
}
_NATIVE_TRANSFORMER_KEYS = {
    "num_refiner_layers": "token_refiner_num_layers",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "rope_freq_dim": "rope_inv_freq_len",
}
# What the native files leave to the model's code.
_NATIVE_VIDEO_FIXED = {
    "norm_num_groups": 32,
    "norm_eps": 1e-6,
    "decoder_num_register_tokens": 4,
    "decoder_ffn_mult": 4,
    "decoder_norm_eps": 1e-5,
}
_NATIVE_AUDIO_FIXED = {
    "num_attention_heads": 8,
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
}


def config_paths(tree: SourceTree) -> list[Path]:
    """Every configuration file that `read_config` reads, in a fixed order."""
    names = (*_COMMON_FILES, tree.transformer_config, *_LAYOUT_FILES[tree.layout])
    return [tree.root / name for name in names]


def read_config(tree: SourceTree) -> H3Config:
    """Sizes of all networks. Raises: ArtifactError: a file or key is missing, or two files contradict each other."""
    text = _load(tree, "text_encoder/config.json")
    is_native = tree.layout != DIFFUSERS
    config = {
        "transformer": _native_transformer(tree) if is_native else _load(tree, tree.transformer_config),
        "text": _text(text),
        "vision": _sub(text, "vision_config", "text_encoder/config.json"),
        "tokens": text,
        "image_processor": _image_processor(tree),
        "video_vae": _native_video_vae(tree) if is_native else _load(tree, "vae/config.json"),
        "audio_vae": _native_audio_vae(tree) if is_native else _load(tree, "audio_vae/config.json"),
    }
    model = H3Config.from_dict(config)
    _check_widths(model)
    return model


def check_shifts(tree: SourceTree) -> None:
    """The base schedules' shifts must be the checkpoint's own. Raises: ArtifactError."""
    if tree.layout == DIFFUSERS:
        check_scheduler_shifts(tree.root, VIDEO_SHIFT, AUDIO_SHIFT, stated_by="the base schedule")
        return
    block = _sub(_load(tree, "model_index.json"), "_minimax_h3", "model_index.json")
    scales = _sub(block, "sigma_shift_scales", "model_index.json: _minimax_h3")
    for stream, shift in (("video", VIDEO_SHIFT), ("audio", AUDIO_SHIFT)):
        where = f"model_index.json: sigma_shift_scales.{stream}"
        check_shift(scales.get(stream), shift, where, "the base schedule")


def _load(tree: SourceTree, path: str) -> dict[str, Any]:
    return read_json(tree.root / path, path)


def _sub(table: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = table.get(key)
    if not isinstance(value, dict):
        raise ArtifactError("object is missing", where=f"{where}: {key}", found=type(value).__name__)
    return value


def _need(table: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in table:
        raise ArtifactError("configuration key is missing", where=where, found=key)
    return table[key]


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """`text_config` with the rotary settings lifted out of where this version of the file keeps them."""
    text = _sub(config, "text_config", "text_encoder/config.json")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    where = "text_encoder/config.json: text_config: rope"
    if not isinstance(rope, dict):
        raise ArtifactError("not an object", where=where, found=type(rope).__name__)
    theta = rope.get("rope_theta", text.get("rope_theta"))
    if theta is None:
        raise ArtifactError("configuration key is missing", where=where, found="rope_theta")
    return {**text, "rope_theta": theta, "mrope_section": _need(rope, "mrope_section", where)}


def _image_processor(tree: SourceTree) -> dict[str, Any]:
    """Pixel limits; `size` is the newer spelling of `min_pixels` and `max_pixels`."""
    config = _load(tree, "processor/preprocessor_config.json")
    size = config.get("size") or {}
    limits = {
        "min_pixels": config.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": config.get("max_pixels") or size.get("longest_edge"),
    }
    return {key: value for key, value in limits.items() if value is not None}


def _native_transformer(tree: SourceTree) -> dict[str, Any]:
    config = _load(tree, tree.transformer_config)
    renamed = {
        name: _need(config, native, tree.transformer_config)
        for name, native in _NATIVE_TRANSFORMER_KEYS.items()
    }
    return {**config, **renamed}


def _native_video_vae(tree: SourceTree) -> dict[str, Any]:
    outer_path, inner_path = "video_vae/config.json", "video_vae/source/config.json"
    outer, inner = _load(tree, outer_path), _load(tree, inner_path)
    decoder = _sub(inner, "vit_decoder_kwargs", inner_path)
    base = _need(inner, "ch", inner_path)
    if inner.get("z_channels") != outer.get("latent_channels"):
        raise ArtifactError(
            "latent width differs",
            where=f"{inner_path}: z_channels",
            found=inner.get("z_channels"),
            expected=f"{outer.get('latent_channels')}, as in {outer_path}",
        )
    return {
        **_NATIVE_VIDEO_FIXED,
        "in_channels": inner.get("in_channels", 3),
        "out_channels": _need(inner, "out_ch", inner_path),
        "latent_channels": _need(inner, "z_channels", inner_path),
        "block_out_channels": [base * factor for factor in _need(inner, "ch_mult", inner_path)],
        "layers_per_block": _need(inner, "num_res_blocks", inner_path),
        "spatial_downsample_factors": _need(inner, "space_down", inner_path),
        "temporal_downsample_factors": _need(inner, "time_down", inner_path),
        "spatial_padding_mode": _need(inner, "padding_mode", inner_path),
        "decoder_num_layers": _need(decoder, "num_layers", inner_path),
        "decoder_num_attention_heads": _need(decoder, "heads", inner_path),
        "decoder_attention_head_dim": _need(decoder, "dim_head", inner_path),
        "decoder_rope_theta": float(_need(decoder, "rope_theta", inner_path)),
        "decoder_rope_dim_ratio": _need(decoder, "rope_dim_ratio", inner_path),
        "clip_length": _need(outer, "vae_clip_length", outer_path),
        "token_drop": _need(outer, "vae_token_drop", outer_path),
        "latents_mean": _need(outer, "latents_mean", outer_path),
        "latents_std": _need(outer, "latents_std", outer_path),
    }


def _native_audio_vae(tree: SourceTree) -> dict[str, Any]:
    outer_path, inner_path = "audio_vae/config.json", "audio_vae/metadata.json"
    outer = _load(tree, outer_path)
    inner = _sub(_sub(_load(tree, inner_path), "metadata", inner_path), "kwargs", inner_path)
    for key, other in (("vae_latent_channels", "latent_channels"), ("sample_rate", "sample_rate")):
        if inner.get(key) != outer.get(other):
            raise ArtifactError(
                "two files disagree",
                where=f"{inner_path}: {key}",
                found=inner.get(key),
                expected=f"{outer.get(other)}, as in {outer_path}",
            )
    rates = _need(inner, "decoder_rates", inner_path)
    return {
        **_NATIVE_AUDIO_FIXED,
        **{
            key: _need(inner, key, inner_path)
            for key in ("encoder_dim", "encoder_rates", "latent_dim", "decoder_dim")
        },
        "latent_channels": _need(inner, "vae_latent_channels", inner_path),
        "decoder_rates": rates,
        "decoder_kernel_sizes": [2 * rate - rate % 2 for rate in rates],
        "sampling_rate": _need(inner, "sample_rate", inner_path),
        "latents_mean": _need(outer, "latents_mean", outer_path),
        "latents_std": _need(outer, "latents_std", outer_path),
    }


def _check_widths(model: H3Config) -> None:
    """Widths that one network hands to another."""
    pairs = (
        ("transformer.in_channels", model.transformer.in_channels, model.video_vae.latent_channels),
        (
            "transformer.audio_in_channels",
            model.transformer.audio_in_channels,
            model.audio_vae.latent_channels,
        ),
        ("transformer.text_dim", model.transformer.text_dim, model.text.hidden_size),
        ("vision.out_hidden_size", model.vision.out_hidden_size, model.text.hidden_size),
    )
    wrong = [
        f"{name} is {found}, its partner's width {expected}"
        for name, found, expected in pairs
        if found != expected
    ]
    if model.text.num_hidden_layers < model.text.conditioning_layer:
        wrong.append(
            f"text encoder has {model.text.num_hidden_layers} layers, needs {model.text.conditioning_layer}"
        )
    if wrong:
        raise ArtifactError("components do not fit together", where="config", found="; ".join(wrong))
