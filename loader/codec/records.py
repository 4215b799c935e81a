"""What a manifest says about coded weights.

A coded directory has `"format": "coldframe-manifest/2"` and a top-level `codec`; a file with coded tensors has
`decoded_bytes`, its groups a second range `place`, `place_end`, its tensors a `place`: all of them in the data section
that the file would have without a codec, and arenas are laid out like that. Only a coded tensor has `coded`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loader.codec.pieces import UNIT_BYTES, PieceTable, read_table
from loader.errors import ArtifactError
from loader.fields import Fields

if TYPE_CHECKING:
    from loader.manifest import FileRecord

CODECS = ("ans",)


class CodecRecord(NamedTuple):
    """How tensors were coded. `version`: of the library that coded them, which reads its own streams and older ones."""

    name: str
    library: str
    version: str
    piece_bytes: int
    table: PieceTable


class CodedRecord(NamedTuple):
    """A coded tensor's stored form: bytes in the file, the table's row of its first piece, digests of its stored ends."""

    bytes: int
    row: int
    head: str
    tail: str


def read_codec(item: Fields, files: tuple[FileRecord, ...], directory: Path) -> CodecRecord:
    """The manifest's `codec`, with the piece table that it names. Raises: ArtifactError."""
    name, piece_bytes, index = item.text("name"), item.count("piece_bytes"), item.count("table")
    if name not in CODECS:
        raise item.error("name", repr(name), ", ".join(CODECS))
    if not piece_bytes or piece_bytes % UNIT_BYTES:
        raise item.error("piece_bytes", piece_bytes, f"a multiple of {UNIT_BYTES}")
    if index >= len(files) or files[index].data_start is not None:
        raise item.error("table", index, "the index of a file that is not safetensors")
    file = files[index]
    table = read_table(directory / file.path, file.size, file.sha256)
    return CodecRecord(name, item.text("library"), item.text("version"), piece_bytes, table)


def read_coded(item: Fields, offset: int, decoded_bytes: int, codec: CodecRecord | None) -> CodedRecord:
    """A tensor's `coded`, checked against the table's rows. Raises: ArtifactError."""
    if codec is None:
        raise ArtifactError("coded, but the manifest names no codec", where=item.where)
    size, row, table = item.count("bytes"), item.count("row"), codec.table
    count = -(-decoded_bytes // codec.piece_bytes)
    if not count or row + count > len(table):
        raise item.error("row", row, f"{count} pieces inside the table's {len(table)}")
    last = row + count - 1
    end = table.places[last] * UNIT_BYTES + table.sizes[last]
    if table.places[row] * UNIT_BYTES != offset or not offset < end <= offset + size:
        raise item.error(
            "bytes", f"pieces at {table.places[row] * UNIT_BYTES}..{end}", f"inside {offset}..{offset + size}"
        )
    return CodedRecord(size, row, item.digest("head"), item.digest("tail"))
