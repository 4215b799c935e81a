"""What a prepared MiniMax-H3 directory holds: groups in file order, fused tensors, order of use, what is left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepare.families.minimax_h3.native import native_rows, native_tensors
from prepare.families.minimax_h3.published import (
    AUDIO_VAE,
    TEXT_ENCODER,
    TRANSFORMER,
    VIDEO_VAE,
    published_tensors,
)
from prepare.families.minimax_h3.tree import NATIVE
from prepare.recipe import OutputGroup, OutputTensor, Recipe, Rows, TensorSpec
from runtime.families.minimax_h3.config import H3Config

EMBEDDING = "text_encoder_embed"
REFERENCE_TASK = "ref2va"
PICTURE_TASKS = frozenset({"fl2va", REFERENCE_TASK})
LAYOUT = {"qkv": "q,k,v", "glu": "up,gate"}

# New name -> published Diffusers names whose rows follow each other in it. {} stands for "weight" or "bias".
_FUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    TRANSFORMER: {"attn.to_qkv.{}": ("attn.to_q.{}", "attn.to_k.{}", "attn.to_v.{}")},
    VIDEO_VAE: {"attn.to_qkv.{}": ("attn.to_q.{}", "attn.to_k.{}", "attn.to_v.{}")},
    TEXT_ENCODER: {
        "self_attn.qkv_proj.{}": ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}"),
        "mlp.gate_up_proj.{}": ("mlp.gate_proj.{}", "mlp.up_proj.{}"),
    },
}

_BLOCK_LINEAR = re.compile(
    r"decoder\.transformer_blocks\.\d+\.(attn\.to_qkv|attn\.to_out\.0|ff\.net\.0\.proj|ff\.net\.2)\.(weight|bias)"
)


@dataclass(frozen=True)
class _Place:
    """Which tensors a group takes: those whose published name starts with one of `prefixes`, unless excluded."""

    group: str | None
    component: str
    source: str
    prefixes: tuple[str, ...]
    needed_by: str
    excluded: tuple[str, ...] = ()


def build_recipe(
    config: H3Config,
    layout: str,
    tasks: Collection[str],
    dtype: str,
    vae_linears: str = "F32",
    *,
    gated: bool = False,
) -> Recipe:
    """Everything prepare writes for `tasks`.

    Args:
        layout: of the checkpoint, `"native"` or `"diffusers"`; output names and bytes do not depend on it.
        dtype: `"BF16"` keeps the published types; `"F32"` stores every tensor as float32.
        gated: the DiT has `to_gate_compress` matrices.
        vae_linears: of the video decoder's block linears, `"F32"` as published or `"F16"`; not with `dtype` `"F32"`.
    """
    logical = published_tensors(config, gated=gated)
    published = native_tensors(config, logical) if layout == NATIVE else logical
    groups = []
    used: dict[str, set[str]] = {component: set() for component in published}
    for place in _places(config, tasks):
        outputs = []
        for name, parts in _fuse(_select(logical[place.source], place), place.source):
            rows = tuple(
                row
                for part in parts
                for row in _rows(layout, place.source, part, logical[place.source][part], config)
            )
            spec = _output_spec(logical[place.source], parts, dtype)
            if dtype != "F32" and place.source == VIDEO_VAE and _BLOCK_LINEAR.fullmatch(name):
                spec = TensorSpec(vae_linears, spec.shape)
            outputs.append(OutputTensor(name, spec, rows))
            used[place.source].update(row.tensor for row in rows)
        groups.append(OutputGroup(place.group, place.component, tuple(outputs), place.needed_by))
    dropped = {
        component: tuple(name for name in specs if name not in used[component])
        for component, specs in published.items()
    }
    return Recipe(published, tuple(groups), dropped, _fused_patterns())


def loading_order(config: H3Config, task: str, table: str, evaluations: int) -> tuple[str, ...]:
    """Group names of one task in order of use. `table`: `"<schedule>.<task>"`."""
    has_keyframes = task in PICTURE_TASKS
    return (
        *(("vae/encoder",) if has_keyframes else ()),
        *(("audio_vae/encoder",) if task == REFERENCE_TASK else ()),
        *(("text_encoder/visual",) if has_keyframes else ()),
        *(f"text_encoder/layers.{i}" for i in range(config.text.conditioning_layer)),
        "transformer/prelude",
        *((f"adaln/{table}/condition",) if has_keyframes else ()),
        f"adaln/{table}/step.000",
        *(f"transformer/blocks.{i}" for i in range(config.transformer.num_layers)),
        "transformer/heads",
        *(f"adaln/{table}/step.{e:03d}" for e in range(1, evaluations)),
        "vae/decoder.prelude",
        *(f"vae/decoder.blocks.{i}" for i in range(config.video_vae.decoder_num_layers)),
        "vae/decoder.heads",
        "audio_vae/decoder",
    )


def _places(config: H3Config, tasks: Collection[str]) -> Iterator[_Place]:
    """Groups in file order: what every task uses first, keyframe groups at the end of their component."""
    root = "model.language_model"
    for i in range(config.text.conditioning_layer):
        yield _Place(
            f"text_encoder/layers.{i}", TEXT_ENCODER, TEXT_ENCODER, (f"{root}.layers.{i}.",), "conditioner"
        )
    has_pictures = not PICTURE_TASKS.isdisjoint(tasks)
    if has_pictures:
        yield _Place("text_encoder/visual", TEXT_ENCODER, TEXT_ENCODER, ("model.visual.",), "conditioner")
    yield _Place(None, EMBEDDING, TEXT_ENCODER, (f"{root}.embed_tokens.",), "conditioner")
    dit_prelude = ("proj_in.", "audio_proj_in.", "context_embedder.", "token_refiner.")
    yield _Place("transformer/prelude", TRANSFORMER, TRANSFORMER, dit_prelude, "denoise")
    for i in range(config.transformer.num_layers):
        block = f"transformer_blocks.{i}."
        yield _Place(
            f"transformer/blocks.{i}",
            TRANSFORMER,
            TRANSFORMER,
            (block,),
            "denoise",
            excluded=(f"{block}adaln_proj.",),
        )
    dit_heads = ("norm_out.norm.", "proj_out.", "audio_proj_out.")
    yield _Place("transformer/heads", TRANSFORMER, TRANSFORMER, dit_heads, "denoise")
    prelude = ("post_quant_conv.", "decoder.proj_in.", "decoder.register_tokens")
    yield _Place("vae/decoder.prelude", VIDEO_VAE, VIDEO_VAE, prelude, "decode_video")
    for i in range(config.video_vae.decoder_num_layers):
        block = f"decoder.transformer_blocks.{i}."
        yield _Place(f"vae/decoder.blocks.{i}", VIDEO_VAE, VIDEO_VAE, (block,), "decode_video")
    heads = ("decoder.norm_out.", "decoder.proj_out.")
    yield _Place("vae/decoder.heads", VIDEO_VAE, VIDEO_VAE, heads, "decode_video")
    if has_pictures:
        yield _Place("vae/encoder", VIDEO_VAE, VIDEO_VAE, ("encoder.", "quant_conv."), "keyframes")
    yield _Place("audio_vae/decoder", AUDIO_VAE, AUDIO_VAE, ("dec_in_proj.", "decoder."), "decode_audio")
    if REFERENCE_TASK in tasks:
        parts = ("encoder.", "pre_block.", "mean_proj.", "logs_proj.")
        yield _Place("audio_vae/encoder", AUDIO_VAE, AUDIO_VAE, parts, "keyframes")


def _select(specs: Mapping[str, TensorSpec], place: _Place) -> list[str]:
    names = [name for name in specs if name.startswith(place.prefixes)]
    return [name for name in names if not (place.excluded and name.startswith(place.excluded))]


def _fuse(names: Sequence[str], component: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(prepared name, published names) in order of use; a fused tensor stands where its first part stood."""
    remaining = dict.fromkeys(names)
    while remaining:
        name = next(iter(remaining))
        fused = _fused_by(name, component) or (name, (name,))
        for part in fused[1]:
            del remaining[part]
        yield fused


def _fused_by(name: str, component: str) -> tuple[str, tuple[str, ...]] | None:
    kind = name.rpartition(".")[2]
    for target, parts in _FUSED.get(component, {}).items():
        first = parts[0].format(kind)
        if name.endswith(f".{first}"):
            prefix = name.removesuffix(first)
            return prefix + target.format(kind), tuple(prefix + part.format(kind) for part in parts)
    return None


def _rows(layout: str, component: str, name: str, spec: TensorSpec, config: H3Config) -> tuple[Rows, ...]:
    if layout == NATIVE:
        return native_rows(component, name, spec, config)
    return (Rows(component, name, 0, spec.shape[0]),)


def _output_spec(specs: Mapping[str, TensorSpec], parts: Sequence[str], dtype: str) -> TensorSpec:
    first = specs[parts[0]]
    num_rows = sum(specs[part].shape[0] for part in parts)
    return TensorSpec("F32" if dtype == "F32" else first.dtype, (num_rows, *first.shape[1:]))


def _fused_patterns() -> dict[str, tuple[str, ...]]:
    return {
        f"{component}/*.{target.format('*')}": tuple(f"*.{part.format('*')}" for part in parts)
        for component, patterns in _FUSED.items()
        for target, parts in patterns.items()
    }
