"""Sizes of the checkpoints that `scripts.tiny_checkpoint` can write: `test`, `demo` and the released ones, `full`.

What a native checkpoint does not record is fixed by the model's code and therefore equal in every preset: 32 norm
groups, four register tokens, a decoder widening of 4, eight audio attention heads, the audio kernels (3, 7, 11).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

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
from scripts.tiny_tokenizer import special_token_ids

_MIB = 1 << 20


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of one checkpoint.

    num_base_tokens: tokenizer entries before the special ones. shard_bytes: size at which a weight file is closed.
    """

    model: H3Config
    num_base_tokens: int
    shard_bytes: int


def preset(name: str) -> TinyConfig:
    """The preset `test`, `demo` or `full`. Raises: KeyError: another name."""
    return {"test": _test, "demo": _demo, "full": _full}[name]()


def _special_tokens(num_base: int) -> SpecialTokens:
    ids = special_token_ids(num_base)
    return SpecialTokens(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _statistics(stream: str, channels: int) -> dict[str, tuple[float, ...]]:
    """Latent statistics of plausible size: means around 0, deviations between 1 and 2, all different."""
    rng = random.Random(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8]))
    return {
        "latents_mean": tuple(round(rng.uniform(-0.8, 0.8), 6) for _ in range(channels)),
        "latents_std": tuple(round(rng.uniform(1.0, 2.0), 6) for _ in range(channels)),
    }


def _test() -> TinyConfig:
    num_base = 256 + 40
    model = H3Config(
        transformer=TransformerConfig(
            num_attention_heads=2,
            attention_head_dim=32,
            hidden_size=48,
            num_layers=3,
            num_refiner_layers=2,
            ffn_dim=96,
            in_channels=4,
            audio_in_channels=8,
            patch_size=(1, 2, 2),
            text_dim=40,
            freq_dim=16,
            time_embed_hidden_dim=48,
            time_embed_dim=24,
            rope_freq_dim=4,
        ),
        text=TextConfig(
            vocab_size=352,
            hidden_size=40,
            intermediate_size=64,
            num_hidden_layers=52,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_theta=5e6,
            mrope_section=(4, 2, 2),
        ),
        vision=VisionConfig(
            depth=3,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=40,
            num_position_embeddings=64,
            deepstack_visual_indexes=(0, 1, 2),
        ),
        tokens=_special_tokens(num_base),
        image_processor=ImageProcessorConfig(min_pixels=1024, max_pixels=4_194_304),
        video_vae=_small_video_vae(latent_channels=4, heads=2, channels=(32, 32, 32, 32)),
        audio_vae=AudioVAEConfig(
            encoder_dim=4,
            encoder_rates=(2, 2),
            latent_dim=32,
            latent_channels=8,
            num_attention_heads=8,
            decoder_dim=16,
            decoder_rates=(2, 2),
            decoder_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3, 7, 11),
            resblock_dilation_sizes=((1, 3, 5),) * 3,
            sampling_rate=160,
            **_statistics("test audio", 8),
        ),
    )
    return TinyConfig(model, num_base, shard_bytes=400 * 1024)


def _demo() -> TinyConfig:
    """Real rates and ratios (32 kHz, hop 800, 16x16x4 pixels per latent), small widths."""
    num_base, small = 256 + 300, _test()
    model = replace(
        small.model,
        transformer=TransformerConfig(
            num_attention_heads=4,
            attention_head_dim=32,
            hidden_size=96,
            num_layers=4,
            num_refiner_layers=2,
            ffn_dim=192,
            in_channels=8,
            audio_in_channels=8,
            patch_size=(1, 2, 2),
            text_dim=64,
            freq_dim=32,
            time_embed_hidden_dim=96,
            time_embed_dim=48,
            rope_freq_dim=5,
        ),
        text=replace(small.model.text, vocab_size=640, hidden_size=64, intermediate_size=96),
        vision=replace(
            small.model.vision, depth=4, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=64
        ),
        tokens=_special_tokens(num_base),
        image_processor=ImageProcessorConfig(),
        video_vae=_small_video_vae(latent_channels=8, heads=4, channels=(32, 32, 64, 64)),
        audio_vae=AudioVAEConfig(
            encoder_dim=4,
            encoder_rates=(2, 4, 4, 5, 5),
            latent_dim=64,
            latent_channels=8,
            num_attention_heads=8,
            decoder_dim=64,
            decoder_rates=(5, 5, 4, 4, 2),
            decoder_kernel_sizes=(9, 9, 8, 8, 4),
            resblock_kernel_sizes=(3, 7, 11),
            resblock_dilation_sizes=((1, 3, 5),) * 3,
            sampling_rate=32_000,
            **_statistics("demo audio", 8),
        ),
    )
    return TinyConfig(model, num_base, shard_bytes=2 * _MIB)


def _small_video_vae(latent_channels: int, heads: int, channels: tuple[int, ...]) -> VideoVAEConfig:
    return VideoVAEConfig(
        in_channels=3,
        out_channels=3,
        latent_channels=latent_channels,
        block_out_channels=channels,
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2, 2),
        temporal_downsample_factors=(1, 2, 2, 1),
        norm_num_groups=32,
        norm_eps=1e-6,
        spatial_padding_mode="reflect",
        decoder_num_layers=2,
        decoder_num_attention_heads=heads,
        decoder_attention_head_dim=32,
        decoder_num_register_tokens=4,
        decoder_ffn_mult=4,
        decoder_rope_theta=100.0,
        decoder_rope_dim_ratio=0.75,
        decoder_norm_eps=1e-5,
        clip_length=17,
        token_drop=3,
        **_statistics("video", latent_channels),
    )


def _full() -> TinyConfig:
    """The released sizes: 144 GB of random weights."""
    num_base = 151_643
    model = H3Config(
        transformer=TransformerConfig(
            num_attention_heads=56,
            attention_head_dim=128,
            hidden_size=5376,
            num_layers=50,
            num_refiner_layers=2,
            ffn_dim=14_336,
            in_channels=24,
            audio_in_channels=32,
            patch_size=(1, 2, 2),
            text_dim=5120,
            freq_dim=256,
            time_embed_hidden_dim=5376,
            time_embed_dim=2688,
            rope_freq_dim=16,
        ),
        text=TextConfig(
            vocab_size=151_936,
            hidden_size=5120,
            intermediate_size=25_600,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-6,
            rope_theta=5e6,
            mrope_section=(24, 20, 20),
        ),
        vision=VisionConfig(
            depth=27,
            hidden_size=1152,
            intermediate_size=4304,
            num_heads=16,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=5120,
            num_position_embeddings=2304,
            deepstack_visual_indexes=(8, 16, 24),
        ),
        tokens=_special_tokens(num_base),
        image_processor=ImageProcessorConfig(),
        video_vae=_full_video_vae(),
        audio_vae=AudioVAEConfig(
            encoder_dim=64,
            encoder_rates=(2, 4, 4, 5, 5),
            latent_dim=2048,
            latent_channels=32,
            num_attention_heads=8,
            decoder_dim=1024,
            decoder_rates=(5, 5, 2, 2, 2, 2, 2),
            decoder_kernel_sizes=(9, 9, 4, 4, 4, 4, 4),
            resblock_kernel_sizes=(3, 7, 11),
            resblock_dilation_sizes=((1, 3, 5),) * 3,
            sampling_rate=32_000,
            **_statistics("full audio", 32),
        ),
    )
    return TinyConfig(model, num_base, shard_bytes=5 << 30)


def _full_video_vae() -> VideoVAEConfig:
    small = _small_video_vae(latent_channels=24, heads=32, channels=(128, 256, 256, 512, 512, 1024))
    return replace(
        small,
        layers_per_block=2,
        spatial_downsample_factors=(2, 2, 2, 2, 1, 1),
        temporal_downsample_factors=(1, 2, 2, 1, 1, 1),
        decoder_num_layers=36,
        decoder_attention_head_dim=64,
    )
