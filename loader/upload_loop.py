"""The copies of one load in an uploader process.

Order is as in `loader.uploader`, but for slots of the first time, which come when a thread has pinned them: copies on one
stream → one event for the batch; slots go back, and chunks are reported, only when their event is seen complete.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque

from loader import reader as wire
from loader import upload_wire as talk
from loader.errors import InternalError, WorkerError
from loader.pinner import Pinner
from loader.upload_post import Post, Refused, Stop

TYPE_CHECKING = False  # the typing module costs as much as everything else here
if TYPE_CHECKING:
    import socket

    from loader.codec.unpacker import Unpacker
    from loader.driver import Driver
    from loader.ring import Ring
    from loader.slots import SlotStack

_POLL_MS = 1  # while copies are in flight
_BATCH = 8  # records per event: slots return soon
_REPORT_S = 0.25  # chunks of unfinished groups are reported this often


class Upload:
    """One load: device memory, ring and stream, then the copies. Everything but pinning happens on one thread."""

    def __init__(
        self,
        driver: Driver,
        context: int,
        ordinal: int,
        work: talk.UploadWork,
        fds: tuple[int, int],
        ring: Ring,
        slots: SlotStack,
        post: Post,
    ) -> None:
        self._driver = driver
        self._work = work
        self._full, self._free = fds
        self._post = post
        self._arenas: list[tuple[int, int]] = []
        self._stream: int | None = None
        self._ring: Ring | None = ring
        self._slots = slots
        self._spare_events: list[int] = []
        self._in_flight: deque[tuple[int, list[int], list[bytes]]] = deque()
        self._waiting: deque[bytes] = deque()  # for a place to unpack in
        self._unpacker: Unpacker | None = None
        self._loaded: list[bytes] = []
        self._is_due = False
        self._reported_s = time.monotonic()
        self._missing = list(work.missing)
        self._has_copied = False
        self._spent: set[int] = set()  # slots that are not filled again
        self._has_told_refusal = False
        self._marked: set[str] = set()
        self.pinned = ("", 0, 0)  # of a mark, once the ring was given back
        self.is_done = False
        try:
            self._pinner = Pinner(driver, context, ring)
        except WorkerError as error:
            raise Refused(error) from error
        try:
            self._open(ordinal)
        except WorkerError as error:
            self.close(is_failed=True)
            raise Refused(error) from error

    def _open(self, ordinal: int) -> None:
        from loader.driver import require_memory

        work, driver = self._work, self._driver
        start = time.monotonic_ns()
        beside = 0
        if work.unpack is not None:
            from loader.codec.unpacker import Unpacker

            self._unpacker = Unpacker(driver, work.unpack)
            beside = self._unpacker.sizes.device_bytes
        require_memory(driver, ordinal, sum(work.arenas), beside, work.reserve_bytes)
        fds: list[int] = []
        try:
            for size in work.arenas:
                pointer, mapped, fd = driver.shared_alloc(size, ordinal)
                self._arenas.append((pointer, mapped))
                fds.append(fd)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        sizes = b"".join(talk.TIME.pack(mapped) for _, mapped in self._arenas)
        self._post.mark("uploader: device arenas", start, sum(work.arenas))
        # Not before: the parent makes a context of its own then, and the driver takes turns.
        self._post.send(talk.CONTEXT)
        self._post.send(talk.ARENAS, sizes, fds)
        self._stream = driver.stream_create()
        if self._unpacker is not None:
            self._unpacker.open([pointer for pointer, _ in self._arenas], self._stream)

    @property
    def _is_idle(self) -> bool:
        is_unpacked = self._unpacker is None or self._unpacker.is_idle
        return is_unpacked and not (self._in_flight or self._waiting or self._pinner.pending)

    def run(self, sock: socket.socket) -> None:
        """Until every chunk is on the device. Raises: Stop; Refused: no copy was made and none can be; EOFError: no reader."""
        poll = select.poll()
        poll.register(self._full, select.POLLIN)
        poll.register(sock.fileno(), select.POLLIN)
        poll.register(self._pinner.fd, select.POLLIN)
        while not (self.is_done and self._is_idle):
            for fd, _ in poll.poll(self._patience_ms()):
                if fd == self._pinner.fd:
                    self._take_pinned()
                    continue
                if fd != self._full:
                    raise Stop
                data = os.read(self._full, wire.RECORD.size * 1024)
                if not data:
                    raise EOFError
                self._handle(data)
            self._collect()
            self._upload_waiting()
            self._give_slots()
            self._report()
        self._is_due = True
        self._report()
        if self._unpacker is not None:
            self._post.mark("uploader: unpacked", self._unpacker.first_ns, self._unpacker.unpacked_bytes)

    def _patience_ms(self) -> int | None:
        if not self._is_idle or not self._post.is_empty:
            return _POLL_MS
        return int(_REPORT_S * 1000) if self._loaded else None

    def _handle(self, data: bytes) -> None:
        assert self._ring is not None, "not closed yet"
        news: list[bytes] = []
        for place in range(0, len(data), wire.RECORD.size):
            record = data[place : place + wire.RECORD.size]
            kind = record[0]
            if kind == wire.FULL:
                slot = wire.RECORD.unpack(record)[2]
                if self._ring.is_pinned(slot):
                    self._waiting.append(record)
                else:
                    self._pinner.put(record, slot)
                self._slots.filled(1)
            else:
                news.append(record)
            self.is_done = self.is_done or kind == wire.DONE
            if kind == wire.GREW:
                self._slots.reader_grew(wire.RECORD.unpack(record)[4], self._work.slot_bytes)
        self._upload_waiting()
        for start in range(0, len(news), talk.RECORDS_PER_PACKET):
            self._post.send(talk.NEWS, b"".join(news[start : start + talk.RECORDS_PER_PACKET]))

    def _upload_waiting(self) -> None:
        """Batch by batch, until nothing waits or there is no place to unpack in."""
        while batch := self._next_batch():
            self._upload(batch)
            self._collect()
            self._give_slots()

    def _next_batch(self) -> list[bytes]:
        batch: list[bytes] = []
        unpacker, waiting = self._unpacker, self._waiting
        room = unpacker.room() if unpacker else 0
        while waiting and len(batch) < _BATCH:
            if unpacker and unpacker.is_coded(wire.RECORD.unpack(waiting[0])[1]):
                if not room:
                    break
                room -= 1
            batch.append(waiting.popleft())
        return batch

    def _upload(self, records: list[bytes]) -> None:
        assert self._ring is not None, "not closed yet"
        assert self._stream is not None, "open() has made a stream"
        driver, stream, arenas, unpacker = self._driver, self._stream, self._arenas, self._unpacker
        fields = [wire.RECORD.unpack(record)[1:3] for record in records]
        reusable = [slot for _, slot in fields if slot not in self._spent]
        copied: list[bytes] = []  # there as soon as they are copied
        for record, (chunk, slot) in zip(records, fields, strict=True):
            base = self._ring.address(slot)
            for offset, size, arena, place in self._work.chunks[chunk][0]:
                driver.copy_async(arenas[arena][0] + place, base + offset, size, stream)
            if unpacker and unpacker.is_coded(chunk):
                unpacker.stage(chunk, record, base)
            else:
                copied.append(record)
        if unpacker:
            unpacker.launch()
        self._has_copied = True
        event = self._spare_events.pop() if self._spare_events else driver.event_create()
        self._in_flight.append((event, reusable, copied))
        driver.event_record(event, stream)

    def _take_pinned(self) -> None:
        """Raises: Refused: nothing can be pinned."""
        ring = self._ring
        assert ring is not None, "not closed yet"
        try:
            taken = self._pinner.take()
        except WorkerError as error:
            if ring.pinned_bytes or self._has_copied:
                raise
            raise Refused(error) from error
        for record, slot, is_reusable in taken:
            self._waiting.append(record)
            if not is_reusable:
                self._spent.add(slot)
        if ring.pinned_bytes == ring.choice.bytes:
            self._mark_once("uploader: every slot pinned", ring.pinned_bytes)
        if ring.refusal and not self._has_told_refusal:
            self._has_told_refusal = True
            if not ring.pinned_bytes and not self._has_copied:
                raise Refused(InternalError(ring.refusal, where="uploader process"))
            asked, got, now = ring.choice.bytes, ring.pinned_bytes, time.monotonic_ns()
            self._post.mark(f"warning: pinned {got} of {asked} bytes: {ring.refusal}", now, got)

    def _collect(self) -> None:
        """Keep slots of copies that are complete, and records of what is in its place."""
        while self._in_flight and self._driver.event_query(self._in_flight[0][0]):
            event, reusable, records = self._in_flight.popleft()
            self._spare_events.append(event)
            self._slots.put(reusable)
            self._keep(records)
        if self._unpacker is not None:
            self._keep(self._unpacker.collect())

    def _give_slots(self) -> None:
        slots = [] if self.is_done else self._slots.take()
        if slots:
            self._mark_once("uploader: first slot back")
            try:
                os.write(self._free, b"".join(map(wire.SLOT.pack, slots)))
            except OSError:
                return  # the reader is gone: `full` tells

    def _mark_once(self, name: str, size: int = 0) -> None:
        """A moment, when it comes the first time."""
        if name not in self._marked:
            self._marked.add(name)
            self._post.mark(name, time.monotonic_ns(), size)

    def _keep(self, records: list[bytes]) -> None:
        self._loaded += records
        for record in records:
            for group in self._work.chunks[wire.RECORD.unpack(record)[1]][1]:
                self._missing[group] -= 1
                self._is_due = self._is_due or not self._missing[group]

    def _report(self) -> None:
        """Tell the parent what is on the device: whole groups at once, the rest now and then."""
        now = time.monotonic()
        if self._loaded and (self._is_due or now - self._reported_s > _REPORT_S):
            stamp = talk.TIME.pack(time.monotonic_ns())
            for start in range(0, len(self._loaded), talk.RECORDS_PER_PACKET):
                part = self._loaded[start : start + talk.RECORDS_PER_PACKET]
                self._post.send(talk.LOADED, stamp + b"".join(part))
            self._loaded, self._is_due, self._reported_s = [], False, now
        self._post.flush()

    def close(self, is_failed: bool = False) -> None:
        """The safe point, then everything is given back; the device memory lives on where it was imported.

        Args:
            is_failed: a context that is broken is not a new failure; the end of the process cleans up.
        """
        try:
            self._give_back()
        except WorkerError:
            if not is_failed:
                raise

    def _give_back(self) -> None:
        driver, start = self._driver, time.monotonic_ns()
        self._pinner.stop()
        if self._stream is not None:
            driver.stream_synchronize(self._stream)
            driver.stream_destroy(self._stream)
            self._stream = None
        if self._unpacker is not None:
            self._unpacker.close()
        for event in [*self._spare_events, *(item[0] for item in self._in_flight)]:
            driver.event_destroy(event)
        self._spare_events.clear()
        self._in_flight.clear()
        if self._ring is not None:
            pinned = self._ring.pinned_bytes
            self._ring.close()
            self._ring = None
            self.pinned = (
                f"uploader: unpinned the ring, pinned in {self._pinner.seconds:.3f} s",
                start,
                pinned,
            )
        for pointer, mapped in self._arenas:
            driver.shared_free(pointer, mapped)
        self._arenas.clear()
