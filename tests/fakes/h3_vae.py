"""Tiny diffusers autoencoders of MiniMax-H3 as oracles, and their weights in the groups of a prepared directory."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from torch import Tensor

from runtime.families.minimax_h3.config import AudioVAEConfig, VideoVAEConfig
from tests.fakes.weights import DictWeights

T = TypeVar("T", VideoVAEConfig, AudioVAEConfig)

# The checkpoints and diffusers keep torch's older weight norm on purpose.
WEIGHT_NORM_WARNING = "`torch.nn.utils.weight_norm` is deprecated"

TINY_VIDEO: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": (32, 32, 32, 32),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2, 2, 2),
    "temporal_downsample_factors": (1, 2, 2, 1),
    "norm_num_groups": 8,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 32,
    "decoder_num_register_tokens": 4,
    "decoder_ffn_mult": 2,
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.5, 0.7, 1.1, 2.0],
}
TINY_AUDIO: dict[str, Any] = {
    "encoder_dim": 4,
    "encoder_rates": (2, 2),
    "latent_dim": 32,
    "latent_channels": 8,
    "num_attention_heads": 2,
    "decoder_dim": 16,
    "decoder_rates": (2, 2),
    "decoder_kernel_sizes": (4, 4),
    "resblock_kernel_sizes": (3,),
    "resblock_dilation_sizes": ((1, 3),),
    "sampling_rate": 160,
    "latents_mean": [0.1 * i - 0.3 for i in range(8)],
    "latents_std": [1.0 + 0.1 * i for i in range(8)],
}


def video_oracle(seed: int, **overrides: Any) -> Any:
    """AutoencoderKLMiniMaxH3 with random weights everywhere; scales and register tokens start at zero in diffusers and would hide the blocks."""
    torch.manual_seed(seed)
    return _randomised(AutoencoderKLMiniMaxH3(**{**TINY_VIDEO, **overrides}))  # type: ignore[no-untyped-call]


def audio_oracle(seed: int, **overrides: Any) -> Any:
    """AutoencoderKLMiniMaxH3Audio with random weights."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=WEIGHT_NORM_WARNING, category=FutureWarning)
        return _randomised(AutoencoderKLMiniMaxH3Audio(**{**TINY_AUDIO, **overrides}))  # type: ignore[no-untyped-call]


def video_parts(oracle: Any) -> tuple[VideoVAEConfig, DictWeights]:
    """Configuration and weights as the runtime sees them: grouped, `to_q`, `to_k`, `to_v` fused."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _fused(oracle.state_dict()).items():
        groups.setdefault(_video_group(name), {})[name] = tensor
    return _config(VideoVAEConfig, oracle.config), DictWeights(groups)


def audio_parts(oracle: Any) -> tuple[AudioVAEConfig, DictWeights]:
    decoder = {k: v for k, v in oracle.state_dict().items() if k.startswith(("dec_in_proj.", "decoder."))}
    return _config(AudioVAEConfig, oracle.config), DictWeights({"audio_vae/decoder": decoder})


def _randomised(model: Any) -> Any:
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "scale" in name or "register" in name or ".act." in name or tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model.requires_grad_(False).eval()


def _fused(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    fused = {}
    for name, tensor in state.items():
        if ".attn.to_q." in name:
            parts = [state[name.replace(".to_q.", f".to_{part}.")] for part in "qkv"]
            fused[name.replace(".to_q.", ".to_qkv.")] = torch.cat(parts)
        elif ".attn.to_k." not in name and ".attn.to_v." not in name:
            fused[name] = tensor
    return fused


def _video_group(name: str) -> str:
    if name.startswith(("encoder.", "quant_conv.")):
        return "vae/encoder"
    if name.startswith("decoder.transformer_blocks."):
        return f"vae/decoder.blocks.{name.split('.')[2]}"
    if name.startswith(("decoder.norm_out.", "decoder.proj_out.")):
        return "vae/decoder.heads"
    return "vae/decoder.prelude"


def _config(cls: type[T], published: Mapping[str, Any]) -> T:
    values = {field.name: published[field.name] for field in dataclasses.fields(cls)}
    return cls(**{name: _tupled(value) for name, value in values.items()})


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list | tuple) else value
