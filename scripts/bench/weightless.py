"""A prepared directory without weights: manifest, tokenizer and compiled kernels, for what runs on zeros."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loader.manifest import CHUNK_BYTES, MANIFEST_NAME, encode_manifest
from prepare.compile import compile_kernels
from prepare.digests import FileDigests
from prepare.family import PrepareOptions
from prepare.file_plan import PlannedFile, plan_weight_files
from prepare.kernel_files import flushed_files
from prepare.writer import WrittenFiles, build_manifest
from scripts.bench.full_size import _source as source_of
from scripts.tiny_presets import preset

_NO_DIGEST = "0" * 64


def write_weightless(directory: Path, size: str, schedule: str, architectures: Sequence[str] = ()) -> None:
    """Write `directory` (which must not exist) as `full_size` would, but for the weight files.

    Args:
        size: name of a preset. architectures: to compile kernels for.
    """
    config = preset(size)
    source = source_of(config.model, config.num_base_tokens, ("t2va",), (schedule,), (1,))
    plans = [
        *plan_weight_files(source.recipe.groups, source.family),
        *(table.file for table in source.tables),
    ]
    (directory / "tokenizer").mkdir(parents=True)
    (directory / "tokenizer" / "tokenizer.json").write_bytes(source.tokenizer)
    kernels = compile_kernels(
        directory, source.kernel_sizes, architectures, jobs=len(os.sched_getaffinity(0))
    )
    written = WrittenFiles(
        [(plan, _digests(plan)) for plan in plans],
        FileDigests(len(source.tokenizer), _NO_DIGEST, (), {}),
        _NO_DIGEST,
        kernels=kernels,
        kernel_files=flushed_files(directory, kernels),
    )
    options = PrepareOptions(ranks=(1,), kernels=tuple(architectures))
    manifest = build_manifest(source, options, {}, written)  # type: ignore[arg-type]
    (directory / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def _digests(plan: PlannedFile) -> FileDigests:
    edges = {p.output.name: (_NO_DIGEST, _NO_DIGEST) for p in plan.tensors if p.output is not None}
    return FileDigests(plan.num_bytes, _NO_DIGEST, (_NO_DIGEST,) * -(-plan.data_bytes // CHUNK_BYTES), edges)
