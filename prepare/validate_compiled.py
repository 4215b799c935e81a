"""Compiled parts of a prepared directory against its manifest: kernels and plans, entry by entry.

Cubins and plans are machine code that a driver accepts without looking, damaged or not, so every entry must be of the
known form and name a listed file with the same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernels.cubin_index import INDEX_NAME, KernelEntry, parse_entries, read_index
from loader.errors import ArtifactError
from loader.manifest import MANIFEST_NAME, Manifest
from prepare.compile import KERNEL_FOLDER


def compiled_problems(manifest: Manifest) -> Iterator[str]:
    """One line per problem of `kernels` and `plans`. The files' own bytes are checked with all other files."""
    entries: list[KernelEntry] = []
    for number, document in enumerate(manifest.kernels):
        try:
            entries += parse_entries([document])
        except ArtifactError as error:
            yield f"{MANIFEST_NAME}: kernels[{number}]: {error}"
    yield from _repeated(entries)
    yield from _kernels(manifest, entries)
    if manifest.kernels:
        yield from _index(manifest, entries)
    for number, plan in enumerate(manifest.plans):
        yield from _plan(manifest, f"{MANIFEST_NAME}: plans[{number}]", plan)


def _repeated(entries: Sequence[KernelEntry]) -> Iterator[str]:
    try:
        parse_entries([entry.as_dict() for entry in entries])
    except ArtifactError as error:
        yield f"{MANIFEST_NAME}: kernels: {error}"


def _kernels(manifest: Manifest, entries: Sequence[KernelEntry]) -> Iterator[str]:
    files = {file.path: (file.size, file.sha256) for file in manifest.files}
    for entry in entries:
        path = f"{KERNEL_FOLDER}/{entry.file}"
        if path not in files:
            yield f"{path}: {entry.title}: not in the manifest's files"
        elif files[path] != (entry.size, entry.sha256):
            yield f"{path}: {entry.title}: size or SHA-256 differ between kernels and files"
    listed = {f"{KERNEL_FOLDER}/{entry.file}" for entry in entries} | {f"{KERNEL_FOLDER}/{INDEX_NAME}"}
    if len(entries) == len(manifest.kernels):
        for path in files:
            if path.startswith(f"{KERNEL_FOLDER}/") and path not in listed:
                yield f"{path}: in the manifest's files, in no kernel entry"


def _index(manifest: Manifest, entries: Sequence[KernelEntry]) -> Iterator[str]:
    path = f"{KERNEL_FOLDER}/{INDEX_NAME}"
    if path not in {file.path for file in manifest.files}:
        yield f"{path}: not in the manifest's files"
        return
    try:
        found = read_index(manifest.directory / KERNEL_FOLDER)
    except ArtifactError as error:
        yield f"{path}: {error}"
        return
    if sorted(found, key=lambda entry: entry.file) != sorted(entries, key=lambda entry: entry.file):
        yield f"{path}: differs from the manifest's kernels"


def _plan(manifest: Manifest, where: str, plan: Mapping[str, Any]) -> Iterator[str]:
    """A plan is not reproducible, so it is not among `files`; its entry has path, size and SHA-256 itself."""
    path, size, sha256 = (plan.get(key) for key in ("path", "size", "sha256"))
    if not isinstance(path, str) or not isinstance(sha256, str) or type(size) is not int:
        yield f"{where}: malformed entry, needs path, size and sha256; found {dict(plan)!r}"
        return
    try:
        data = (manifest.directory / path).read_bytes()
    except OSError as error:
        yield f"{path}: missing or cannot be read ({error.strerror})"
        return
    if len(data) != size:
        yield f"{path}: truncated or too long, size is {len(data)} bytes, expected {size}"
    elif hashlib.sha256(data).hexdigest() != sha256:
        yield f"{path}: SHA-256 differs"
