"""One prepared file with its large tensors coded: raw file in, coded file and the facts for the manifest out.

A coded tensor is a `U8` tensor of independently coded pieces in the same safetensors file; whoever does not know the
codec still reads the file. Which tensors are coded is decided by a sample of each. No piece crosses a border of the
manifest's 16 MiB digest blocks. Memory: one batch of pieces per call.
"""

from __future__ import annotations

import base64
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from loader.codec.pieces import PIECE_BYTES, UNIT_BYTES, PieceTable, decode_table
from loader.header import (
    PAD_PREFIX,
    PAGE_BYTES,
    TENSOR_ALIGN_BYTES,
    Header,
    TensorEntry,
    build_header,
    round_up,
)
from loader.manifest import CHUNK_BYTES, EDGE_BYTES
from prepare.digests import ChunkDigests, edge_digest

BATCH_PIECES = 256  # 64 MiB a call
MIN_BYTES = 1 << 20  # smaller tensors stay as they are
MAX_RATIO = 0.9  # of coded to plain bytes; above it a tensor stays as it is
_SAMPLES = 8
_COPY_BYTES = 8 << 20
_MOST_PAD_ENTRIES_BYTES = 300  # three of them per tensor, of the header's text

Advance = Callable[[int], None]


class PieceEncoder(Protocol):
    """Codes pieces and proves that they decode to what they were."""

    name: str
    library: str
    version: str

    def encode(self, data: memoryview, dtype: str, piece_bytes: int) -> tuple[list[bytes], list[int]]:
        """(coded pieces, CRC-32 of each decoded piece).

        The same data may be coded to other bytes, and slightly other sizes, by the next call; the sums are the same.

        Raises: InternalError: a piece did not decode to itself. CapabilityError: device memory is short.
        """
        ...


@dataclass(frozen=True)
class CodecLimits:
    """Sizes that decide bytes; others than these are for tests."""

    piece_bytes: int = PIECE_BYTES
    min_bytes: int = MIN_BYTES
    max_ratio: float = MAX_RATIO
    block_bytes: int = CHUNK_BYTES


@dataclass(frozen=True)
class RawTensor:
    """A tensor of the raw file: name in the header, place in the data section, group (None: gathered by row)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    group: str | None


@dataclass
class CodedFile:
    """A written file. Rows of `coded` count from the file's own first piece.

    Attributes:
        decoded_bytes: of the raw file's data section.
        places: header name → offset as stored.
        coded: header name → (stored bytes, row, digest of the first stored KiB, of the last).
        groups: name → range as stored.
        plain_bytes: of the tensors that were coded, before that.
    """

    size: int
    sha256: str
    data_start: int
    chunks: tuple[str, ...]
    decoded_bytes: int
    places: dict[str, int]
    coded: dict[str, tuple[int, int, str, str]]
    groups: dict[str, tuple[int, int]]
    plain_bytes: int
    table: PieceTable

    def to_json(self) -> dict[str, object]:
        """Form of the ledger; `from_json` reads it."""
        return {**vars(self), "table": base64.b64encode(self.table.encode()).decode()}

    @classmethod
    def from_json(cls, value: dict[str, object]) -> CodedFile:
        known = {name: value[name] for name in cls.__dataclass_fields__}
        known["table"] = decode_table(base64.b64decode(str(value["table"])))
        return cls(**known)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Coding:
    """With what and how to code."""

    encoder: PieceEncoder
    limits: CodecLimits = field(default_factory=CodecLimits)


def choose_tensors(
    source: BinaryIO, header: Header, tensors: Sequence[RawTensor], coding: Coding
) -> list[bool]:
    """For each tensor of a raw file whether it is worth coding.

    Args:
        header: of the source. tensors: its tensors in file order, fillers left out.
    """
    encoder, limits = coding.encoder, coding.limits
    return [_is_worth_it(source.fileno(), header, tensor, encoder, limits) for tensor in tensors]


def encode_file(
    source: BinaryIO,
    header: Header,
    tensors: Sequence[RawTensor],
    chosen: Sequence[bool],
    target: BinaryIO,
    coding: Coding,
    advance: Advance,
) -> CodedFile:
    """Write the coded form of one prepared file.

    Args:
        chosen: of `choose_tensors`; at least one is to be coded.
        target: open for reading and writing.
        advance: called with the number of plain bytes after every batch; may raise to stop.
    """
    writer = _Writer(source.fileno(), target.fileno(), header, coding.encoder, advance, coding.limits)
    for tensor, is_coded in zip(tensors, chosen, strict=True):
        writer.add(tensor, is_coded)
    return writer.finish()


def _is_worth_it(
    source: int, header: Header, tensor: RawTensor, encoder: PieceEncoder, limits: CodecLimits
) -> bool:
    """Whether a sample of the tensor's pieces, evenly spread, gets small enough."""
    size = tensor.end - tensor.begin
    if tensor.group is None or size < limits.min_bytes:
        return False
    count = -(-size // limits.piece_bytes)
    chosen = sorted({number * count // _SAMPLES for number in range(_SAMPLES)})
    data = bytearray()
    for number in chosen:
        begin = tensor.begin + number * limits.piece_bytes
        stop = min(begin + limits.piece_bytes, tensor.end)
        if stop - begin == limits.piece_bytes or len(chosen) == 1:
            data += _read(source, header.data_start + begin, stop - begin)
    pieces, _ = encoder.encode(memoryview(data), tensor.dtype, limits.piece_bytes)
    return sum(round_up(len(piece), UNIT_BYTES) for piece in pieces) <= limits.max_ratio * len(data)


@dataclass
class _Writer:
    """Places tensors one after another; the header is written last, in the room that was left for it."""

    source: int
    target: int
    raw: Header
    encoder: PieceEncoder
    advance: Advance
    limits: CodecLimits
    position: int = 0
    entries: list[TensorEntry] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)  # stored bytes, row
    starts: dict[str, int] = field(default_factory=dict)
    table: PieceTable = field(default_factory=lambda: PieceTable(array("I"), array("I"), array("I")))
    plain_bytes: int = 0

    def __post_init__(self) -> None:
        room = self.raw.data_start + _MOST_PAD_ENTRIES_BYTES * len(self.raw.tensors)
        self.data_start = round_up(room, PAGE_BYTES)

    def add(self, tensor: RawTensor, is_coded: bool) -> None:
        if tensor.group is not None and tensor.group not in self.starts:
            self._pad(PAGE_BYTES)
            self.starts[tensor.group] = self.position
        self._pad(TENSOR_ALIGN_BYTES)
        if not is_coded:
            self._copy(tensor)
            return
        row, begin = len(self.table), None
        for piece, crc in self._pieces(tensor):
            start = self._place_of(len(piece))
            if begin is None:
                self._fill(start)  # a tensor starts with its first piece
                begin = start
            self._write(piece, start)
            self.table.places.append(start // UNIT_BYTES)
            self.table.sizes.append(len(piece))
            self.table.sums.append(crc)
            self.position = start + len(piece)
        assert begin is not None, "a coded tensor has bytes"
        self.position = round_up(self.position, TENSOR_ALIGN_BYTES)
        self.entries.append(TensorEntry(tensor.name, "U8", (self.position - begin,), begin, self.position))
        self.places[tensor.name] = begin
        self.rows[tensor.name] = (self.position - begin, row)
        self.plain_bytes += tensor.end - tensor.begin

    def _place_of(self, size: int) -> int:
        """Where the next piece starts: on a unit, and not across the border of a digest block."""
        start = round_up(self.position, UNIT_BYTES)
        border = (start // self.limits.block_bytes + 1) * self.limits.block_bytes
        return start if start + size <= border else border

    def _pieces(self, tensor: RawTensor) -> Iterator[tuple[bytes, int]]:
        step = BATCH_PIECES * self.limits.piece_bytes
        for begin in range(tensor.begin, tensor.end, step):
            size = min(step, tensor.end - begin)
            data = _read(self.source, self.raw.data_start + begin, size)
            yield from zip(
                *self.encoder.encode(memoryview(data), tensor.dtype, self.limits.piece_bytes), strict=True
            )
            self.advance(size)

    def _copy(self, tensor: RawTensor) -> None:
        size, begin = tensor.end - tensor.begin, self.position
        for done in range(0, size, _COPY_BYTES):
            part = min(_COPY_BYTES, size - done)
            self._write(_read(self.source, self.raw.data_start + tensor.begin + done, part), begin + done)
            self.advance(part)
        self.position = begin + size
        self.entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, begin, begin + size))
        self.places[tensor.name] = begin

    def _pad(self, multiple: int) -> None:
        self._fill(round_up(self.position, multiple))

    def _fill(self, end: int) -> None:
        """Filler up to `end`; it is a hole of the file."""
        if end > self.position:
            name = f"{PAD_PREFIX}{sum(entry.name.startswith(PAD_PREFIX) for entry in self.entries)}"
            self.entries.append(TensorEntry(name, "U8", (end - self.position,), self.position, end))
            self.position = end

    def _write(self, data: bytes | bytearray, place: int) -> None:
        view, offset = memoryview(data), self.data_start + place
        while view:
            count = os.pwrite(self.target, view, offset)
            view, offset = view[count:], offset + count

    def finish(self) -> CodedFile:
        header = _widened(build_header(self.entries, self.raw.metadata), self.data_start)
        self._write(header, -self.data_start)
        os.ftruncate(self.target, self.data_start + self.position)
        digests, edges = ChunkDigests(header, self.limits.block_bytes), {}
        with digests:
            for begin in range(0, self.position, _COPY_BYTES):
                size = min(_COPY_BYTES, self.position - begin)
                digests.update(memoryview(_read(self.target, self.data_start + begin, size)))
        for name, (stored, _) in self.rows.items():
            edge, start = min(EDGE_BYTES, stored), self.data_start + self.places[name]
            ends = (_read(self.target, at, edge) for at in (start, start + stored - edge))
            edges[name] = tuple(edge_digest(data) for data in ends)
        sha256, chunks = digests.finish()
        stops = [*list(self.starts.values())[1:], self.position]
        return CodedFile(
            size=self.data_start + self.position,
            sha256=sha256,
            data_start=self.data_start,
            chunks=chunks,
            decoded_bytes=self.raw.file_bytes - self.raw.data_start,
            places=self.places,
            coded={name: (*self.rows[name], edges[name][0], edges[name][1]) for name in self.rows},
            groups={
                name: (start, stop) for (name, start), stop in zip(self.starts.items(), stops, strict=True)
            },
            plain_bytes=self.plain_bytes,
            table=self.table,
        )


def _widened(header: bytes, size: int) -> bytes:
    """The same header with more spaces at its end, `size` bytes in all."""
    text = header[8:].ljust(size - 8)
    assert len(text) == size - 8, "the room for the header is a bound"
    return len(text).to_bytes(8, "little") + text


def _read(descriptor: int, offset: int, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError(f"file ends at {offset}")
        view, offset = view[count:], offset + count
    return data
