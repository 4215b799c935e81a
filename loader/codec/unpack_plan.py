"""Which pieces each chunk brings and where they go, as the tables of pointers and sizes that a batched decoder reads.

A table is a row of 64-bit lanes. Lanes are kept as one large integer, so that adding a base address to all of them is one
addition (a few microseconds for a chunk of 100 pieces), whatever the chunk holds. Nothing here needs a device: a process
builds its tables while its context is made.
"""

from __future__ import annotations

from array import array
from operator import le, sub

from loader.codec.pieces import UNIT_BYTES, PieceTable, decode_table
from loader.errors import ArtifactError

TYPE_CHECKING = False  # the typing module costs the uploader process more than everything else here
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from loader.load_plan import LoadPlan

    Span = tuple[int, int, int]  # coded tensor, first piece, number of pieces
    CodedChunk = tuple[int, int, list[Span]]  # offset in the data section, bytes, spans

SLOTS = 24  # of the staging ring: three batches of eight
_LANE = 8
_LANES: dict[int, int] = {}
_COUNTS: dict[int, int] = {}


class CodedTensor:
    """A coded tensor's place: arena, offset in it, decoded bytes, row of its first piece, digests of its ends."""

    def __init__(
        self,
        name: str,
        dtype: str,
        path: str,
        arena: int,
        offset: int,
        size: int,
        row: int,
        head: str,
        tail: str,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.path = path
        self.arena = arena
        self.offset = offset
        self.size = size
        self.row = row
        self.head = head
        self.tail = tail


class UnpackPlan:
    """What unpacking one plan takes. (No dataclass: its import costs the uploader process 10 ms.)

    Args:
        library, version: what coded the pieces.
        slot_bytes: of a slot of the staging ring, as of the host ring.
        chunks: number of each coded chunk → its place and pieces.
        tensors: in the order that spans count.
    """

    def __init__(
        self,
        library: str,
        version: str,
        piece_bytes: int,
        slots: int,
        slot_bytes: int,
        chunks: Mapping[int, CodedChunk],
        tensors: list[CodedTensor],
        pieces: PieceTable,
    ) -> None:
        self.library = library
        self.version = version
        self.piece_bytes = piece_bytes
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.chunks = chunks
        self.tensors = tensors
        self.table_of_pieces = pieces
        self._tables: dict[int, ChunkTable] = {}

    def table(self, chunk: int) -> ChunkTable:
        """One coded chunk's table. Raises: ArtifactError: the piece table contradicts itself; names the piece."""
        table = self._tables.get(chunk)
        if table is None:
            table = self._tables[chunk] = _table(self, self.chunks[chunk])
        return table

    def prepare(self, is_due: Callable[[], bool]) -> None:
        """Do what needs no context: map the library on a thread, build tables in order until something `is_due`.

        Raises: ArtifactError: see `table`.
        """
        from threading import Thread

        from loader.codec.nvcomp import preload

        Thread(target=preload, name="codec", daemon=True).start()
        for chunk in self.chunks:
            if is_due():
                return
            self.table(chunk)

    def to_wire(self) -> tuple[list[Any], bytes]:
        """JSON-ready part and the table's bytes."""
        chunks = [(number, *chunk) for number, chunk in self.chunks.items()]
        tensors = [list(vars(tensor).values()) for tensor in self.tensors]
        sizes = (self.piece_bytes, self.slots, self.slot_bytes)
        return [self.library, self.version, *sizes, chunks, tensors], self.table_of_pieces.encode()

    def num_pieces(self, tensor: int) -> int:
        return -(-self.tensors[tensor].size // self.piece_bytes)


def unpack_plan_from_wire(value: list[Any], table: bytes) -> UnpackPlan:
    library, version, piece_bytes, slots, slot_bytes, chunks, tensors = value
    return UnpackPlan(
        library, version, piece_bytes, slots, slot_bytes,
        {number: (offset, size, spans) for number, offset, size, spans in chunks},
        [CodedTensor(*tensor) for tensor in tensors],
        decode_table(table),
    )  # fmt: skip


def unpack_plan_of(plan: LoadPlan, slot_bytes: int, slots: int | None = None) -> UnpackPlan | None:
    """None where nothing is coded."""
    if plan.codec is None:
        return None
    tensors = []
    for name in plan.coded:
        tensor = plan.tensors[name]
        assert tensor.coded is not None, "it is among the coded ones"
        tensors.append(
            CodedTensor(
                name, tensor.dtype, plan.files[tensor.file].path, tensor.arena, tensor.arena_offset, tensor.bytes,
                tensor.coded.row, tensor.head, tensor.tail,
            )
        )  # fmt: skip
    chunks = {
        number: (
            chunk.offset - plan.files[chunk.file].data_start,
            chunk.bytes,
            [(*span,) for span in chunk.coded],
        )
        for number, chunk in enumerate(plan.chunks)
        if chunk.coded
    }
    codec = plan.codec
    return UnpackPlan(
        codec.library,
        codec.version,
        codec.piece_bytes,
        slots or SLOTS,
        slot_bytes,
        chunks,
        tensors,
        codec.table,
    )


class ChunkTable:
    """One chunk's lanes. `sources` count from the chunk's first byte, `targets` from the arena's.

    `bytes` are stored ones, `decoded` what its pieces unpack to; `dtype` is that of all its tensors, "" if they differ.
    """

    __slots__ = (
        "arena",
        "bytes",
        "count",
        "decoded",
        "dtype",
        "rooms",
        "sizes",
        "sources",
        "spans",
        "sums",
        "targets",
    )

    def __init__(
        self,
        size: int,
        decoded: int,
        dtype: str,
        spans: list[Span],
        arena: int,
        lanes: tuple[int, int],
        columns: tuple[bytes, bytes, bytes],
    ) -> None:
        self.bytes = size
        self.decoded = decoded
        self.dtype = dtype
        self.spans = spans
        self.arena = arena
        self.sources, self.targets = lanes
        self.sizes, self.rooms, self.sums = columns
        self.count = len(self.sizes) // _LANE


def lanes_plus(lanes: int, count: int, base: int) -> bytes:
    """`base` added to each of `count` lanes. No lane may overflow 64 bits."""
    return (lanes + base * _ones(count)).to_bytes(count * _LANE, "little")


def _table(plan: UnpackPlan, chunk: CodedChunk) -> ChunkTable:
    """Built from whole slices: a loop over pieces would take longer than a context is in the making."""
    origin, size, spans = chunk
    places, sizes = array("Q"), array("Q")
    sums, rooms, targets, count, decoded = b"", b"", 0, 0, 0
    for number, first, pieces in spans:
        tensor = plan.tensors[number]
        rows = slice(tensor.row + first, tensor.row + first + pieces)
        places += array("Q", plan.table_of_pieces.places[rows])
        sizes += array("Q", plan.table_of_pieces.sizes[rows])
        sums += plan.table_of_pieces.sums[rows].tobytes()
        start = first * plan.piece_bytes
        last = min(plan.piece_bytes, tensor.size - start - (pieces - 1) * plan.piece_bytes)
        rooms += plan.piece_bytes.to_bytes(_LANE, "little") * (pieces - 1) + last.to_bytes(_LANE, "little")
        lanes = _counting(pieces) * plan.piece_bytes + (tensor.offset + start) * _ones(pieces)
        targets |= lanes << 8 * _LANE * count
        count += pieces
        decoded += (pieces - 1) * plan.piece_bytes + last
    _check(plan, chunk, places, sizes)
    dtypes = {plan.tensors[number].dtype for number, _, _ in spans}
    sources = int.from_bytes(places.tobytes(), "little") * UNIT_BYTES - origin * _ones(count)
    return ChunkTable(
        size,
        decoded,
        dtypes.pop() if len(dtypes) == 1 else "",
        [(span[0], span[1], span[2]) for span in spans],
        plan.tensors[spans[0][0]].arena,
        (sources, targets),
        (sizes.tobytes(), rooms, sums),
    )


def _check(plan: UnpackPlan, chunk: CodedChunk, places: array[int], sizes: array[int]) -> None:
    """Every piece has bytes, and ends before the next one and inside the chunk: a decoder reads what it is told."""
    origin, size, spans = chunk
    room = map(UNIT_BYTES.__mul__, map(sub, places[1:], places))
    last = origin + size - places[-1] * UNIT_BYTES
    if (
        places[0] * UNIT_BYTES >= origin
        and min(sizes) > 0
        and sizes[-1] <= last
        and all(map(le, sizes, room))
    ):
        return
    starts = [place * UNIT_BYTES for place in places]
    for index, (start, stored, end) in enumerate(
        zip(starts, sizes, [*starts[1:], origin + size], strict=True)
    ):
        if not origin <= start < start + stored <= end:
            tensor, piece = piece_at(plan, spans, index)
            raise ArtifactError(
                "piece table contradicts itself",
                where=f"{tensor.path}: {tensor.name}: piece {piece}",
                found=f"{stored} bytes at {start}",
                expected=f"inside {max(start, origin)}..{end}",
            )


def piece_at(plan: UnpackPlan, spans: list[Span], index: int) -> tuple[CodedTensor, int]:
    """(tensor, number of its piece) of a lane. `index` is inside the spans."""
    for number, first, count in spans:
        if index < count:
            return plan.tensors[number], first + index
        index -= count
    raise AssertionError("a lane outside its table")


def _ones(count: int) -> int:
    """1 in each of `count` lanes."""
    if count not in _LANES:
        _LANES[count] = int.from_bytes(b"\1\0\0\0\0\0\0\0" * count, "little")
    return _LANES[count]


def _counting(count: int) -> int:
    """0, 1, 2, … in `count` lanes."""
    if count not in _COUNTS:
        _COUNTS[count] = int.from_bytes(array("Q", range(count)).tobytes(), "little")
    return _COUNTS[count]
