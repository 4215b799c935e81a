"""Check a prepared directory against its manifest, completely: every byte, header, digest, tokenizer id, table entry.

All problems are listed, not only the first. Memory is bounded by one 16 MiB chunk per worker.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loader.errors import ArtifactError
from loader.header import PAD_PREFIX, TensorEntry, read_header
from loader.manifest import EDGE_BYTES, MANIFEST_NAME, FileRecord, Manifest, TensorRecord, read_manifest
from prepare.codec_check import piece_problems
from prepare.digests import ChunkDigests, edge_digest
from prepare.repack import as_words
from prepare.scan import FiniteScan
from prepare.tokenizer import check_tokenizer
from prepare.validate_compiled import compiled_problems
from prepare.writer import TOKENIZER_PATH

_READ_BYTES = 4 << 20
_MAX_WORKERS = 16


@dataclass(frozen=True)
class ValidationReport:
    """What was checked. `problems` is empty for a sound directory; each names file and tensor or byte range."""

    manifest_sha256: str
    num_files: int
    num_bytes: int
    num_tensors: int
    problems: tuple[str, ...]


def validate_directory(
    directory: Path, pinned_sha256: str | None = None, advance: Callable[[int], None] = lambda num_bytes: None
) -> ValidationReport:
    """Check everything that can be checked without running the model.

    Args:
        pinned_sha256: digest that the manifest must have.
        advance: called with bytes read, from several threads.
    Raises: ArtifactError: the manifest itself cannot be read, is inconsistent, or is not the pinned one.
    """
    manifest = read_manifest(directory, pinned_sha256)
    problems = list(_unlisted(directory, manifest))
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, thread_name_prefix="validate") as pool:
        checks = pool.map(lambda index: _check_file(manifest, index, advance), range(len(manifest.files)))
        problems += [problem for found in checks for problem in found]
    problems += [*_schedules(manifest), *compiled_problems(manifest), *piece_problems(manifest)]
    return ValidationReport(
        manifest.sha256,
        len(manifest.files),
        sum(file.size for file in manifest.files),
        len(manifest.tensors),
        tuple(problems),
    )


def validation_bytes(directory: Path) -> int:
    """Bytes that `validate_directory` reads. Raises: ArtifactError."""
    return sum(file.size for file in read_manifest(directory).files)


def require_valid(report: ValidationReport, directory: Path) -> None:
    """Raises: ArtifactError: the report lists problems; all of them are in the message."""
    if report.problems:
        raise ArtifactError(
            f"{len(report.problems)} problems", where=str(directory), found="; ".join(report.problems)
        )


def _unlisted(directory: Path, manifest: Manifest) -> Iterator[str]:
    listed = {MANIFEST_NAME, *(file.path for file in manifest.files)}
    listed |= {str(entry["path"]) for entry in manifest.plans if "path" in entry}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in listed:
            yield f"{name}: not in the manifest"


def _check_file(manifest: Manifest, index: int, advance: Callable[[int], None]) -> list[str]:
    record = manifest.files[index]
    path = manifest.directory / record.path
    try:
        size = path.stat().st_size
        if size != record.size:
            kind = "truncated" if size < record.size else "too long"
            return [f"{record.path}: {kind}, size is {size} bytes, expected {record.size}"]
        if record.data_start is None:
            return list(_check_plain(path, record))
        tensors = [tensor for tensor in manifest.tensors.values() if tensor.file == index]
        problems = list(_check_digests(path, record, record.data_start, advance))
        return problems + list(_check_tensors(path, record, record.data_start, tensors))
    except OSError as error:
        return [f"{record.path}: missing or cannot be read ({error.strerror})"]


def _check_plain(path: Path, record: FileRecord) -> Iterator[str]:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record.sha256:
        yield f"{record.path}: SHA-256 differs"
    if record.path == TOKENIZER_PATH:
        try:
            check_tokenizer(data, record.path)
        except ArtifactError as error:
            yield str(error)


def _check_digests(
    path: Path, record: FileRecord, data_start: int, advance: Callable[[int], None]
) -> Iterator[str]:
    """Whole file and chunks in one read; a damaged chunk is named by its byte range."""
    assert record.chunk_bytes is not None
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        digests = ChunkDigests(file.read(data_start), record.chunk_bytes)
        advance(data_start)
        with digests:
            while count := file.readinto(buffer):
                digests.update(buffer[:count])
                advance(count)
    whole, chunks = digests.finish()
    for number, (found, expected) in enumerate(zip(chunks, record.chunks, strict=True)):
        if found != expected:
            start = data_start + number * record.chunk_bytes
            stop = min(start + record.chunk_bytes, record.size)
            yield f"{record.path}: SHA-256 differs for bytes {start} to {stop - 1}"
    if whole != record.sha256:
        yield f"{record.path}: SHA-256 of the file differs"


def _check_tensors(
    path: Path, record: FileRecord, data_start: int, tensors: Sequence[TensorRecord]
) -> Iterator[str]:
    try:
        header = read_header(path, record.path)
    except ArtifactError as error:
        yield str(error)
        return
    if header.data_start != data_start:
        yield f"{record.path}: data starts at {header.data_start}, expected {data_start}"
        return
    yield from _compare_header(record.path, header.tensors, tensors)
    with path.open("rb") as file:
        for tensor in tensors:
            edge = min(tensor.stored_bytes, EDGE_BYTES)
            head, tail = (tensor.head, tensor.tail) if tensor.coded is None else tensor.coded[2:]
            for kind, offset, expected in (
                ("first", tensor.offset, head),
                ("last", tensor.offset + tensor.stored_bytes - edge, tail),
            ):
                file.seek(data_start + offset)
                if edge_digest(file.read(edge)) != expected:
                    yield f"{record.path}: {tensor.name}: SHA-256 of the {kind} {edge} bytes differs"
            if tensor.name.startswith("adaln/"):
                file.seek(data_start + tensor.offset)
                yield from _check_table(record.path, tensor, file.read(tensor.bytes))


def _compare_header(
    path: str, entries: Sequence[TensorEntry], tensors: Sequence[TensorRecord]
) -> Iterator[str]:
    in_file = {entry.begin: entry for entry in entries if not entry.name.startswith(PAD_PREFIX)}
    for tensor in tensors:
        entry = in_file.pop(tensor.offset, None)
        found = None if entry is None else (entry.dtype, entry.shape, entry.num_bytes)
        as_stored = (tensor.dtype, tensor.shape, tensor.bytes)
        if tensor.coded is not None:
            as_stored = ("U8", (tensor.stored_bytes,), tensor.stored_bytes)
        if entry is None or found != as_stored:
            expected = f"{as_stored[0]} {list(as_stored[1])} at {tensor.offset}"
            yield f"{path}: {tensor.name}: the header has {found}, expected {expected}"
        elif not tensor.name.endswith(f"/{entry.name}"):
            yield f"{path}: {tensor.name}: the header calls it {entry.name}"
    for entry in in_file.values():
        yield f"{path}: {entry.name}: in the header, not in the manifest"


def _check_table(path: str, tensor: TensorRecord, data: bytes) -> Iterator[str]:
    scan = FiniteScan()
    scan.check(tensor.name, tensor.dtype, as_words(memoryview(data), tensor.dtype))
    for kind in scan.bad.values():
        yield f"{path}: {tensor.name}: table is not finite ({kind})"


def _schedules(manifest: Manifest) -> Iterator[str]:
    for schedule in manifest.schedules:
        where = f"{MANIFEST_NAME}: schedule {schedule.name} for {schedule.task}"
        key = f"{schedule.task}/{schedule.name}"
        if key not in manifest.orders:
            yield f"{where}: no loading order {key}"
            continue
        steps = [group for group in manifest.orders[key] if group.startswith("adaln/") and "/step." in group]
        if len(steps) != schedule.evaluations:
            yield f"{where}: {len(steps)} step groups, expected {schedule.evaluations}"
        if schedule.condition_index and len(schedule.condition_index) != schedule.evaluations:
            yield f"{where}: condition_index has {len(schedule.condition_index)} entries, expected {schedule.evaluations}"
        if any(index >= len(schedule.condition_timesteps) for index in schedule.condition_index):
            yield f"{where}: condition_index points beyond {len(schedule.condition_timesteps)} timesteps"
