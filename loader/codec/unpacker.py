"""Coded chunks on their way into the arenas: host slot → staging slot → unpacked, on a stream beside the copies.

Order, which is all that keeps bytes right: chunks of a batch are copied into staging slots and their tables after them,
on the copy stream → an event there → the unpacking stream waits for it → one batched decoding, checksums of what came
out, sizes, statuses, sums and the ends of finished tensors back to the host → an event. Only when that event is seen
complete and everything was compared are the chunks reported and their staging slots used again.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque

from loader import reader as wire
from loader.codec.pieces import UNIT_BYTES
from loader.codec.unpack_plan import ChunkTable, UnpackPlan, lanes_plus, piece_at
from loader.driver import Driver, PinningRefused
from loader.errors import ArtifactError, CapabilityError, InternalError

TYPE_CHECKING = False  # the typing module costs the uploader process more than everything else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    class PieceCodec(Protocol):
        """What unpacks; `loader.codec.nvcomp.Nvcomp` says what the calls mean."""

        version: str

        def status_text(self, code: int) -> str: ...

        def scratch_bytes(self, count: int, piece_bytes: int) -> int: ...

        def prepare_checksum(self, count: int, piece_bytes: int) -> None: ...

        def unpack(
            self, sources: int, sizes: int, rooms: int, actual: int, count: int, scratch: int, scratch_bytes: int,
            targets: int, statuses: int, stream: int, dtype: str = "",
        ) -> None: ...  # fmt: skip

        def checksum(self, targets: int, rooms: int, count: int, sums: int, stream: int) -> None: ...


EDGE_BYTES = 1024
BATCH_CHUNKS = 8
_IN_BYTES, _OUT_BYTES = 32, 16  # per piece: four lanes in; actual bytes, status and sum out


def require_codec(codec: PieceCodec, plan: UnpackPlan) -> None:
    """Raises: CapabilityError: the library is older than the one that coded the weights."""
    found, needed = (tuple(map(int, text.split("."))) for text in (codec.version, plan.version))
    if found[:1] != needed[:1] or found < needed:
        raise CapabilityError(
            f"{plan.library} is too old for these weights or of another major release",
            where="codec",
            found=codec.version,
            expected=f"{plan.version} or a later {needed[0]}.x",
            hint="install the release that prepared them, or prepare again with --codec none",
        )


class _Batch:
    """Chunks that are unpacked by one call, and the memory of its tables and results (reused)."""

    def __init__(self, tables: int, results: int, host_tables: int, host_results: int) -> None:
        self.tables, self.results = tables, results  # device
        self.host_tables, self.host_results = host_tables, host_results
        self.copied = self.done = 0  # events
        self.members: list[tuple[Any, int, int]] = []  # tag, chunk, staging slot
        self.ends: list[int] = []  # tensors whose ends come back with this batch


class Sizes:
    """Memory that unpacking takes beside the arenas; `device_bytes` counts against the device's."""

    def __init__(self, plan: UnpackPlan, codec: PieceCodec) -> None:
        chunks, spans = min(plan.slots, BATCH_CHUNKS), [chunk[2] for chunk in plan.chunks.values()]
        self.pieces = chunks * max((sum(span[2] for span in mine) for mine in spans), default=0)
        self.ends = chunks * max(map(len, spans), default=0)
        self.scratch = codec.scratch_bytes(self.pieces, plan.piece_bytes)
        self.tables = _round(self.pieces * _IN_BYTES)
        self.results = _round(self.pieces * _OUT_BYTES)
        self.host_results = self.results + self.ends * 2 * EDGE_BYTES
        self.staging = plan.slots * plan.slot_bytes
        self.device_bytes = self.staging + plan.slots * (self.tables + self.results) + _round(self.scratch)
        self.host_bytes = plan.slots * (self.tables + self.host_results)


def _round(size: int) -> int:
    return -(-size // 256) * 256


class Unpacker:
    """One load's unpacking, used by one thread. Owns staging ring, tables, stream and events; nothing before `open`.

    Raises: CapabilityError: the library is missing or does not fit.
    """

    def __init__(self, driver: Driver, plan: UnpackPlan) -> None:
        self._driver, self._plan = driver, plan
        self._codec = driver.open_codec()
        require_codec(self._codec, plan)
        self.sizes = Sizes(plan, self._codec)
        self._arenas: Sequence[int] = ()
        self._copy_stream = 0
        self._missing = [plan.num_pieces(number) for number in range(len(plan.tensors))]
        self._memory = self._host = self._stream = 0
        self._pageable: object = None
        self._open_batch: _Batch | None = None
        self._in_flight: deque[_Batch] = deque()
        self._batches: list[_Batch] = []
        self._spare: list[_Batch] = []
        self._free: list[int] = []
        self._sha256 = wire.load_sha256()
        self.unpacked_bytes = 0
        self.first_ns = 0  # when the first batch was launched

    def open(self, arenas: Sequence[int], copy_stream: int) -> None:
        """Allocate everything.

        Args:
            arenas: device addresses, as the plan numbers them.
            copy_stream: the stream of the copies into the staging slots.
        Raises: CapabilityError: device memory is short. `close` is due in every case.
        """
        self._arenas, self._copy_stream = arenas, copy_stream
        driver, sizes, slots = self._driver, self.sizes, self._plan.slots
        self._memory = driver.alloc(sizes.device_bytes)
        host = self._host_memory(sizes.host_bytes)
        self._stream = driver.stream_create()
        self._codec.prepare_checksum(sizes.pieces, self._plan.piece_bytes)
        tables = self._memory + sizes.staging
        results = tables + slots * sizes.tables
        self._scratch = results + slots * sizes.results if sizes.scratch else 0
        for number in range(slots):
            batch = _Batch(
                tables + number * sizes.tables,
                results + number * sizes.results,
                host + number * sizes.tables,
                host + slots * sizes.tables + number * sizes.host_results,
            )
            self._batches.append(batch)
            batch.copied, batch.done = driver.event_create(), driver.event_create()
        self._spare = list(self._batches)
        self._free = list(range(slots))

    def _host_memory(self, size: int) -> int:
        """Pinned, or pageable where the driver has none: slower, the same rules."""
        try:
            self._host = self._driver.host_alloc(size)
            return self._host
        except PinningRefused:
            memory = ctypes.create_string_buffer(size)
            self._pageable = memory
            return ctypes.addressof(memory)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and self._open_batch is None

    def is_coded(self, chunk: int) -> bool:
        return chunk in self._plan.chunks

    def room(self) -> int:
        """Chunks that may be staged now."""
        open_members = len(self._open_batch.members) if self._open_batch else 0
        return min(len(self._free), BATCH_CHUNKS - open_members)

    def stage(self, chunk: int, tag: Any, source: int) -> None:
        """Enqueue the copy of a chunk into a staging slot; there is `room`. `source` stays as it is until an event
        that is recorded on the copy stream after this is complete. `tag` comes back from `collect`."""
        batch = self._open_batch or self._spare.pop()
        self._open_batch = batch
        slot = self._free.pop()
        batch.members.append((tag, chunk, slot))
        self._driver.copy_async(self._staging(slot), source, self._plan.chunks[chunk][1], self._copy_stream)

    def _staging(self, slot: int) -> int:
        return self._memory + slot * self._plan.slot_bytes

    def launch(self) -> None:
        """Enqueue the unpacking of what was staged since the last call; nothing if nothing was."""
        batch, driver = self._open_batch, self._driver
        if batch is None:
            return
        self._open_batch = None
        self.first_ns = self.first_ns or time.monotonic_ns()
        tables = [self._plan.table(chunk) for _, chunk, _ in batch.members]
        count = sum(table.count for table in tables)
        columns = b"".join(
            [
                lanes_plus(t.sources, t.count, self._staging(m[2]))
                for t, m in zip(tables, batch.members, strict=True)
            ]
            + [table.sizes for table in tables]
            + [table.rooms for table in tables]
            + [lanes_plus(table.targets, table.count, self._arenas[table.arena]) for table in tables]
        )
        ctypes.memmove(batch.host_tables, columns, len(columns))
        driver.copy_async(batch.tables, batch.host_tables, len(columns), self._copy_stream)
        driver.event_record(batch.copied, self._copy_stream)
        self._in_flight.append(batch)
        self._enqueue(batch, count, tables)
        driver.event_record(batch.done, self._stream)

    def _enqueue(self, batch: _Batch, count: int, tables: Sequence[ChunkTable]) -> None:
        driver, codec, stream = self._driver, self._codec, self._stream
        sources, sizes, rooms, targets = (batch.tables + number * count * 8 for number in range(4))
        actual, statuses, sums = (batch.results + number * count for number in (0, 8, 12))
        driver.stream_wait_event(stream, batch.copied)
        dtypes = {table.dtype for table in tables}
        codec.unpack(
            sources, sizes, rooms, actual, count, self._scratch, self.sizes.scratch, targets, statuses, stream,
            dtypes.pop() if len(dtypes) == 1 else "",
        )  # fmt: skip
        codec.checksum(targets, rooms, count, sums, stream)
        driver.copy_back_async(batch.host_results, batch.results, count * _OUT_BYTES, stream)
        place = batch.host_results + self.sizes.results
        for number in self._finished(tables):
            tensor = self._plan.tensors[number]
            address, size = self._arenas[tensor.arena] + tensor.offset, min(EDGE_BYTES, tensor.size)
            driver.copy_back_async(place, address, size, stream)
            driver.copy_back_async(place + EDGE_BYTES, address + tensor.size - size, size, stream)
            place += 2 * EDGE_BYTES
            batch.ends.append(number)

    def _finished(self, tables: Sequence[ChunkTable]) -> list[int]:
        """Tensors whose last pieces are among these."""
        finished = []
        for table in tables:
            for number, _, count in table.spans:
                self._missing[number] -= count
                if not self._missing[number]:
                    finished.append(number)
        return finished

    def collect(self) -> list[Any]:
        """Tags of chunks that are unpacked and right, in order of their staging; their slots are free again.

        Raises: ArtifactError: names tensor, piece and file of what did not unpack to what was prepared.
        """
        tags: list[Any] = []
        while self._in_flight and self._driver.event_query(self._in_flight[0].done):
            batch = self._in_flight[0]
            self._check(batch)
            self._in_flight.popleft()
            tags += [tag for tag, _, _ in batch.members]
            self._free += [slot for _, _, slot in batch.members]
            batch.members, batch.ends = [], []
            self._spare.append(batch)
        return tags

    def _check(self, batch: _Batch) -> None:
        tables = [self._plan.table(chunk) for _, chunk, _ in batch.members]
        count = sum(table.count for table in tables)
        found = ctypes.string_at(batch.host_results, count * _OUT_BYTES)
        rooms, sums = (b"".join(column) for column in zip(*((t.rooms, t.sums) for t in tables), strict=True))
        if found != b"".join((rooms, bytes(4 * count), sums)):
            self._name_bad_piece(tables, found, count)
        place = batch.host_results + self.sizes.results
        for number in batch.ends:
            tensor, size = self._plan.tensors[number], min(EDGE_BYTES, self._plan.tensors[number].size)
            for kind, offset, digest in (("first", 0, tensor.head), ("last", EDGE_BYTES, tensor.tail)):
                if self._sha256(ctypes.string_at(place + offset, size)).hexdigest() != digest:
                    raise ArtifactError(
                        f"{kind} {size} bytes as unpacked differ from the manifest",
                        where=f"{tensor.path}: {tensor.name}",
                        hint="the file is damaged or belongs to another manifest",
                    )
            place += 2 * EDGE_BYTES
        self.unpacked_bytes += sum(table.decoded for table in tables)

    def _name_bad_piece(self, tables: Sequence[ChunkTable], found: bytes, count: int) -> None:
        index = 0
        for table in tables:
            for lane in range(table.count):
                actual = int.from_bytes(found[index * 8 : index * 8 + 8], "little")
                status, crc = (
                    int.from_bytes(found[at + index * 4 : at + index * 4 + 4], "little")
                    for at in (count * 8, count * 12)
                )
                room = int.from_bytes(table.rooms[lane * 8 : lane * 8 + 8], "little")
                wanted = int.from_bytes(table.sums[lane * 4 : lane * 4 + 4], "little")
                if status or actual != room or crc != wanted:
                    raise self._bad_piece(table, lane, status, (actual, room), (crc, wanted))
                index += 1
        raise InternalError("results of unpacking make no sense", where="loader.codec.unpacker")

    def _bad_piece(
        self, table: ChunkTable, lane: int, status: int, sizes: tuple[int, int], sums: tuple[int, int]
    ) -> ArtifactError:
        tensor, piece = piece_at(self._plan, table.spans, lane)
        place = self._plan.table_of_pieces.places[tensor.row + piece] * UNIT_BYTES
        text = f"status {status} ({self._codec.status_text(status)})" if status else f"{sizes[0]} bytes"
        if not status and sizes[0] == sizes[1]:
            text = f"CRC-32 {sums[0]:08x}"
        return ArtifactError(
            "a piece does not unpack to what was prepared",
            where=f"{tensor.path}: {tensor.name}: piece {piece} at byte {place} of the data section",
            found=text,
            expected=f"{sizes[1]} bytes with CRC-32 {sums[1]:08x}",
            hint="the file is damaged: copy the prepared directory again",
        )

    def close(self) -> None:
        """Wait for the stream, then give everything back. May be called again. Raises: InternalError: a sticky error."""
        driver = self._driver
        if self._stream:
            driver.stream_synchronize(self._stream)
            driver.stream_destroy(self._stream)
            self._stream = 0
        for batch in self._batches:
            for event in (batch.copied, batch.done):
                if event:
                    driver.event_destroy(event)
        self._batches.clear()
        self._in_flight.clear()
        self._open_batch = None
        if self._memory:
            driver.free(self._memory)
            self._memory = 0
        if self._host:
            driver.host_free(self._host)
            self._host = 0
        self._pageable = None
