"""Checkpoint in, prepared directory out: check, reserve, write files in parallel, tables, manifest, publish."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.errors import ArtifactError
from loader.manifest import MANIFEST_NAME, encode_manifest
from prepare.adapters import Adapter
from prepare.codec import Coding
from prepare.codec_directory import WORKERS
from prepare.codec_step import encode_staged, is_coded, open_coding
from prepare.compile import require_compiler
from prepare.digests import FileDigests
from prepare.family import FamilySource, PrepareOptions, open_source
from prepare.file_plan import PlannedFile, plan_weight_files
from prepare.kernel_files import kernel_entries, kernel_files, write_kernels
from prepare.progress import Progress, ProgressReport
from prepare.publish import FreeBytes, Staging, free_disk_bytes, open_staging
from prepare.repack import PIECE_BYTES, write_prepared_file
from prepare.scan import FiniteScan, zero_warnings
from prepare.writer import TOKENIZER_PATH, WrittenFiles, build_manifest, byte_options, writer_version

_MAX_WORKERS = 16  # each holds about 50 MB
_TABLES = "tables"  # ledger record of all modulation tables together


@dataclass(frozen=True)
class PrepareResult:
    """A published directory. `reused_files`: finished by an interrupted prepare before."""

    target: Path
    manifest_sha256: str
    num_files: int
    num_bytes: int
    seconds: float
    reused_files: int
    warnings: tuple[str, ...]


def prepare_checkpoint(
    checkpoint: Path,
    target: Path,
    options: PrepareOptions | None = None,
    *,
    replace_target: bool = False,
    report: Callable[[ProgressReport], None] | None = None,
    free_bytes: FreeBytes = free_disk_bytes,
    coding: Coding | None = None,
) -> PrepareResult:
    """Prepare `checkpoint` into the new directory `target`, or continue an interrupted attempt.

    Args:
        checkpoint: published tree in either layout. target: must not exist, unless `replace_target`.
        report: called with progress, from any thread. free_bytes: free disk space of a folder.
        coding: what codes the weights; None = what `options.codec` says.
    Raises: ArtifactError: the checkpoint is unusable (nothing is published, all problems of one kind are listed).
    RequestError: unknown task or schedule. CapabilityError: disk full, another prepare of this target is running, or
    a codec that this machine cannot use.
    """
    started = time.monotonic()
    options = options or PrepareOptions()
    require_compiler(options.kernels)
    coding = coding or open_coding(options.codec)
    source = open_source(checkpoint, options)
    plans = plan_weight_files(source.recipe.groups, source.family, options.max_file_bytes)
    with open_staging(
        target.absolute(), _fingerprint(source, options, plans, coding), replace=replace_target
    ) as staging:
        run = _Run(source, options, staging, plans, report, coding)
        reused = run.num_finished()
        staging.check_space(run.bytes_to_write(), free_bytes)
        written = run.write_files()
        content = run.encode(build_manifest(source, options, run.source_files(), written))
        manifest = encode_manifest(content)
        with staging.new_file(MANIFEST_NAME) as file:
            file.write(manifest)
        staging.publish()
    sizes = [file["size"] for file in content["files"]] + [len(manifest)]
    return PrepareResult(
        target=target,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        num_files=len(sizes),
        num_bytes=sum(sizes),
        seconds=time.monotonic() - started,
        reused_files=reused,
        warnings=(*source.notes, *run.warnings()),
    )


def _fingerprint(
    source: FamilySource, options: PrepareOptions, plans: list[PlannedFile], coding: Coding | None
) -> str:
    """Digest of everything that decides bytes; source files by size and time, because hashing them takes minutes."""
    states = {
        str(path): (status.st_size, status.st_mtime_ns)
        for path in (*source.read_files, *(adapter.path for adapter in source.adapters))
        for status in [path.stat()]
    }
    identity = {
        "writer": writer_version(),
        "options": byte_options(source, options),
        "origin": [options.repository, options.revision, source.layout, str(source.root)],
        "config": source.config(),
        "headers": [hashlib.sha256(plan.header).hexdigest() for plan in plans],
        "sources": states,
        "coding": coding and [coding.encoder.library, coding.encoder.version, *vars(coding.limits).values()],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class _Stopped(Exception):
    """Another worker failed; this one gives up."""


class _Run:
    """The work of one prepare. Every unit records itself in the ledger when it is done, and is skipped if it was."""

    def __init__(
        self,
        source: FamilySource,
        options: PrepareOptions,
        staging: Staging,
        plans: Sequence[PlannedFile],
        report: Callable[[ProgressReport], None] | None,
        coding: Coding | None = None,
    ) -> None:
        self._source, self._options, self._staging, self._plans = source, options, staging, plans
        self._coding = coding
        self._stop = threading.Event()
        weights = [[path] for path in source.read_files if path.suffix == ".safetensors"]
        self._adapter_units = [[adapter.path] for adapter in source.adapters]
        # One unit for all the small files: every record costs a flush to disk.
        self._hash_units = [*weights, [path for path in source.read_files if path.suffix != ".safetensors"]]
        self._progress = Progress(self._bytes_to_process(), report)

    def num_finished(self) -> int:
        """Output files that an interrupted attempt left finished."""
        return sum(self._is_done(plan.path) for plan in self._all_plans())

    def bytes_to_write(self) -> int:
        """Bytes of output files that are not finished, and of those that are coded at a time beside their raw form."""
        sizes = [plan.num_bytes for plan in self._all_plans() if not self._is_done(plan.path)]
        beside = sorted(plan.num_bytes for plan in self._uncoded())[-WORKERS:]
        return sum(sizes) + sum(beside) + len(self._source.tokenizer)

    def _uncoded(self) -> list[PlannedFile]:
        if self._coding is None:
            return []
        return [plan for plan in self._plans if not is_coded(self._staging.finished(plan.path))]

    def encode(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Code what was written, if asked to; the manifest of the result."""
        if self._coding is None:
            return manifest
        return encode_staged(self._staging, manifest, self._coding, self._advance)

    def write_files(self) -> WrittenFiles:
        """Write what is missing, all of it in parallel; the longest jobs first."""
        jobs: list[Future[None]] = []
        with ThreadPoolExecutor(self._num_workers(), thread_name_prefix="prepare") as pool:
            jobs += [pool.submit(self._write_weights, plan) for plan in self._plans]
            jobs.append(pool.submit(self._write_tables))
            units = (*self._hash_units, *self._adapter_units)
            jobs += [pool.submit(self._hash_sources, paths) for paths in units]
            jobs.append(pool.submit(self._write_kernels))
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                if not all(job.done() for job in jobs):
                    self._stop.set()
                    pool.shutdown(cancel_futures=True)
        _raise_first(jobs)
        self._write_tokenizer()
        return WrittenFiles(
            files=[(plan, self._digests(plan.path)) for plan in self._all_plans()],
            tokenizer=self._digests(TOKENIZER_PATH),
            weights_sha256=str(self._staging.finished(_TABLES)["weights_sha256"]),
            kernels=kernel_entries(self._staging),
            kernel_files=kernel_files(self._staging),
            adapters=[self._adapter_record(adapter) for adapter in self._source.adapters],
        )

    def source_files(self) -> dict[str, Mapping[str, object]]:
        """Relative path -> size and SHA-256 of every file of the checkpoint that was read."""
        records = [self._staging.finished(_unit_name(paths))["files"] for paths in self._hash_units]
        return {name: state for record in records for name, state in record.items()}

    def warnings(self) -> list[str]:
        """Warnings about single tensors, in file order."""
        names = [*(plan.path for plan in self._plans), _TABLES]
        return [warning for name in names for warning in self._staging.finished(name)["warnings"]]

    def _all_plans(self) -> list[PlannedFile]:
        return [*self._plans, *(table.file for table in self._source.tables)]

    def _is_done(self, name: str) -> bool:
        return self._staging.finished(name) is not None

    def _digests(self, path: str) -> FileDigests:
        return FileDigests.from_json(self._staging.finished(path))

    def _num_workers(self) -> int:
        return self._options.workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))

    def _bytes_to_process(self) -> int:
        """Bytes that progress counts: hashed source files, read tensors, read projections."""
        hashed = [
            path
            for paths in (*self._hash_units, *self._adapter_units)
            if not self._is_done(_unit_name(paths))
            for path in paths
        ]
        outputs = [plan for plan in self._plans if not self._is_done(plan.path)]
        tables = 0 if self._is_done(_TABLES) else self._source.table_bytes()
        written = sum(map(self._read_bytes, outputs)) + sum(map(self._read_bytes, self._uncoded()))
        return sum(path.stat().st_size for path in hashed) + written + tables

    def _read_bytes(self, plan: PlannedFile) -> int:
        return sum(placed.end - placed.begin for placed in plan.tensors if placed.output is not None)

    def _advance(self, num_bytes: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._progress.advance(num_bytes)

    def _write_weights(self, plan: PlannedFile) -> None:
        if self._is_done(plan.path):
            return
        scan = FiniteScan()
        with self._staging.new_file(plan.path) as file:
            source = self._source
            digests = write_prepared_file(plan, file, source.sources, scan, self._advance, source.updates)
        self._staging.finish({plan.path: _record(digests, zero_warnings(scan.zero_tensors()))})

    def _hash_sources(self, paths: Sequence[Path]) -> None:
        if self._is_done(_unit_name(paths)):
            return
        files = {self._source_name(path): _hash_file(path, self._advance) for path in paths}
        self._staging.finish({_unit_name(paths): {"files": files}})

    def _source_name(self, path: Path) -> str:
        """Path within the checkpoint; of an adapter outside it the file's name."""
        root = self._source.root
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name

    def _adapter_record(self, adapter: Adapter) -> dict[str, object]:
        (state,) = self._staging.finished(_unit_name([adapter.path]))["files"].values()
        return {"name": adapter.path.name, "format": adapter.format, "scale": adapter.scale, **state}

    def _write_tables(self) -> None:
        if self._is_done(_TABLES):
            return
        scan, source = FiniteScan(), self._source
        with ExitStack() as stack:
            files = [stack.enter_context(self._staging.new_file(table.file.path)) for table in source.tables]
            digests, sha256 = source.write_tables(
                files, self._options, scan, self._advance, self._num_workers()
            )
        records = {
            table.file.path: _record(result, []) for table, result in zip(source.tables, digests, strict=True)
        }
        summary = {"weights_sha256": sha256, "warnings": zero_warnings(scan.zero_tensors())}
        self._staging.finish({**records, _TABLES: summary})

    def _write_kernels(self) -> None:
        architectures = self._options.kernels
        write_kernels(self._staging, self._source.kernel_sizes, architectures, min(4, self._num_workers()))

    def _write_tokenizer(self) -> None:
        if self._is_done(TOKENIZER_PATH):
            return
        data = self._source.tokenizer
        with self._staging.new_file(TOKENIZER_PATH) as file:
            file.write(data)
        digests = FileDigests(len(data), hashlib.sha256(data).hexdigest(), (), {})
        self._staging.finish({TOKENIZER_PATH: _record(digests, [])})


def _record(digests: FileDigests, warnings: Sequence[str]) -> dict[str, object]:
    """Ledger form of one finished file."""
    return {**digests.to_json(), "warnings": warnings}


def _unit_name(paths: Sequence[Path]) -> str:
    """Ledger record of one group of source files."""
    return f"source {paths[0]}"


def _hash_file(path: Path, advance: Callable[[int], None]) -> dict[str, object]:
    digest, size, buffer = hashlib.sha256(), 0, bytearray(PIECE_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                size += count
                advance(count)
    except OSError as error:
        raise ArtifactError(f"cannot be read ({error.strerror})", where=path.name) from error
    return {"size": size, "sha256": digest.hexdigest()}


def _raise_first(jobs: Sequence[Future[None]]) -> None:
    """Raise the first failure that is not a consequence of another one."""
    for job in jobs:
        error = None if job.cancelled() else job.exception()
        if error is not None and not isinstance(error, _Stopped):
            raise error
