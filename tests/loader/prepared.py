"""Writes small prepared directories with random bytes, as prepare would lay them out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from loader.header import PAD_PREFIX, TensorEntry, build_header, round_up, tensor_bytes
from loader.manifest import arena_bytes, encode_manifest

# component → files → groups → tensors (dtype, shape); a group name of None holds tensors that are not streamed
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
Layout = Mapping[str, Sequence[Mapping[str | None, Shapes]]]

SMALL: Layout = {
    "encoder": [
        {"encoder/visual": {"patch.weight": ("F32", (7, 11))}},
        {
            "encoder/layers.0": {"layers.0.w": ("BF16", (40, 64)), "layers.0.b": ("F32", (3,))},
            "encoder/layers.1": {"layers.1.w": ("BF16", (96, 64)), "layers.1.flag": ("BOOL", (5,))},
        },
    ],
    "embed": [{None: {"table.weight": ("F16", (50, 24))}}],
    "dit": [
        {
            "dit/prelude": {"proj.weight": ("F32", (64, 33)), "scale": ("F64", ())},
            "dit/blocks.0": {"blocks.0.w": ("F8_E4M3", (130, 70)), "blocks.0.i": ("I64", (9,))},
            "dit/blocks.1": {"blocks.1.w": ("F8_E5M2", (130, 70)), "blocks.1.e": ("I16", (0, 4))},
        }
    ],
}
SMALL_ORDER = ["encoder/layers.0", "encoder/layers.1", "dit/prelude", "dit/blocks.0", "dit/blocks.1"]


class Prepared:
    """A written directory: `manifest` is the dictionary that was encoded, `content` maps tensors to their bytes."""

    def __init__(self, directory: Path, manifest: dict[str, object], content: dict[str, bytes]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.content = content

    def rewrite(self) -> None:
        (self.directory / "manifest.json").write_bytes(encode_manifest(self.manifest))


def write_prepared(
    directory: Path,
    layout: Layout = SMALL,
    orders: Mapping[str, Sequence[str]] | None = None,
    chunk_bytes: int = 8192,
    seed: int = 0,
    letters: int = 256,
    normal: bool = False,
) -> Prepared:
    """Write files and manifest.

    Args:
        chunk_bytes: unit of the digests.
        letters: how many values bytes have. normal: instead, numbers of deviation 0.02 in the tensors' types.
    """
    rng = random.Random(seed)
    fill = (
        (lambda dtype, size: _normal_bytes(dtype, size, seed))
        if normal
        else partial(_random_bytes, rng, letters)
    )
    files: list[dict[str, object]] = []
    tensors: dict[str, object] = {}
    groups: list[dict[str, object]] = []
    components: dict[str, object] = {}
    content: dict[str, bytes] = {}
    for component, parts in layout.items():
        sizes = []
        for number, part in enumerate(parts):
            path = f"weights/{component}-{number}.safetensors"
            entries, data = _write_part(component, len(files), part, fill, tensors, groups, content)
            files.append(_write_file(directory, path, entries, data, chunk_bytes))
            sizes.append(len(data))
        first = len(files) - len(parts)
        components[component] = {"files": list(range(first, len(files))), "bytes": arena_bytes(sizes)}
    manifest: dict[str, object] = {
        "format": "coldframe-manifest/1",
        "writer": {"name": "test", "version": "0"},
        "model": {},
        "source": {},
        "options": {},
        "config": {},
        "layout": {},
        "files": files,
        "tensors": tensors,
        "groups": groups,
        "components": components,
        "schedules": [],
        "orders": {
            name: list(order)
            for name, order in ({"t2va/base": SMALL_ORDER} if orders is None else orders).items()
        },
        "kernels": [],
        "plans": [],
    }
    prepared = Prepared(directory, manifest, content)
    prepared.rewrite()
    return prepared


def _write_part(
    component: str,
    file: int,
    part: Mapping[str | None, Shapes],
    fill: Callable[[str, int], bytes],
    tensors: dict[str, object],
    groups: list[dict[str, object]],
    content: dict[str, bytes],
) -> tuple[list[TensorEntry], bytes]:
    entries: list[TensorEntry] = []
    data = bytearray()
    for group, shapes in part.items():
        _pad(entries, data, 4096)
        start = len(data)
        for name, (dtype, shape) in shapes.items():
            _pad(entries, data, 256)
            body = fill(dtype, tensor_bytes(dtype, shape))
            entries.append(TensorEntry(name, dtype, shape, len(data), len(data) + len(body)))
            tensors[f"{component}/{name}"] = {
                "file": file,
                "dtype": dtype,
                "shape": list(shape),
                "offset": len(data),
                "bytes": len(body),
                "group": group,
                "head": hashlib.sha256(body[:1024]).hexdigest(),
                "tail": hashlib.sha256(body[-1024:]).hexdigest(),
            }
            content[f"{component}/{name}"] = body
            data += body
        if group is not None:
            groups.append(
                {
                    "name": group,
                    "component": component,
                    "file": file,
                    "start": start,
                    "end": len(data),
                    "needed_by": "conditioner",
                }
            )
    return entries, bytes(data)


def _pad(entries: list[TensorEntry], data: bytearray, multiple: int) -> None:
    hole = round_up(len(data), multiple) - len(data)
    if hole:
        entries.append(TensorEntry(f"{PAD_PREFIX}{len(entries)}", "U8", (hole,), len(data), len(data) + hole))
        data += bytes(hole)


def _random_bytes(rng: random.Random, letters: int, dtype: str, size: int) -> bytes:
    if dtype == "BOOL":
        return bytes(rng.choices((0, 1), k=size))
    return rng.randbytes(size) if letters == 256 else bytes(rng.choices(range(letters), k=size))


def _normal_bytes(dtype: str, size: int, seed: int) -> bytes:
    import torch

    kind = {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F8_E4M3": torch.float8_e4m3fn,
    }[dtype]
    values = torch.randn(size // kind.itemsize, generator=torch.Generator().manual_seed(seed)) * 0.02
    return bytes(values.to(kind).view(torch.uint8).numpy())


def _write_file(
    directory: Path, path: str, entries: list[TensorEntry], data: bytes, chunk_bytes: int
) -> dict[str, object]:
    head = build_header(entries, {"format": "pt"})
    place = directory / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(head + data)
    return {
        "path": path,
        "size": len(head) + len(data),
        "data_start": len(head),
        "sha256": hashlib.sha256(head + data).hexdigest(),
        "chunk_bytes": chunk_bytes,
        "chunks": [
            hashlib.sha256(data[i : i + chunk_bytes]).hexdigest() for i in range(0, len(data), chunk_bytes)
        ],
    }
