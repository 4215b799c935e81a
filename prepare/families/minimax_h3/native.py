"""The native MiniMax-H3 layout: which native rows make up a Diffusers tensor.

Three things differ beyond names. Native q, k, v are one matrix, interleaved per head; the native gated matrix is
[gate; up] where Diffusers has [up; gate]; `rope.inv_freq` and `decoder.mask_token` exist only here. Nothing is
transposed. Names as in the published checkpoint; text encoder and audio VAE are the same in both layouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from prepare.families.minimax_h3.published import TRANSFORMER, VIDEO_VAE
from prepare.recipe import Rows, TensorSpec
from runtime.families.minimax_h3.config import H3Config

# Diffusers prefix -> native prefix; the first match is applied.
_TRANSFORMER_PREFIXES = (
    ("proj_in.", "video_patch_proj."),
    ("audio_proj_in.", "audio_patch_proj."),
    ("context_embedder.", "condition_proj."),
    ("time_embedder.linear_1.", "time_embedder.proj_in."),
    ("time_embedder.linear_2.", "time_embedder.proj_out."),
    ("token_refiner.refiner_blocks.", "token_refiner.blocks."),
    ("transformer_blocks.", "blocks."),
    ("norm_out.norm.", "final_layer.norm."),
    ("norm_out.linear.", "final_layer.adaln_proj.linear."),
    ("proj_out.", "final_layer.video_out."),
    ("audio_proj_out.", "final_layer.audio_out."),
)
_TRANSFORMER_PARTS = (
    (".attn.norm_q.", ".attn.q_norm."),
    (".attn.norm_k.", ".attn.k_norm."),
    (".attn.to_out.0.", ".attn.out_proj."),
    (".ff.net.0.proj.", ".mlp.fc1."),
    (".ff.net.2.", ".mlp.fc2."),
)
_VIDEO_VAE_PARTS = (
    ("encoder.down_blocks.", "encoder.down."),
    (".resnets.", ".block."),
    (".conv_shortcut.", ".nin_shortcut."),
    (".downsamplers.0.", ".downsample."),
    ("decoder.proj_in.", "decoder.x_embedder."),
    (".attn.to_out.0.", ".attn.to_out."),
    (".ff.net.0.proj.", ".ff.w1."),
    (".ff.net.2.", ".ff.w2."),
)
_QKV = re.compile(r"(.*\.attn\.)to_([qkv])(\.(?:weight|bias))")


def native_rows(component: str, name: str, spec: TensorSpec, config: H3Config) -> tuple[Rows, ...]:
    """Native row ranges that, one after the other, are the Diffusers tensor `name` of `component`."""
    if component == TRANSFORMER:
        fused, heads, head_dim = (
            "qkv_proj",
            config.transformer.num_attention_heads,
            config.transformer.attention_head_dim,
        )
    elif component == VIDEO_VAE:
        vae = config.video_vae
        fused, heads, head_dim = "to_qkv", vae.decoder_num_attention_heads, vae.decoder_attention_head_dim
    else:
        return (Rows(component, name, 0, spec.shape[0]),)
    native = native_name(component, name)
    if match := _QKV.fullmatch(native):
        slot = "qkv".index(match[2])
        starts = [(3 * head + slot) * head_dim for head in range(heads)]
        return tuple(Rows(component, f"{match[1]}{fused}{match[3]}", s, s + head_dim) for s in starts)
    num_rows = spec.shape[0]
    if ".ff.net.0.proj." in name:
        half = num_rows // 2
        return (Rows(component, native, half, num_rows), Rows(component, native, 0, half))
    return (Rows(component, native, 0, num_rows),)


def native_tensors(
    config: H3Config, published: Mapping[str, Mapping[str, TensorSpec]]
) -> dict[str, dict[str, TensorSpec]]:
    """Component -> tensor -> spec with native names, derived from the Diffusers list."""
    result: dict[str, dict[str, TensorSpec]] = {}
    for component, tensors in published.items():
        num_rows: dict[str, int] = {}
        like: dict[str, TensorSpec] = {}
        for name, spec in tensors.items():
            for rows in native_rows(component, name, spec, config):
                num_rows[rows.tensor] = max(num_rows.get(rows.tensor, 0), rows.stop)
                like[rows.tensor] = spec
        result[component] = {
            name: TensorSpec(spec.dtype, (num_rows[name], *spec.shape[1:])) for name, spec in like.items()
        }
    result[TRANSFORMER]["rope.inv_freq"] = TensorSpec("F32", (config.transformer.rope_freq_dim,))
    result[VIDEO_VAE]["decoder.mask_token"] = TensorSpec("F32", (1, 1, config.video_vae.decoder_dim))
    return result


def native_name(component: str, name: str) -> str:
    """Native name of a Diffusers tensor of transformer or video VAE; q, k and v are not separate there."""
    if component == VIDEO_VAE:
        for diffusers, native in _VIDEO_VAE_PARTS:
            name = name.replace(diffusers, native)
        return name
    for diffusers, native in _TRANSFORMER_PREFIXES:
        if name.startswith(diffusers):
            name = native + name.removeprefix(diffusers)
            break
    for diffusers, native in _TRANSFORMER_PARTS:
        name = name.replace(diffusers, native)
    return name
