"""Adapter files (LoRA) in the common spellings, matched to a checkpoint's tensors before anything is written.

    PEFT, diffusers     [transformer.]<module>.lora_A.weight, .lora_B.weight, .alpha
    Kohya               lora_unet_<module with underscores>.lora_down.weight, .lora_up.weight, .alpha
    fastvideo-lora-v2   as PEFT, with .diff (weight), .diff_b (bias), .set_weight; header counts must agree

W' = W + scale * (alpha / rank) * (B @ A), or W + scale * diff; without an alpha, alpha / rank is 1. `prepare.merge` has
the arithmetic. Modulation projections and the time embedder may be named like any other layer: prepared tables are
computed from the merged ones. A key that is not understood or that no tensor answers to is an error: an adapter that is applied in part
looks like one that was applied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loader.errors import ArtifactError, RequestError
from loader.header import Header, read_header
from prepare.adapter_alpha import adapter_scale, declared_alpha
from prepare.checkpoint import SourceTensor, list_names
from prepare.merge import Delta, LowRank, Span, Update

BUNDLE = "fastvideo-lora-v2"
_KOHYA_PREFIX = "lora_unet_"
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")
_PARTS = {
    ".lora_A.weight": "down",
    ".lora_A.default.weight": "down",
    ".lora_down.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.default.weight": "up",
    ".lora_up.weight": "up",
    ".alpha": "alpha",
    ".diff": "diff",
    ".diff_b": "diff_b",
    ".set_weight": "set_weight",
}
_COUNTED = {
    "low_rank_tensors": {"down", "up"},
    "diff_tensors": {"diff", "diff_b"},
    "set_weight_tensors": {"set_weight"},
}
_TYPES = ("BF16", "F16", "F32")
_SHOWN = 20

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """A tensor that adapters may name.

    shape: as the adapter sees it. places: (published tensor, rows of it that the adapter's rows change).
    """

    shape: tuple[int, ...]
    places: tuple[tuple[str, Span], ...]


@dataclass(frozen=True)
class Adapter:
    """One file, matched.

    updates: published tensor -> changes. replaced: prepared name -> tensor that takes its place (`.set_weight`).
    """

    path: Path
    scale: float
    format: str
    updates: Mapping[str, tuple[Update, ...]]
    replaced: Mapping[str, SourceTensor]


@dataclass
class _Module:
    parts: dict[str, SourceTensor] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)


def read_adapter(
    path: Path, scale: float, targets: Mapping[str, Target], replaceable: Mapping[str, tuple[int, ...]]
) -> Adapter:
    """Open and match one adapter file; only its header and scalars are read.

    Args:
        targets: full tensor names (`….weight`, `….bias`) -> what they change.
        replaceable: names of tensors that `.set_weight` may give, and their shapes.
    Raises: ArtifactError: not safetensors, unknown keys or modules (all of them are listed), halves of pairs, wrong
    shapes or types, counts that disagree. RequestError: a scale for weights that are replaced.
    """
    header = read_header(path)
    style = _style(header)
    modules = _modules(path, header, style)
    names = _flat_names(targets) if style == "kohya" else {name: name for name in targets}
    _check_matched(path, modules, names, replaceable)
    if style == BUNDLE:
        _check_counts(path, header, modules)
    updates: dict[str, list[Update]] = {}
    alpha = declared_alpha(path, header.metadata)
    for module, found in modules.items():
        for name, shape_check, make in _changes(path, module, found, scale, alpha):
            target = targets[names[name]]
            shape_check(target.shape)
            for tensor in dict.fromkeys(tensor for tensor, _ in target.places):
                spans = tuple(span for other, span in target.places if other == tensor)
                updates.setdefault(tensor, []).append(make(spans))
    frozen_updates = {name: tuple(found) for name, found in updates.items()}
    return Adapter(path, scale, style, frozen_updates, _replaced(path, scale, modules, replaceable))


def _style(header: Header) -> str:
    if header.metadata.get("format") == BUNDLE:
        return BUNDLE
    is_kohya = any(entry.name.startswith(_KOHYA_PREFIX) for entry in header.tensors)
    return "kohya" if is_kohya else "peft"


def _modules(path: Path, header: Header, style: str) -> dict[str, _Module]:
    """Module name -> its tensors by role."""
    modules: dict[str, _Module] = {}
    unknown, wrong_type = [], []
    for entry in header.tensors:
        suffix = next((suffix for suffix in _PARTS if entry.name.endswith(suffix)), None)
        module = None if suffix is None else _module_name(entry.name.removesuffix(suffix), style)
        if suffix is None or module is None or (suffix == ".set_weight" and style != BUNDLE):
            unknown.append(entry.name)
            continue
        if entry.dtype not in _TYPES:
            wrong_type.append(f"{entry.name} ({entry.dtype})")
        found = modules.setdefault(module, _Module())
        part = _PARTS[suffix]
        if part in found.parts:
            raise ArtifactError("the same factor twice", where=f"{path.name}: {entry.name}")
        start = header.data_start + entry.begin
        found.parts[part] = SourceTensor(path, entry.dtype, entry.shape, start, entry.num_bytes)
        found.keys.append(entry.name)
    if unknown:
        raise ArtifactError(
            f"{len(unknown)} adapter keys are not understood",
            where=path.name,
            found=list_names(unknown, _SHOWN),
            expected=f"<module> followed by one of {', '.join(_PARTS)}",
        )
    if wrong_type:
        found_types = list_names(wrong_type, _SHOWN)
        raise ArtifactError(
            "adapter tensors of a wrong type", where=path.name, found=found_types, expected=_TYPES
        )
    if not modules:
        raise ArtifactError("adapter holds no tensor", where=path.name)
    return modules


def _module_name(text: str, style: str) -> str | None:
    if style == "kohya":
        return text.removeprefix(_KOHYA_PREFIX) if text.startswith(_KOHYA_PREFIX) else None
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    return text


def _flat_names(targets: Mapping[str, Target]) -> dict[str, str]:
    """`transformer_blocks_0_attn_to_q.weight` -> `transformer_blocks.0.attn.to_q.weight`."""
    flat: dict[str, str] = {}
    for name in targets:
        module, _, kind = name.rpartition(".")
        flat[f"{module.replace('.', '_')}.{kind}"] = name
    assert len(flat) == len(targets), "two modules differ in dots only"
    return flat


def _check_matched(
    path: Path,
    modules: Mapping[str, _Module],
    names: Mapping[str, str],
    replaceable: Mapping[str, tuple[int, ...]],
) -> None:
    def is_known(module: str, part: str) -> bool:
        name = f"{module}.bias" if part == "diff_b" else f"{module}.weight"
        return name in replaceable if part == "set_weight" else name in names

    unmatched = [
        key
        for module, found in modules.items()
        for part, key in zip(found.parts, found.keys, strict=True)
        if not is_known(module, part)
    ]
    if unmatched:
        raise ArtifactError(
            f"{len(unmatched)} adapter keys name nothing in this checkpoint",
            where=path.name,
            found=list_names(unmatched, _SHOWN),
            hint="the adapter is for another model, or for parts that are not prepared",
        )


def _check_counts(path: Path, header: Header, modules: Mapping[str, _Module]) -> None:
    wrong = []
    for key, parts in _COUNTED.items():
        found = sum(len(parts & module.parts.keys()) for module in modules.values())
        if header.metadata.get(key) != str(found):
            wrong.append(f"{key} says {header.metadata.get(key)!r}, the file has {found}")
    if wrong:
        raise ArtifactError(
            "bundle and its header disagree",
            where=path.name,
            found="; ".join(wrong),
            hint="download it again",
        )


def _replaced(
    path: Path, scale: float, modules: Mapping[str, _Module], replaceable: Mapping[str, tuple[int, ...]]
) -> dict[str, SourceTensor]:
    result = {}
    for module, found in modules.items():
        if "set_weight" not in found.parts:
            continue
        name, tensor = f"{module}.weight", found.parts["set_weight"]
        _check_shape(f"{path.name}: {module}.set_weight", tensor.shape, replaceable[name])
        if scale != 1.0:
            raise RequestError(
                "weights that an adapter replaces cannot be scaled",
                where=f"--lora {path.name}",
                found=scale,
                expected=1,
            )
        result[name] = tensor
    return result


def _changes(
    path: Path, module: str, found: _Module, scale: float, alpha: float | None
) -> Iterator[tuple[str, Callable[[Shape], None], Callable[[tuple[Span, ...]], Update]]]:
    """(tensor in the adapter's spelling, check of its shape, its update for some spans)."""
    parts = found.parts
    if ("down" in parts) != ("up" in parts) or ("alpha" in parts and "up" not in parts):
        raise ArtifactError("one factor of a pair is missing", where=path.name, found=", ".join(found.keys))
    if "up" in parts:
        up, down = parts["up"], parts["down"]
        rank = down.shape[0] if down.shape else 0
        factor = scale * adapter_scale(path, parts.get("alpha"), alpha, rank)
        check = partial(_check_factors, f"{path.name}: {module}", up.shape, down.shape)
        yield f"{module}.weight", check, partial(LowRank, up, down, factor)
    for part, kind in (("diff", "weight"), ("diff_b", "bias")):
        if part in parts:
            check = partial(_check_shape, f"{path.name}: {module}.{part}", parts[part].shape)
            yield f"{module}.{kind}", check, partial(Delta, parts[part], scale)


def _check_factors(where: str, up: Shape, down: Shape, target: Shape) -> None:
    if len(target) != 2 or len(down) != 2 or up != (target[0], down[0]) or down[1] != target[1]:
        raise ArtifactError(
            "adapter tensors have another shape",
            where=where,
            found=f"B {list(up)}, A {list(down)}",
            expected=f"[rows, rank] and [rank, columns] of a matrix {list(target)}",
        )


def _check_shape(where: str, found: Shape, expected: Shape) -> None:
    if found != expected:
        raise ArtifactError(
            "adapter tensor has another shape", where=where, found=list(found), expected=list(expected)
        )


def parse_adapter(text: str) -> tuple[Path, float]:
    """`FILE[:SCALE]` of the command line. Raises: RequestError: a scale that is zero, infinite or not a number."""
    match = re.fullmatch(r"(.+):([^:/]+)", text)
    if match is None:
        return Path(text), 1.0
    try:
        scale = float(match[2])
    except ValueError:
        return Path(text), 1.0
    if not math.isfinite(scale) or scale == 0:
        raise RequestError(
            "not a usable scale", where="--lora", found=repr(match[2]), expected="a number, not 0"
        )
    return Path(match[1]), scale
