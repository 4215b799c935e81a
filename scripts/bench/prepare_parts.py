"""The two large components of the published checkpoint as trees that prepare takes, one after the other.

Component and its prepared form must fit into memory together: 66.3 + 40.6 GB for the transformer, 66.7 + 50.3 GB for
the text encoder. The transformer comes first: its tables are the longest computation of all. Of the latter, layers behind the conditioning layer and the language head are only hashed, so their
15 GB are holes: read and digested like everything else, but not stored. Where the transformer does not fit its layers are
cut into several trees.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.manifest import read_manifest
from prepare.families.minimax_h3.published import TEXT_ENCODER, TRANSFORMER, published_tensors
from prepare.families.minimax_h3.recipe import build_recipe
from runtime.families.minimax_h3.config import H3Config
from scripts.bench.published_size import write_component
from scripts.tiny_checkpoint import write_tiny_checkpoint
from scripts.tiny_presets import TinyConfig, preset

_FILE_BYTES = 8 << 30
_RESERVE = 2 << 30
_STEADY = 0.99  # of the free bytes: they change a little while other parts run
_START_S = 10  # two processes that import torch, and the tiny networks
# Prepared components of each published one.
_PREPARED = {TRANSFORMER: (TRANSFORMER, "adaln"), TEXT_ENCODER: (TEXT_ENCODER, "text_encoder_embed")}
# What one text-to-video start reads, as the design states it: GB of the published checkpoint and of the part needed.
_DESIGN_GB = {"published": 133.0, "transformer_without_adaln": 40.2, "conditioning_layers": 48.8}


@dataclass(frozen=True)
class Part:
    """One tree: `component` at released widths, everything else tiny.

    max_file_bytes: limit of prepared files, so that there are as many as at the released size. holes: see the module.
    """

    name: str
    component: str
    config: TinyConfig
    max_file_bytes: int
    holes: frozenset[str] = frozenset()

    def write(self, folder: Path, deadline: float = math.inf) -> int:
        """Write the tree; returns the bytes of the component's tensors. Raises: TimeoutError: past the deadline."""
        write_tiny_checkpoint(folder, "test", "diffusers", seed=0)
        sizes = {}
        for component in (TRANSFORMER, TEXT_ENCODER):
            shutil.rmtree(folder / component)
            holes = self.holes if component == self.component else frozenset()
            sizes[component] = write_component(folder, component, self.config, holes, deadline)
        return sizes[self.component]

    @property
    def stored_bytes(self) -> int:
        """Of the published component, without holes."""
        published = published_tensors(self.config.model)[self.component]
        return sum(spec.num_bytes for name, spec in published.items() if name not in self.holes)

    @property
    def prepared_bytes(self) -> int:
        """Of what prepare makes of it, without headers and, for the transformer, without its tables (half a percent)."""
        return sum(
            _planned_bytes(self.config.model, name) for name in _PREPARED[self.component] if name != "adaln"
        )

    @property
    def room_bytes(self) -> int:
        """Storage that the tree and its prepared form take together."""
        return self.stored_bytes + self.prepared_bytes + _RESERVE

    @property
    def predicted_s(self) -> float:
        """Writing, preparing, validating and removing it in memory-backed storage with 16 cores, from the rates of
        `results/prepare_full.json` (1.7, 1.66 and 3.4 GB/s); removing is a guess."""
        published = _published_bytes(self.config.model, self.component)
        work = self.stored_bytes / 1.7e9 + published / 1.66e9 + self.prepared_bytes / 3.4e9
        return work + (self.stored_bytes + self.prepared_bytes) / 10e9 + _START_S


def parts(sizes: str, transformer_pieces: int) -> list[Part]:
    """Trees that together are the transformer and the text encoder of the preset `sizes`."""
    full = preset(sizes)
    layers, pieces = full.model.transformer.num_layers, transformer_pieces
    result = []
    for number in range(pieces):
        count = layers * (number + 1) // pieces - layers * number // pieces
        name = TRANSFORMER if pieces == 1 else f"{TRANSFORMER} {number + 1} of {pieces}"
        result.append(Part(name, TRANSFORMER, _with_transformer(full, count), _FILE_BYTES * count // layers))
    config = _with_text(full)
    return [*result, Part(TEXT_ENCODER, TEXT_ENCODER, config, _FILE_BYTES, only_hashed(config.model))]


def pieces_that_fit(sizes: str, free_bytes: int) -> int:
    """Least number of trees that the transformer must be cut into; every one has the layers' neighbours too. Where not even
    one layer fits, as many as there are layers."""
    full = preset(sizes)
    layers = full.model.transformer.num_layers
    for pieces in range(1, layers):
        largest = Part("", TRANSFORMER, _with_transformer(full, -(-layers // pieces)), _FILE_BYTES)
        if largest.room_bytes <= free_bytes * _STEADY:
            return pieces
    return layers


def only_hashed(model: H3Config) -> frozenset[str]:
    """Published tensors of the text encoder that no prepared text-to-video file has a row of."""
    recipe = build_recipe(model, "diffusers", ("t2va",), "BF16", "F16")
    used = {rows.tensor for group in recipe.groups for tensor in group.tensors for rows in tensor.parts}
    return frozenset(published_tensors(model)[TEXT_ENCODER].keys() - used)


def prepared_bytes(directory: Path, component: str) -> dict[str, int]:
    """Prepared component -> bytes of its files."""
    manifest = read_manifest(directory)
    result = {}
    for name in _PREPARED[component]:
        prefix = "adaln/" if name == "adaln" else f"weights/{name}-"
        result[name] = sum(file.size for file in manifest.files if file.path.startswith(prefix))
    return result


def part_figures(
    part: Part, bytes_in: int, bytes_out: Mapping[str, int], write_s: float, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Figures of one part. measured: of `prepare_full.measure`."""
    published = published_tensors(part.config.model)[part.component]
    prepare_s, validate_s = measured["prepare_s"], measured["validate_s"]
    return {
        "part": part.name,
        "bytes_in": bytes_in,
        "of_these_holes": sum(published[name].num_bytes for name in part.holes),
        "bytes_out": dict(bytes_out),
        "write_s": round(write_s, 2),
        "prepare_s": round(prepare_s, 2),
        "validate_s": round(validate_s, 2),
        "cpu_s": round(measured["cpu_s"], 1),
        "prepare_gbps": round(bytes_in / prepare_s / 1e9, 3),
        "prepare_and_validate_gbps": round(bytes_in / (prepare_s + validate_s) / 1e9, 3),
        "peak_extra_gib": round(measured["peak"] / 2**30, 3),
        "peak_extra_with_validate_gib": round(measured["peak_with_validate"] / 2**30, 3),
        "least_available_gib": round(measured["least_available"] / 2**30, 2),
    }


def reconcile(runs: Sequence[Mapping[str, Any]], sizes: str) -> dict[str, Any]:
    """Sums of all parts, beside what the plan of the whole checkpoint says and what the design states."""
    model = preset(sizes).model
    out: dict[str, int] = {}
    for run in runs:
        for name, size in run["bytes_out"].items():
            out[name] = out.get(name, 0) + size
    published = published_tensors(model)
    planned = {
        name: sum(s.num_bytes for s in published[name].values()) for name in (TRANSFORMER, TEXT_ENCODER)
    }
    projections = sum(
        spec.num_bytes
        for name, spec in published[TRANSFORMER].items()
        if ".adaln_proj." in name or name.startswith(("norm_out.linear.", "time_embedder."))
    )
    sums = {
        "bytes_in": sum(run["bytes_in"] for run in runs),
        "bytes_out": out,
        **{
            f"{key}_s": round(sum(run[f"{key}_s"] for run in runs), 2)
            for key in ("write", "prepare", "validate")
        },
    }
    needed = {
        "transformer": _planned_bytes(model, TRANSFORMER),
        "text_encoder": _planned_bytes(model, TEXT_ENCODER),
    }
    return {
        "sums": sums,
        "planned": {
            "published": planned,
            "prepared": needed,
            "projections_replaced_by_tables": projections,
            "only_hashed": sum(published[TEXT_ENCODER][name].num_bytes for name in only_hashed(model)),
        },
        "in_over_published": round(sums["bytes_in"] / sum(planned.values()), 4),  # type: ignore[operator]
        "out_over_planned": {
            name: round(out[name] / size, 4) for name, size in needed.items() if out.get(name)
        },
        "design_gb": _DESIGN_GB,
    }


def _with_transformer(full: TinyConfig, num_layers: int) -> TinyConfig:
    """Transformer widths of `full`; every other network tiny."""
    small = preset("test")
    transformer = dataclasses.replace(
        full.model.transformer,
        num_layers=num_layers,
        text_dim=small.model.text.hidden_size,
        in_channels=small.model.video_vae.latent_channels,
        audio_in_channels=small.model.audio_vae.latent_channels,
    )
    model = dataclasses.replace(small.model, transformer=transformer)
    return TinyConfig(model, small.num_base_tokens, full.shard_bytes)


def _with_text(full: TinyConfig) -> TinyConfig:
    """Text and vision sizes of `full`; every other network tiny. The tiny tokenizer's ids lie in any vocabulary."""
    small = preset("test")
    transformer = dataclasses.replace(small.model.transformer, text_dim=full.model.text.hidden_size)
    model = dataclasses.replace(
        small.model, transformer=transformer, text=full.model.text, vision=full.model.vision
    )
    return TinyConfig(model, small.num_base_tokens, full.shard_bytes)


def _published_bytes(model: H3Config, component: str) -> int:
    return sum(spec.num_bytes for spec in published_tensors(model)[component].values())


def _planned_bytes(model: H3Config, component: str) -> int:
    """Bytes of the tensors of the prepared files of the same name; headers and fillers add a few kilobytes."""
    groups = build_recipe(model, "diffusers", ("t2va",), "BF16", "F16").groups
    tensors = (tensor for group in groups if group.component == component for tensor in group.tensors)
    return sum(tensor.spec.num_bytes for tensor in tensors)
