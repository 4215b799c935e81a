"""Published tensors of the four MiniMax-H3 networks by their Diffusers/transformers names, derived from a config.

Insertion order is the order of use. At the released sizes: 638 + 1,058 + 703 + 1,087 tensors. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

from prepare.recipe import TensorSpec
from runtime.families.minimax_h3.config import (
    AudioVAEConfig,
    H3Config,
    TextConfig,
    TransformerConfig,
    VideoVAEConfig,
    VisionConfig,
)

TRANSFORMER, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE = "transformer", "text_encoder", "vae", "audio_vae"

_MODALITIES, _TERMS = 3, 6  # an AdaLN projection yields six vectors for each of three row kinds
_AUDIO_DILATIONS = (1, 3, 9)  # residual units of one audio encoder block
_FILTER_TAPS = 12

Named = Iterator[tuple[str, TensorSpec]]


def published_tensors(config: H3Config, *, gated: bool = False) -> dict[str, dict[str, TensorSpec]]:
    """Component folder -> tensor -> spec, Diffusers layout.

    gated: the DiT's blocks (not the refiner's) have the gate of a compressed attention branch.
    """
    return {
        TEXT_ENCODER: dict(_text_encoder(config.text, config.vision)),
        TRANSFORMER: dict(_transformer(config.transformer, gated)),
        VIDEO_VAE: dict(_video_vae(config.video_vae)),
        AUDIO_VAE: dict(_audio_vae(config.audio_vae)),
    }


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec("BF16", shape)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec("F32", shape)


def _affine(prefix: str, weight: TensorSpec, num_outputs: int) -> Named:
    yield f"{prefix}.weight", weight
    yield f"{prefix}.bias", TensorSpec(weight.dtype, (num_outputs,))


def _transformer(c: TransformerConfig, gated: bool) -> Named:
    D = c.hidden_size
    yield from _affine("proj_in", _f32(D, c.video_row_dim), D)
    yield from _affine("audio_proj_in", _f32(D, c.audio_in_channels), D)
    yield from _affine("context_embedder", _bf16(D, c.text_dim), D)
    yield from _affine(
        "time_embedder.linear_1", _f32(c.time_embed_hidden_dim, c.freq_dim), c.time_embed_hidden_dim
    )
    yield from _affine(
        "time_embedder.linear_2", _f32(c.time_embed_dim, c.time_embed_hidden_dim), c.time_embed_dim
    )
    for i in range(c.num_refiner_layers):
        yield from _dit_block(f"token_refiner.refiner_blocks.{i}", c)
    yield "token_refiner.final_norm.weight", _bf16(D)
    for i in range(c.num_layers):
        yield from _dit_block(f"transformer_blocks.{i}", c, gated)
        out = _MODALITIES * _TERMS * D
        yield from _affine(f"transformer_blocks.{i}.adaln_proj.linear", _bf16(out, c.time_embed_dim), out)
    yield "norm_out.norm.weight", _bf16(D)
    yield from _affine("norm_out.linear", _bf16(2 * D, c.time_embed_dim), 2 * D)
    yield from _affine("proj_out", _f32(c.video_row_dim, D), c.video_row_dim)
    yield from _affine("audio_proj_out", _f32(c.audio_in_channels, D), c.audio_in_channels)


def _dit_block(prefix: str, c: TransformerConfig, gated: bool = False) -> Named:
    D, A = c.hidden_size, c.inner_dim
    yield f"{prefix}.norm1.weight", _bf16(D)
    for part in ("to_q", "to_k", "to_v"):
        yield f"{prefix}.attn.{part}.weight", _bf16(A, D)
    if gated:  # reads what q, k and v read; rows by head like them
        yield f"{prefix}.attn.to_gate_compress.weight", _bf16(A, D)
    yield f"{prefix}.attn.norm_q.weight", _bf16(c.attention_head_dim)
    yield f"{prefix}.attn.norm_k.weight", _bf16(c.attention_head_dim)
    yield f"{prefix}.attn.to_out.0.weight", _bf16(D, A)
    yield f"{prefix}.norm2.weight", _bf16(D)
    yield f"{prefix}.ff.net.0.proj.weight", _bf16(2 * c.ffn_dim, D)
    yield f"{prefix}.ff.net.2.weight", _bf16(D, c.ffn_dim)


def _text_encoder(text: TextConfig, vision: VisionConfig) -> Named:
    yield "model.language_model.embed_tokens.weight", _bf16(text.vocab_size, text.hidden_size)
    for i in range(text.num_hidden_layers):
        yield from _text_layer(f"model.language_model.layers.{i}", text)
    yield "model.language_model.norm.weight", _bf16(text.hidden_size)
    yield "lm_head.weight", _bf16(text.vocab_size, text.hidden_size)
    yield from _vision_tower(vision)


def _text_layer(prefix: str, c: TextConfig) -> Named:
    D, K = c.hidden_size, c.head_dim
    yield f"{prefix}.input_layernorm.weight", _bf16(D)
    for part, heads in (
        ("q_proj", c.num_attention_heads),
        ("k_proj", c.num_key_value_heads),
        ("v_proj", c.num_key_value_heads),
    ):
        yield f"{prefix}.self_attn.{part}.weight", _bf16(heads * K, D)
    yield f"{prefix}.self_attn.q_norm.weight", _bf16(K)
    yield f"{prefix}.self_attn.k_norm.weight", _bf16(K)
    yield f"{prefix}.self_attn.o_proj.weight", _bf16(D, c.num_attention_heads * K)
    yield f"{prefix}.post_attention_layernorm.weight", _bf16(D)
    yield f"{prefix}.mlp.gate_proj.weight", _bf16(c.intermediate_size, D)
    yield f"{prefix}.mlp.up_proj.weight", _bf16(c.intermediate_size, D)
    yield f"{prefix}.mlp.down_proj.weight", _bf16(D, c.intermediate_size)


def _vision_tower(c: VisionConfig) -> Named:
    D, merged = c.hidden_size, c.hidden_size * c.spatial_merge_size**2
    root = "model.visual"
    patch = _bf16(D, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
    yield from _affine(f"{root}.patch_embed.proj", patch, D)
    yield f"{root}.pos_embed.weight", _bf16(c.num_position_embeddings, D)
    for i in range(c.depth):
        block = f"{root}.blocks.{i}"
        yield from _affine(f"{block}.norm1", _bf16(D), D)
        yield from _affine(f"{block}.attn.qkv", _bf16(3 * D, D), 3 * D)
        yield from _affine(f"{block}.attn.proj", _bf16(D, D), D)
        yield from _affine(f"{block}.norm2", _bf16(D), D)
        yield from _affine(f"{block}.mlp.linear_fc1", _bf16(c.intermediate_size, D), c.intermediate_size)
        yield from _affine(f"{block}.mlp.linear_fc2", _bf16(D, c.intermediate_size), D)
    # The final merger normalises before the 2x2 merge, the DeepStack mergers after it.
    mergers = [(f"{root}.deepstack_merger_list.{i}", merged) for i in range(len(c.deepstack_visual_indexes))]
    for merger, width in [*mergers, (f"{root}.merger", D)]:
        yield from _affine(f"{merger}.norm", _bf16(width), width)
        yield from _affine(f"{merger}.linear_fc1", _bf16(merged, merged), merged)
        yield from _affine(f"{merger}.linear_fc2", _bf16(c.out_hidden_size, merged), c.out_hidden_size)


def _video_vae(c: VideoVAEConfig) -> Named:
    yield from _conv3d("encoder.conv_in", c.in_channels, c.block_out_channels[0], 3)
    width = c.block_out_channels[0]
    for level, out in enumerate(c.block_out_channels):
        block = f"encoder.down_blocks.{level}"
        for j in range(c.layers_per_block):
            yield from _video_residual(f"{block}.resnets.{j}", width, out)
            width = out
        if c.spatial_downsample_factors[level] * c.temporal_downsample_factors[level] > 1:
            yield from _conv3d(f"{block}.downsamplers.0.conv", out, out, 3)
    yield from _affine("encoder.norm_out", _f32(width), width)
    yield from _conv3d("encoder.conv_out", width, 2 * c.latent_channels, 3)
    yield from _conv3d("quant_conv", 2 * c.latent_channels, 2 * c.latent_channels, 1)
    yield from _conv3d("post_quant_conv", c.latent_channels, c.latent_channels, 1)
    D = c.decoder_dim
    yield from _affine("decoder.proj_in", _f32(D, c.latent_channels), D)
    yield "decoder.register_tokens", _f32(1, c.decoder_num_register_tokens, D)
    for i in range(c.decoder_num_layers):
        yield from _video_decoder_block(f"decoder.transformer_blocks.{i}", D, D * c.decoder_ffn_mult)
    yield from _affine("decoder.norm_out", _f32(D), D)
    pixels = c.out_channels * c.temporal_ratio * c.spatial_ratio**2
    yield from _affine("decoder.proj_out", _f32(pixels, D), pixels)


def _conv3d(prefix: str, inputs: int, outputs: int, kernel: int) -> Named:
    yield from _affine(prefix, _f32(outputs, inputs, kernel, kernel, kernel), outputs)


def _video_residual(prefix: str, inputs: int, outputs: int) -> Named:
    yield from _affine(f"{prefix}.norm1", _f32(inputs), inputs)
    yield from _conv3d(f"{prefix}.conv1", inputs, outputs, 3)
    yield from _affine(f"{prefix}.norm2", _f32(outputs), outputs)
    yield from _conv3d(f"{prefix}.conv2", outputs, outputs, 3)
    if inputs != outputs:
        yield from _conv3d(f"{prefix}.conv_shortcut", inputs, outputs, 1)


def _video_decoder_block(prefix: str, D: int, inner: int) -> Named:
    yield f"{prefix}.norm1.weight", _f32(D)
    for part in ("to_q", "to_k", "to_v", "to_out.0"):
        yield from _affine(f"{prefix}.attn.{part}", _f32(D, D), D)
    yield f"{prefix}.scale1", _f32(D)
    yield f"{prefix}.norm2.weight", _f32(D)
    yield from _affine(f"{prefix}.ff.net.0.proj", _f32(2 * inner, D), 2 * inner)
    yield from _affine(f"{prefix}.ff.net.2", _f32(D, inner), D)
    yield f"{prefix}.scale2", _f32(D)


def _audio_vae(c: AudioVAEConfig) -> Named:
    yield from _audio_encoder(c)
    yield from _audio_pre_block(c.latent_dim, c.latent_channels)
    for head in ("mean_proj", "logs_proj"):
        yield from _affine(head, _f32(c.latent_channels, c.latent_channels, 1), c.latent_channels)
    yield from _affine("dec_in_proj", _f32(c.latent_dim, c.latent_channels, 1), c.latent_dim)
    yield from _audio_decoder(c)


def _normed_conv(prefix: str, shape: tuple[int, int, int], num_outputs: int) -> Named:
    """Weight-normalised 1-D convolution: norm over all dimensions but the first; 0 outputs = no bias."""
    if num_outputs:
        yield f"{prefix}.bias", _f32(num_outputs)
    yield f"{prefix}.weight_g", _f32(shape[0], 1, 1)
    yield f"{prefix}.weight_v", _f32(*shape)


def _audio_encoder(c: AudioVAEConfig) -> Named:
    width = c.encoder_dim
    yield from _normed_conv("encoder.block.0", (width, 1, 7), width)
    for number, stride in enumerate(c.encoder_rates, start=1):
        block = f"encoder.block.{number}.block"
        for unit in range(len(_AUDIO_DILATIONS)):
            residual = f"{block}.{unit}.block"
            yield f"{residual}.0.alpha", _f32(1, width, 1)
            yield from _normed_conv(f"{residual}.1", (width, width, 7), width)
            yield f"{residual}.2.alpha", _f32(1, width, 1)
            yield from _normed_conv(f"{residual}.3", (width, width, 1), width)
        yield f"{block}.3.alpha", _f32(1, width, 1)
        yield from _normed_conv(f"{block}.4", (2 * width, width, 2 * stride), 2 * width)
        width *= 2
    last = len(c.encoder_rates) + 1
    yield f"encoder.block.{last}.alpha", _f32(1, width, 1)
    yield from _normed_conv(f"encoder.block.{last + 1}", (c.latent_dim, width, 3), c.latent_dim)


def _audio_pre_block(width: int, channels: int) -> Named:
    root = "pre_block"
    yield from _affine(f"{root}.norm1", _f32(width), width)
    for name in ("q_bias", "v_bias", "zero_k_bias"):
        yield f"{root}.attn.{name}", _f32(width)
    yield f"{root}.attn.qkv.weight", _f32(3 * width, width)
    yield from _affine(f"{root}.attn.proj", _f32(channels, channels), channels)
    yield from _affine(f"{root}.proj", _f32(channels, width), channels)
    yield from _affine(f"{root}.norm3", _f32(width), width)
    yield from _affine(f"{root}.norm2", _f32(channels), channels)
    yield from _affine(f"{root}.mlp.norm", _f32(channels), channels)
    for name in ("w0", "w1"):
        yield from _affine(f"{root}.mlp.{name}", _f32(2 * channels, channels), 2 * channels)
    yield from _affine(f"{root}.mlp.w2", _f32(channels, 2 * channels), channels)


def _audio_decoder(c: AudioVAEConfig) -> Named:
    width = c.decoder_dim
    yield from _normed_conv("decoder.conv_pre", (width, c.latent_dim, 7), width)
    num_kernels = len(c.resblock_kernel_sizes)
    for i, kernel in enumerate(c.decoder_kernel_sizes):
        # A transposed convolution stores its input channels first.
        yield from _normed_conv(f"decoder.ups.{i}.0", (width, width // 2, kernel), width // 2)
        width //= 2
        for j in range(num_kernels):
            yield from _amp_block(f"decoder.resblocks.{i * num_kernels + j}", width, j, c)
    yield from _alias_free_activation("decoder.activation_post", width)
    yield from _normed_conv("decoder.conv_post", (1, width, 7), 0)


def _amp_block(prefix: str, width: int, kernel_index: int, c: AudioVAEConfig) -> Named:
    kernel = c.resblock_kernel_sizes[kernel_index]
    num_dilations = len(c.resblock_dilation_sizes[kernel_index])
    for convs in ("convs1", "convs2"):
        for d in range(num_dilations):
            yield from _normed_conv(f"{prefix}.{convs}.{d}", (width, width, kernel), width)
    for a in range(2 * num_dilations):
        yield from _alias_free_activation(f"{prefix}.activations.{a}", width)


def _alias_free_activation(prefix: str, width: int) -> Named:
    yield f"{prefix}.act.alpha", _f32(width)
    yield f"{prefix}.act.beta", _f32(width)
    yield f"{prefix}.upsample.filter", _f32(1, 1, _FILTER_TAPS)
    yield f"{prefix}.downsample.lowpass.filter", _f32(1, 1, _FILTER_TAPS)
