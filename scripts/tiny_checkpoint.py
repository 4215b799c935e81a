"""Write a MiniMax-H3 checkpoint with random weights, in either published layout.

    python -m scripts.tiny_checkpoint DIRECTORY [--preset demo] [--layout diffusers] [--seed 0] [--variant fasth3]
                                      [--partition ref2va]

Files, tensor names, config keys, data types and row orders are those of the release; only sizes and values differ.
Both layouts of one preset and seed hold the same logical weights. A tensor's values depend on the seed, its component
and its Diffusers name alone, so nothing but one tensor is ever in memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from loader.header import DTYPE_BYTES
from prepare.families.minimax_h3.native import native_rows, native_tensors
from prepare.families.minimax_h3.published import (
    AUDIO_VAE,
    TEXT_ENCODER,
    TRANSFORMER,
    VIDEO_VAE,
    published_tensors,
)
from prepare.families.minimax_h3.tree import PARTITIONS
from prepare.recipe import TensorSpec
from runtime.families.minimax_h3.config import H3Config
from scripts.tiny_configs import write_configs
from scripts.tiny_presets import TinyConfig, preset
from scripts.tiny_tokenizer import write_tokenizer
from scripts.tiny_weights import random_bits

LAYOUTS = ("native", "diffusers")
VARIANTS = ("base", "fasth3")

# layout -> component -> (folder, file stem, split into shards with an index)
_WEIGHT_FILES = {
    "diffusers": {
        TRANSFORMER: ("transformer", "diffusion_pytorch_model", True),
        TEXT_ENCODER: ("text_encoder", "model", True),
        VIDEO_VAE: ("vae", "diffusion_pytorch_model", True),
        AUDIO_VAE: ("audio_vae", "diffusion_pytorch_model", False),
    },
    "native": {
        TRANSFORMER: ("transformer", "model", True),
        TEXT_ENCODER: ("text_encoder", "model", True),
        VIDEO_VAE: ("video_vae/source", "model", False),
        AUDIO_VAE: ("audio_vae", "model", False),
    },
}


def write_tiny_checkpoint(
    directory: Path,
    preset_name: str | TinyConfig,
    layout: str,
    seed: int,
    variant: str = "base",
    partition: str = "fl2va",
) -> None:
    """Write a complete published tree.

    Args:
        directory: created if missing; a native checkpoint goes to its subfolder `FL2VA` or `Ref2VA`.
        preset_name: `"test"`, `"demo"`, `"full"` or sizes of your own.
        layout: `"native"` or `"diffusers"`.
        seed: same seed, same logical weights in both layouts.
        variant: `"base"` or `"fasth3"` (Diffusers layout: gates, its inference contract and shifts).
        partition: `"ref2va"` writes another transformer, in a Diffusers tree to `transformer_ref/`.
    """
    if variant != "base" and layout != "diffusers":
        raise ValueError(f"{variant} is published in the Diffusers layout only")
    config = preset(preset_name) if isinstance(preset_name, str) else preset_name
    place = PARTITIONS[partition]
    root = directory / place.native if layout == "native" else directory
    own = place.diffusers if layout == "diffusers" else "transformer"
    layout_tensors = _layout_tensors(config.model, layout, gated=variant == "fasth3")
    for component, (folder, stem, is_sharded) in _WEIGHT_FILES[layout].items():
        is_transformer = component == TRANSFORMER
        source = _TensorSource(
            config.model, layout, component, seed, label=place.diffusers if is_transformer else component
        )
        limit = config.shard_bytes if is_sharded else None
        target = root / (own if is_transformer else folder)
        _write_weights(target, stem, source, layout_tensors[component], limit)
    write_configs(root, config.model, layout, variant, partition)
    for folder in (
        ("tokenizer", "text_encoder", "processor") if layout == "native" else ("tokenizer", "processor")
    ):
        write_tokenizer(root / folder, config.num_base_tokens)


def _layout_tensors(model: H3Config, layout: str, *, gated: bool) -> Mapping[str, Mapping[str, TensorSpec]]:
    published = published_tensors(model, gated=gated)
    return native_tensors(model, published) if layout == "native" else published


class _TensorSource:
    """Bytes of one component's tensors in the names and row order of a layout."""

    def __init__(self, model: H3Config, layout: str, component: str, seed: int, label: str) -> None:
        """label: what the values are drawn for."""
        self._component, self._seed = label, seed
        self._published = published_tensors(model, gated=layout == "diffusers")[component]
        self._places: dict[str, list[tuple[str, tuple[tuple[int, int], ...]]]] = {}
        for name, spec in self._published.items():
            if layout == "native":
                rows = native_rows(component, name, spec, model)
                ranges = tuple((part.start, part.stop) for part in rows)
                self._places.setdefault(rows[0].tensor, []).append((name, ranges))
            else:
                self._places[name] = [(name, ((0, spec.shape[0]),))]

    def read(self, name: str, spec: TensorSpec) -> bytes:
        if name not in self._places:  # a tensor that only the native layout has
            return random_bits(self._component, name, spec, self._seed).tobytes()
        out: np.ndarray | None = None
        for logical, ranges in self._places[name]:
            values = random_bits(self._component, logical, self._published[logical], self._seed)
            out = np.empty(spec.shape, values.dtype) if out is None else out
            cursor = 0
            for start, stop in ranges:
                out[start:stop] = values[cursor : cursor + stop - start]
                cursor += stop - start
        assert out is not None
        return out.tobytes()


def _write_weights(
    folder: Path, stem: str, source: _TensorSource, tensors: Mapping[str, TensorSpec], shard_bytes: int | None
) -> None:
    """One `<stem>.safetensors`, or shards of at most `shard_bytes` (unless one tensor is larger) with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shard_bytes is None:
        _write_file(folder / f"{stem}.safetensors", source, tensors)
        return
    shards = _cut(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file_name, source, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file_name)
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _cut(tensors: Mapping[str, TensorSpec], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in tensors.items():
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.num_bytes
    return shards


def _write_file(path: Path, source: _TensorSource, tensors: Mapping[str, TensorSpec]) -> None:
    """A safetensors file as the reference writer lays it out: widest types first, no fillers, 8-byte header padding."""
    ordered = sorted(tensors.items(), key=lambda item: -DTYPE_BYTES[item[1].dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in ordered:
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, spec in ordered:
            file.write(source.read(name, spec))


def main(argv: Iterable[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write a MiniMax-H3 checkpoint with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--preset", choices=("test", "demo", "full"), default="demo", help="sizes (full: 144 GB)"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="diffusers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=VARIANTS, default="base")
    parser.add_argument("--partition", choices=tuple(PARTITIONS), default="fl2va")
    args = parser.parse_args(None if argv is None else list(argv))
    if args.variant != "base" and args.layout != "diffusers":
        parser.error(f"--variant {args.variant} is published in the Diffusers layout only")
    write_tiny_checkpoint(args.directory, args.preset, args.layout, args.seed, args.variant, args.partition)
    print(f"{args.preset} checkpoint, {args.layout} layout, seed {args.seed}: {args.directory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
