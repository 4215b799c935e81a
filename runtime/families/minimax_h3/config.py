"""Sizes of the five MiniMax-H3 networks, read from the configurations that a prepared directory carries.

Field names are the published Diffusers (transformer, autoencoders) and transformers (Qwen3-VL) keys. No size is
fixed anywhere else; derived sizes are properties here. Standard library only: prepare and the request code use it
before torch exists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loader.errors import ArtifactError

T = TypeVar("T")

TAG_VIDEO, TAG_TEXT, TAG_AUDIO = 0, 1, 2
FPS = 24
CONDITION_TIMESTEP = 0.999  # keyframe rows are noised to this level and keep it (spec 4.6)


@dataclass(frozen=True)
class TransformerConfig:
    """`transformer/config.json`. D = hidden_size, A = inner_dim (attention width), P = pixels of a patch."""

    num_attention_heads: int
    attention_head_dim: int
    hidden_size: int
    num_layers: int
    num_refiner_layers: int
    ffn_dim: int
    in_channels: int
    audio_in_channels: int
    patch_size: tuple[int, int, int]
    text_dim: int
    freq_dim: int
    time_embed_hidden_dim: int
    time_embed_dim: int
    rope_freq_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def video_row_dim(self) -> int:
        """Width of a patchified video row: channels x patch volume."""
        return self.in_channels * math.prod(self.patch_size)

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head: three axes, each with `rope_freq_dim` frequencies, twice (rotate-half)."""
        return 2 * 3 * self.rope_freq_dim


@dataclass(frozen=True)
class TextConfig:
    """`text_encoder/config.json`, `text_config`. `conditioning_layer` layers are run; the rest is never prepared."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    conditioning_layer: int = 50


@dataclass(frozen=True)
class VisionConfig:
    """`text_encoder/config.json`, `vision_config`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    in_channels: int = 3


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids of the vision markers, from `text_encoder/config.json`."""

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


@dataclass(frozen=True)
class ImageProcessorConfig:
    """`processor/preprocessor_config.json`: pixel limits of the conditioner's picture resize (spec 3.5)."""

    min_pixels: int = 65_536
    max_pixels: int = 16_777_216


@dataclass(frozen=True)
class VideoVAEConfig:
    """`vae/config.json` of the Diffusers layout."""

    in_channels: int
    out_channels: int
    latent_channels: int
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    spatial_downsample_factors: tuple[int, ...]
    temporal_downsample_factors: tuple[int, ...]
    norm_num_groups: int
    norm_eps: float
    spatial_padding_mode: str
    decoder_num_layers: int
    decoder_num_attention_heads: int
    decoder_attention_head_dim: int
    decoder_num_register_tokens: int
    decoder_ffn_mult: int
    decoder_rope_theta: float
    decoder_rope_dim_ratio: float
    decoder_norm_eps: float
    clip_length: int
    token_drop: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def spatial_ratio(self) -> int:
        """Pixels per latent along height and width; 16 in the release."""
        return math.prod(self.spatial_downsample_factors)

    @property
    def temporal_ratio(self) -> int:
        """Frames per latent frame; 4 in the release."""
        return math.prod(self.temporal_downsample_factors)

    @property
    def decoder_dim(self) -> int:
        return self.decoder_num_attention_heads * self.decoder_attention_head_dim


@dataclass(frozen=True)
class AudioVAEConfig:
    """`audio_vae/config.json` of the Diffusers layout."""

    encoder_dim: int
    encoder_rates: tuple[int, ...]
    latent_dim: int
    latent_channels: int
    num_attention_heads: int
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    decoder_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    sampling_rate: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def hop_length(self) -> int:
        """Samples per latent; 800 in the release, so 40 latents a second at 32 kHz."""
        return math.prod(self.encoder_rates)


@dataclass(frozen=True)
class H3Config:
    """All component configurations of one prepared directory (`manifest.json`, key `config`)."""

    transformer: TransformerConfig
    text: TextConfig
    vision: VisionConfig
    tokens: SpecialTokens
    image_processor: ImageProcessorConfig
    video_vae: VideoVAEConfig
    audio_vae: AudioVAEConfig

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> H3Config:
        """Build from the manifest's `config`: one mapping per field of this class, same names, same keys.

        Raises: ArtifactError: a component or key is missing (lists all missing keys of the component).
        """
        parts = {field.name: field.type for field in dataclasses.fields(cls)}
        missing = sorted(set(parts) - set(config))
        if missing:
            raise ArtifactError("component configurations are missing", where="config", found=missing)
        return cls(
            transformer=_build(TransformerConfig, config["transformer"], "transformer"),
            text=_build(TextConfig, config["text"], "text"),
            vision=_build(VisionConfig, config["vision"], "vision"),
            tokens=_build(SpecialTokens, config["tokens"], "tokens"),
            image_processor=_build(ImageProcessorConfig, config["image_processor"], "image_processor"),
            video_vae=_build(VideoVAEConfig, config["video_vae"], "video_vae"),
            audio_vae=_build(AudioVAEConfig, config["audio_vae"], "audio_vae"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that `from_dict` reads."""
        return dataclasses.asdict(self)


def _build(cls: type[T], values: Mapping[str, Any], component: str) -> T:
    """Dataclass from a mapping: unknown keys are ignored (published files carry more), lists become tuples."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    missing = [f.name for f in fields if f.name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise ArtifactError("configuration keys are missing", where=f"config.{component}", found=missing)
    return cls(**{f.name: _freeze(values[f.name]) for f in fields if f.name in values})


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value
