"""The manifest of a prepared directory once some of its files are coded."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from loader.codec.pieces import BYTES_PER_PIECE, TABLE_PATH, decode_table
from loader.errors import ArtifactError
from loader.header import PAD_PREFIX, Header
from loader.manifest import CODED_MAJOR, FORMAT_NAME, local_name
from prepare.codec import CodedFile, Coding, RawTensor


def raw_tensors(manifest: Mapping[str, Any], file: int, header: Header) -> list[RawTensor]:
    """Tensors of one file in file order, as its header and the (raw) manifest have them.

    Raises: ArtifactError: the two disagree.
    """
    groups = {
        local_name(name, record["group"]): record["group"]
        for name, record in manifest["tensors"].items()
        if record["file"] == file
    }
    entries = [entry for entry in header.tensors if not entry.name.startswith(PAD_PREFIX)]
    if {entry.name for entry in entries} != set(groups):
        raise ArtifactError(
            "tensors of the header are not those of the manifest", where=manifest["files"][file]["path"]
        )
    return [RawTensor(e.name, e.dtype, e.shape, e.begin, e.end, groups[e.name]) for e in entries]


def coded_manifest(
    manifest: Mapping[str, Any],
    files: Mapping[int, CodedFile],
    coding: Coding,
) -> tuple[dict[str, Any], bytes]:
    """(manifest, bytes of the piece table) of a directory in which the files of these indexes were replaced.

    With no file at all the manifest stays as it is and the table is empty: the directory is a raw one.
    """
    result: dict[str, Any] = copy.deepcopy(dict(manifest))
    if not files:
        return result, b""
    rows: dict[int, int] = {}
    tables: list[bytes] = []
    for index in sorted(files):
        rows[index] = sum(len(table) for table in tables) // BYTES_PER_PIECE
        tables.append(files[index].table.encode())
        result["files"][index] |= _file(files[index])
    table = _join(tables)
    for name, record in result["tensors"].items():
        if record["file"] in files:
            local = local_name(name, record["group"])
            _move_tensor(record, local, files[record["file"]], rows[record["file"]])
    for group in result["groups"]:
        if group["file"] in files:
            group["place"], group["place_end"] = group["start"], group["end"]
            group["start"], group["end"] = files[group["file"]].groups[group["name"]]
    result["codec"] = {
        "name": coding.encoder.name,
        "library": coding.encoder.library,
        "version": coding.encoder.version,
        "piece_bytes": coding.limits.piece_bytes,
        "table": len(result["files"]),
    }
    nothing = {"data_start": None, "chunk_bytes": None, "chunks": None}
    digest = hashlib.sha256(table).hexdigest()
    result["files"].append({"path": TABLE_PATH, "size": len(table), "sha256": digest, **nothing})
    result["format"] = f"{FORMAT_NAME}/{CODED_MAJOR}"
    return result, table


def _file(coded: CodedFile) -> dict[str, object]:
    return {
        "size": coded.size,
        "data_start": coded.data_start,
        "sha256": coded.sha256,
        "chunks": list(coded.chunks),
        "decoded_bytes": coded.decoded_bytes,
    }


def _move_tensor(record: dict[str, Any], local: str, file: CodedFile, first_row: int) -> None:
    """`place` is where the tensor was; `head` and `tail` stay those of the tensor, `coded` has those of the file."""
    record["place"], record["offset"] = record["offset"], file.places[local]
    if local in file.coded:
        stored, row, head, tail = file.coded[local]
        record["coded"] = {"bytes": stored, "row": first_row + row, "head": head, "tail": tail}


def _join(tables: list[bytes]) -> bytes:
    """Tables of several files as one: columns end to end."""
    parts = [decode_table(table) for table in tables]
    return b"".join(
        column.tobytes()
        for columns in zip(*((t.places, t.sizes, t.sums) for t in parts), strict=True)
        for column in columns
    )
