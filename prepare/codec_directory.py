"""A whole prepared directory, coded: the step behind `prepare --codec`, also for directories that are there already."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from loader.codec.pieces import TABLE_PATH
from loader.errors import ArtifactError
from loader.header import read_header
from loader.manifest import MANIFEST_NAME, encode_manifest, read_manifest
from prepare.codec import Advance, CodedFile, Coding, choose_tensors, encode_file
from prepare.codec_manifest import coded_manifest, raw_tensors

WORKERS = 4  # files at a time: each costs its size in free space until its raw form is gone
_RAW_COMPONENTS = ("adaln",)  # `validate` looks at every number of a table, and they are small


@dataclass(frozen=True)
class CodecReport:
    """What coding changed. Bytes by component: as they were and as they are now."""

    manifest_sha256: str
    plain: Mapping[str, int]
    stored: Mapping[str, int]
    coded_tensors: int


def is_candidate(manifest: Mapping[str, Any], file: int) -> bool:
    """Whether a file may hold tensors worth coding."""
    owner = next((name for name, item in manifest["components"].items() if file in item["files"]), None)
    return owner is not None and owner not in _RAW_COMPONENTS


def encode_prepared(
    path: Path,
    manifest: Mapping[str, Any],
    file: int,
    new_file: Callable[[], AbstractContextManager[BinaryIO]],
    coding: Coding,
    advance: Advance,
) -> CodedFile | None:
    """Code the file with this index of a raw manifest. None: nothing in it is worth it, and no file was made.

    Args:
        new_file: opens the file to write, for reading and writing.
    Raises: ArtifactError: the file is not what the manifest says.
    """
    if not is_candidate(manifest, file):
        return None
    header = read_header(path)
    if header.file_bytes != manifest["files"][file]["size"]:
        raise ArtifactError("file is not the one in the manifest", where=str(path), found=header.file_bytes)
    tensors = raw_tensors(manifest, file, header)
    with path.open("rb") as source:
        chosen = choose_tensors(source, header, tensors, coding)
        if not any(chosen):
            return None
        with new_file() as target:
            return encode_file(source, header, tensors, chosen, target, coding, advance)


def encode_directory(
    source: Path,
    target: Path,
    coding: Coding,
    *,
    consume: bool = False,
    advance: Advance = lambda num_bytes: None,
    workers: int = WORKERS,
) -> CodecReport:
    """Write the coded form of a prepared directory into the new directory `target`, the manifest last.

    Args:
        consume: remove each file of `source` once it is written, for disks that do not hold both.
        advance: called with plain bytes done, from several threads.
    Raises: ArtifactError: `source` is not a raw prepared directory.
    """
    read_manifest(source)
    manifest = json.loads((source / MANIFEST_NAME).read_bytes())
    if "codec" in manifest:
        raise ArtifactError("directory is coded already", where=str(source))
    target.mkdir(parents=True)

    def one(index: int) -> CodedFile | None:
        return _one_file(source, target, manifest, index, coding, advance, consume)

    with ThreadPoolExecutor(workers, thread_name_prefix="codec") as pool:
        found = dict(enumerate(pool.map(one, range(len(manifest["files"])))))
    coded = {index: file for index, file in found.items() if file is not None}
    result, table = coded_manifest(manifest, coded, coding)
    if table:
        (target / TABLE_PATH).parent.mkdir(parents=True, exist_ok=True)
        (target / TABLE_PATH).write_bytes(table)
    _copy_rest(source, target)
    (target / MANIFEST_NAME).write_bytes(encode_manifest(result))
    return report_of(manifest, result, read_manifest(target).sha256)


def _one_file(
    source: Path,
    target: Path,
    manifest: Mapping[str, Any],
    index: int,
    coding: Coding,
    advance: Advance,
    consume: bool,
) -> CodedFile | None:
    path = manifest["files"][index]["path"]
    (target / path).parent.mkdir(parents=True, exist_ok=True)
    coded = encode_prepared(
        source / path, manifest, index, lambda: (target / path).open("w+b"), coding, advance
    )
    if coded is None:
        shutil.copyfile(source / path, target / path)
    if consume:
        (source / path).unlink()
    return coded


def _copy_rest(source: Path, target: Path) -> None:
    """Files that the manifest does not list one by one (compiled kernels' index, plans)."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_file() and path.name != MANIFEST_NAME and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def report_of(plain: Mapping[str, Any], coded: Mapping[str, Any], sha256: str) -> CodecReport:
    """Bytes of each component's files in a raw manifest and in the coded one made of it."""

    def sizes(manifest: Mapping[str, Any]) -> dict[str, int]:
        return {
            name: sum(manifest["files"][index]["size"] for index in item["files"])
            for name, item in manifest["components"].items()
        }

    count = sum("coded" in record for record in coded["tensors"].values())
    return CodecReport(sha256, sizes(plain), sizes(coded), count)
