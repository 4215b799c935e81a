"""The manifest of a prepared directory, from what was planned and what was written."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loader.manifest import CHUNK_BYTES, FORMAT_MAJOR, FORMAT_NAME, arena_bytes
from prepare.digests import FileDigests
from prepare.family import DTYPES, FamilySource, PrepareOptions, Table
from prepare.file_plan import PlannedFile

TOKENIZER_PATH = "tokenizer/tokenizer.json"


@dataclass(frozen=True)
class WrittenFiles:
    """Everything that was written: planned files with their digests, in manifest order, the tokenizer's, kernels.

    kernels: the manifest's entries. kernel_files: path and digests of their files, index included.
    adapters: name, format, scale, size and SHA-256 of every merged adapter file.
    """

    files: Sequence[tuple[PlannedFile, FileDigests]]
    tokenizer: FileDigests
    weights_sha256: str
    kernels: Sequence[Mapping[str, Any]] = ()
    kernel_files: Sequence[tuple[str, FileDigests]] = ()
    adapters: Sequence[Mapping[str, Any]] = ()


def build_manifest(
    source: FamilySource,
    options: PrepareOptions,
    source_files: Mapping[str, Mapping[str, object]],
    written: WrittenFiles,
) -> dict[str, object]:
    """The manifest as a JSON object; `loader.manifest.encode_manifest` makes its bytes.

    Args:
        source_files: relative path -> size and SHA-256 of every file of the checkpoint that was read.
    """
    tables = {table.file.path: table for table in source.tables}
    return {
        "format": f"{FORMAT_NAME}/{FORMAT_MAJOR}",
        "writer": {"name": "coldframe", "version": writer_version()},
        "model": {
            "family": source.family,
            "variant": source.variant,
            "dtype": DTYPES[options.dtype],
            "tasks": list(source.tasks),
            **source.facts,
        },
        "source": {
            "layout": source.layout,
            "repository": options.repository,
            "revision": options.revision,
            "files": source_files,
            **({"adapters": list(written.adapters)} if written.adapters else {}),
        },
        "options": byte_options(source, options),
        "config": source.config(),
        "layout": {
            **source.row_layout(),
            "fused": {name: list(parts) for name, parts in source.recipe.fused.items()},
        },
        "files": [
            *(_file(plan, digests) for plan, digests in written.files),
            _plain_file(TOKENIZER_PATH, written.tokenizer),
            *(_plain_file(path, digests) for path, digests in written.kernel_files),
        ],
        "tensors": dict(_tensors(written.files, tables)),
        "groups": list(_groups(written.files)),
        "components": _components(written.files),
        "schedules": [_schedule(table, options.adaln, written.weights_sha256) for table in source.tables],
        "orders": {name: list(order) for name, order in source.orders.items()},
        "kernels": list(written.kernels),
        "plans": [],
    }


def byte_options(source: FamilySource, options: PrepareOptions) -> dict[str, object]:
    """Options that change bytes. `match` tables also depend on where they are computed."""
    result: dict[str, object] = {
        "adaln": options.adaln,
        "dtype": options.dtype,
        "max_file_bytes": options.max_file_bytes,
        "schedules": [*dict.fromkeys(table.schedule.name for table in source.tables)],
        "tasks": list(source.tasks),
    }
    if options.dtype != "float32":
        result["vae_linears"] = options.vae_linears
    if options.partition:
        result["partition"] = options.partition
    if options.sigmas:
        result["sigmas"] = {s.name: [list(s.video_bits), list(s.audio_bits)] for s in options.sigmas}
    if options.lora:
        result["lora"] = [{"name": path.name, "scale": scale} for path, scale in options.lora]
    if options.kernels:
        result["kernels"] = list(options.kernels)
    if options.codec != "none":
        result["codec"] = options.codec
    if options.ranks != (1,):
        result["ranks"] = list(options.ranks)
    if options.adaln == "match":
        result["adaln_device"] = _describe_device(options.device)
    return result


def writer_version() -> str:
    """Version of this distribution."""
    return importlib.metadata.version("coldframe")


def _describe_device(device: str) -> str:
    import torch

    name = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else torch.backends.cpu.get_cpu_capability()
    )
    return f"{device.partition(':')[0]} {name}, torch {torch.__version__}"


def _file(plan: PlannedFile, digests: FileDigests) -> dict[str, object]:
    return {
        "path": plan.path,
        "size": digests.size,
        "data_start": len(plan.header),
        "sha256": digests.sha256,
        "chunk_bytes": CHUNK_BYTES,
        "chunks": list(digests.chunks),
    }


def _plain_file(path: str, digests: FileDigests) -> dict[str, object]:
    nothing = {"data_start": None, "chunk_bytes": None, "chunks": None}
    return {"path": path, "size": digests.size, "sha256": digests.sha256, **nothing}


def _tensors(
    files: Sequence[tuple[PlannedFile, FileDigests]], tables: Mapping[str, Table]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, (plan, digests) in enumerate(files):
        owner = {tensor.name: placed.group.name for placed in plan.groups for tensor in placed.group.tensors}
        folder = tables[plan.path].key if plan.path in tables else plan.shard
        prefix = f"{plan.component}/{folder}" if folder else plan.component
        for placed in plan.tensors:
            if placed.output is None:
                continue
            spec, name = placed.output.spec, placed.output.name
            head, tail = digests.edges[name]
            yield (
                f"{prefix}/{name}",
                {
                    "file": index,
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "offset": placed.begin,
                    "bytes": spec.num_bytes,
                    "group": owner[name],
                    "head": head,
                    "tail": tail,
                },
            )


def _groups(files: Sequence[tuple[PlannedFile, FileDigests]]) -> Iterator[dict[str, object]]:
    for index, (plan, _) in enumerate(files):
        for placed in plan.groups:
            if placed.group.name is not None:
                yield {
                    "name": placed.group.name,
                    "component": plan.component,
                    "file": index,
                    "start": placed.start,
                    "end": placed.end,
                    "needed_by": placed.group.needed_by,
                }


def _components(files: Sequence[tuple[PlannedFile, FileDigests]]) -> dict[str, dict[str, object]]:
    result: dict[str, dict[str, object]] = {}
    for component in dict.fromkeys(plan.component for plan, _ in files):
        own = [
            (index, plan.data_bytes) for index, (plan, _) in enumerate(files) if plan.component == component
        ]
        result[component] = {
            "files": [index for index, _ in own],
            "bytes": arena_bytes([size for _, size in own]),
        }
    return result


def _schedule(table: Table, mode: str, weights_sha256: str) -> dict[str, object]:
    return {
        "name": table.schedule.name,
        "task": table.task,
        "path": table.file.path,
        "mode": mode,
        "evaluations": table.schedule.evaluations,
        "video_sigmas": list(table.schedule.video_bits),
        "audio_sigmas": list(table.schedule.audio_bits),
        "condition_timesteps": table.condition_bits,
        "condition_index": list(table.condition_index),
        "weights_sha256": weights_sha256,
    }
