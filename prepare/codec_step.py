"""The step of prepare that codes finished weight files in place, one after another or a few at a time, and resumes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loader.codec.pieces import TABLE_PATH
from prepare.codec import Advance, CodedFile, Coding
from prepare.codec_directory import WORKERS, encode_prepared, is_candidate
from prepare.codec_manifest import coded_manifest
from prepare.publish import Staging

_KEY = "coded"  # in a file's ledger record: its CodedFile, or False where nothing is worth it


def open_coding(codec: str) -> Coding | None:
    """What codes, None for `none`. Raises: CapabilityError: this machine cannot."""
    if codec == "none":
        return None
    from prepare.codec_gpu import GpuEncoder

    return Coding(GpuEncoder())


def is_coded(record: Mapping[str, Any] | None) -> bool:
    """Whether this ledger record says that the codec is done with the file."""
    return record is not None and _KEY in record


def encode_staged(
    staging: Staging, manifest: dict[str, Any], coding: Coding, advance: Advance
) -> dict[str, Any]:
    """Replace the files that are worth it; the manifest of what is there then.

    Args:
        manifest: of the raw files, or of a mixture that an interrupted run left; all of them are in the ledger.
        advance: called with plain bytes, from several threads; may raise to stop.
    """
    candidates = [index for index in range(len(manifest["files"])) if is_candidate(manifest, index)]

    def one(index: int) -> CodedFile | None:
        return _one(staging, manifest, index, coding, advance)

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="codec") as pool:
        found = dict(zip(candidates, pool.map(one, candidates), strict=True))
    coded = {index: file for index, file in found.items() if file is not None}
    result, table = coded_manifest(manifest, coded, coding)
    if table:
        with staging.new_file(TABLE_PATH) as file:
            file.write(table)
    return result


def _one(
    staging: Staging, manifest: Mapping[str, Any], index: int, coding: Coding, advance: Advance
) -> CodedFile | None:
    path = manifest["files"][index]["path"]
    record = staging.finished(path)
    if is_coded(record):
        return CodedFile.from_json(record[_KEY]) if record[_KEY] else None
    coded = encode_prepared(
        staging.folder / path, manifest, index, lambda: staging.new_file(path), coding, advance
    )
    if coded is None:
        advance(sum(item["bytes"] for item in manifest["tensors"].values() if item["file"] == index))
        staging.finish({path: {**record, _KEY: False}})
        return None
    now = {"size": coded.size, "sha256": coded.sha256, "chunks": coded.chunks}
    staging.finish({path: {**record, **now, _KEY: coded.to_json()}})
    return coded
