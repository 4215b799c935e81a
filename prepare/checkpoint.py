"""Open one component of a published checkpoint: find its files, parse headers, account for every tensor both ways.

Knows index files and shards, not models. Only headers are read here. Links are followed (download caches are made of
them), but a path in an index must be a plain file name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loader.errors import ArtifactError
from loader.header import Header, read_header
from loader.strict_json import load_json

_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_SHOWN = 10  # names listed per kind of difference
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """Where one published tensor lies. `offset` counts from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class ComponentFiles:
    """One component's tensors, the files that were read to know them, and remarks that are not errors."""

    folder: Path
    tensors: Mapping[str, SourceTensor]
    weight_files: tuple[Path, ...]
    index_file: Path | None
    notes: tuple[str, ...]


def read_json(path: Path, where: str) -> dict[str, object]:
    """One JSON object from a file of a checkpoint. Raises: ArtifactError: missing, unreadable, not an object."""
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ArtifactError(
                "too large for a JSON file of a checkpoint", where=where, found=path.stat().st_size
            )
        return load_json(path.read_bytes(), where)
    except OSError as error:
        raise ArtifactError(f"is missing or cannot be read ({error.strerror})", where=where) from error


def open_component(folder: Path) -> ComponentFiles:
    """Index all tensors of the safetensors files in `folder`.

    Raises: ArtifactError: no or ambiguous weight files, a missing, damaged or misplaced shard, or an index that
    disagrees with the shards' headers (first differences of every kind and their totals).
    """
    name = folder.name
    if not folder.is_dir():
        raise ArtifactError("component folder is missing", where=name, found=str(folder))
    indexes = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise ArtifactError("more than one index", where=name, found=[path.name for path in indexes])
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if not indexes:
        return _open_single(folder, present)
    index = indexes[0]
    weight_map, total_size = _read_index(index, f"{name}/{index.name}")
    shard_names = sorted(set(weight_map.values()))
    missing = [shard for shard in shard_names if not (folder / shard).is_file()]
    if missing:
        links = [shard for shard in missing if (folder / shard).is_symlink()]
        raise ArtifactError(
            "weight files of the index are missing" + (", some are links to nothing" if links else ""),
            where=f"{name}/{index.name}",
            found=", ".join(missing),
            hint="download them again",
        )
    headers = {shard: read_header(folder / shard, f"{name}/{shard}") for shard in shard_names}
    _compare_index(weight_map, headers, f"{name}/{index.name}")
    notes = [
        f"{name}/{path}: weight file is not in the index; ignored" for path in present if path not in headers
    ]
    found_size = sum(tensor.num_bytes for header in headers.values() for tensor in header.tensors)
    if total_size is not None and total_size != found_size:
        notes.append(
            f"{name}/{index.name}: total_size says {total_size} bytes, the tensors have {found_size}"
        )
    return _component(folder, headers, index, notes)


def _open_single(folder: Path, present: Sequence[str]) -> ComponentFiles:
    if not present:
        raise ArtifactError("no safetensors file and no index", where=folder.name)
    if len(present) > 1 or _SHARD_NAME.fullmatch(present[0]):
        raise ArtifactError(
            f"weight files without an index (*{_INDEX_SUFFIX} is missing)",
            where=folder.name,
            found=", ".join(present),
        )
    file = folder / present[0]
    if not file.is_file():
        raise ArtifactError("weight file is missing: a link to nothing", where=f"{folder.name}/{present[0]}")
    return _component(folder, {present[0]: read_header(file, f"{folder.name}/{present[0]}")}, None, [])


def _component(
    folder: Path, headers: Mapping[str, Header], index: Path | None, notes: Sequence[str]
) -> ComponentFiles:
    tensors = {
        entry.name: SourceTensor(
            folder / shard, entry.dtype, entry.shape, header.data_start + entry.begin, entry.num_bytes
        )
        for shard, header in headers.items()
        for entry in header.tensors
    }
    empty = [
        f"{folder.name}/{shard}: holds no tensor" for shard, header in headers.items() if not header.tensors
    ]
    files = tuple(folder / shard for shard in headers)
    return ComponentFiles(folder, tensors, files, index, (*notes, *empty))


def _read_index(path: Path, where: str) -> tuple[dict[str, str], int | None]:
    table = read_json(path, where)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError("index has no weight_map", where=where, found=type(weight_map).__name__)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ArtifactError(
                "path of a weight file is absolute or points outside the component's folder",
                where=f"{where}: {tensor}",
                found=repr(shard),
                expected="a plain file name",
            )
    metadata = table.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None


def _is_plain_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")


def _compare_index(weight_map: Mapping[str, str], headers: Mapping[str, Header], where: str) -> None:
    homes: dict[str, list[str]] = {}
    for shard, header in headers.items():
        for entry in header.tensors:
            homes.setdefault(entry.name, []).append(shard)
    differences = {
        "duplicate: the same tensor twice, in two shards": [
            f"{name} ({', '.join(shards)})" for name, shards in homes.items() if len(shards) > 1
        ],
        "missing: listed in the index, in no shard": [name for name in weight_map if name not in homes],
        "in another shard than the index says": [
            f"{name} (index: {shard}, found: {homes[name][0]})"
            for name, shard in weight_map.items()
            if name in homes and shard not in homes[name]
        ],
        "unexpected extra: in a shard, not in the index": [name for name in homes if name not in weight_map],
    }
    if any(differences.values()):
        parts = [f"{kind}: {list_names(names)}" for kind, names in differences.items() if names]
        raise ArtifactError("index and shards disagree", where=where, found="; ".join(parts))


def list_names(names: Sequence[str], shown: int = _SHOWN) -> str:
    """The first `shown` names and how many there are in all."""
    text = ", ".join(names[:shown])
    return text if len(names) <= shown else f"{text}, … ({len(names)} in all)"
