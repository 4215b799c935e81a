"""Kernels as part of one prepare: compiled into the growing folder, hashed, recorded once all of them are on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.catalog import ModelSizes
from kernels.cubin_index import INDEX_NAME
from prepare.compile import KERNEL_FOLDER, compile_kernels
from prepare.digests import FileDigests, edge_digest
from prepare.publish import Staging

_LEDGER_NAME = "compiled kernels"  # entries of the manifest; every file has a record of its own


def are_compiled(staging: Staging) -> bool:
    """Whether an earlier attempt compiled everything and all of its files are still there."""
    entries = staging.finished(_LEDGER_NAME)
    return entries is not None and all(staging.finished(path) for path in _paths(entries["kernels"]))


def write_kernels(staging: Staging, sizes: ModelSizes, architectures: Sequence[str], jobs: int) -> None:
    """Compile unless an earlier attempt did. Raises: CapabilityError, ArtifactError: see `compile_kernels`."""
    if not architectures or are_compiled(staging):
        return
    entries = compile_kernels(staging.folder, sizes, architectures, jobs=jobs)
    records = {path: digests.to_json() for path, digests in flushed_files(staging.folder, entries)}
    staging.finish({**records, _LEDGER_NAME: {"kernels": entries}})


def kernel_entries(staging: Staging) -> list[Mapping[str, Any]]:
    """The manifest's `kernels` list."""
    recorded = staging.finished(_LEDGER_NAME)
    return [] if recorded is None else list(recorded["kernels"])


def kernel_files(staging: Staging) -> list[tuple[str, FileDigests]]:
    """(path in the directory, digests) of every file under `kernels/`, sorted by path."""
    paths = _paths(kernel_entries(staging))
    return [(path, FileDigests.from_json(staging.finished(path))) for path in paths]


def flushed_files(directory: Path, entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, FileDigests]]:
    """(path in the directory, digests) of every file that `compile_kernels` wrote, sorted; all on disk afterwards."""
    return [(path, _flush(directory / path)) for path in _paths(entries)]


def _paths(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    names = {str(entry["file"]) for entry in entries} | ({INDEX_NAME} if entries else set())
    return [f"{KERNEL_FOLDER}/{name}" for name in sorted(names)]


def _flush(path: Path) -> FileDigests:
    """Digests of a small file that another process wrote; on disk afterwards."""
    data = path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileDigests(len(data), edge_digest(data), (), {})
