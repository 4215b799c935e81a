"""The uploader as a process of its own: an import in the parent cannot hold it up, nor it the import.

It makes a context while the parent still plans, reads files with threads of its own into a private ring (or finds them in
a ring that it shares with another process), allocates device memory that the parent imports, and copies full slots into
it. Afterwards the context goes, and the reader stays for as long as the parent wants rows.

Order is as in `loader.uploader`, but for slots of the first time, which come when a thread has pinned them: copies on one
stream → one event for the batch; slots go back, and chunks are reported, only when their event is seen complete. Standard
library and `cuda.bindings` only. The end of the socket means: stop at the safe point and go.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import threading
import time
from collections import deque
from importlib import import_module

from loader import reader as wire
from loader import upload_wire as talk
from loader.errors import CapabilityError, InternalError, WorkerError
from loader.pinner import Pinner

TYPE_CHECKING = False  # the typing module costs as much as everything else here
if TYPE_CHECKING:
    import socket

    from loader.codec.unpacker import Unpacker
    from loader.driver import Driver
    from loader.prefault import Prefault
    from loader.ring import Ring
    from loader.slots import SlotStack

_POLL_MS = 1  # while copies are in flight
_BATCH = 8  # records per event: copies run while the next slots are pinned, and slots return soon
_REPORT_S = 0.25  # chunks of unfinished groups are reported this often


class Stop(Exception):
    """The parent hung up."""


class Refused(Exception):
    """This machine does not do it, but nothing was copied yet: another path may. Carries the WorkerError."""

    def __init__(self, error: WorkerError) -> None:
        super().__init__(str(error))
        self.error = error


class Post:
    """Packets to the parent; never blocks: what does not fit now waits for the next `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def send(self, kind: int, payload: bytes = b"", fds: list[int] | None = None) -> None:
        """`fds` are closed after they were sent."""
        self._waiting.append((bytes([kind]) + payload, fds or []))
        self.flush()

    def mark(self, name: str, start_ns: int, size: int = 0) -> None:
        self.send(talk.MARK, talk.encode_mark(name, start_ns, time.monotonic_ns(), size))

    def flush(self) -> None:
        """Raises: Stop: the parent is gone."""
        import array
        import socket

        while self._waiting:
            data, fds = self._waiting[0]
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._socket.sendmsg([data], extra, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                raise Stop from None
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)

    def wait_empty(self) -> None:
        while self._waiting:
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLOUT)
            poll.poll()
            self.flush()


class Opening:
    """The context, made by a thread from the first moment on. `fd` becomes readable when it is there or has failed."""

    def __init__(self, factory: str, ordinal: int) -> None:
        self._factory = factory
        self._ordinal = ordinal
        self.fd, self._done = os.pipe()
        self.start_ns = time.monotonic_ns()
        self.end_ns = 0
        self.driver: Driver | None = None
        self.context = 0
        self._failure: WorkerError | None = None
        threading.Thread(target=self._run, name="context", daemon=True).start()

    def _run(self) -> None:
        try:
            self.driver = _make_driver(self._factory)
            self.context = self.driver.retain_context(self._ordinal)
        except WorkerError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - border of a thread: reported to the parent
            self._failure = InternalError(f"no CUDA context: {error!r}", where="loader.upload_process")
        self.end_ns = time.monotonic_ns()
        os.close(self._done)

    def take(self) -> Driver:
        """After `fd` became readable; the context is current in the calling thread then. Raises: Refused."""
        os.close(self.fd)
        if self._failure is not None or self.driver is None:
            raise Refused(self._failure or InternalError("no driver", where="loader.upload_process"))
        self.driver.use_context(self.context)
        return self.driver


def _make_driver(factory: str) -> Driver:
    """`CudaDriver`, or in tests what `module:function` returns."""
    if not factory:
        from loader.driver import CudaDriver

        return CudaDriver()
    if os.environ.get(wire.FAULT_VARIABLE) != "1":
        raise CapabilityError(
            "fault injection is not allowed here",
            where="uploader_driver",
            hint=f"set {wire.FAULT_VARIABLE}=1 in tests",
        )
    module, _, function = factory.partition(":")
    driver: Driver = getattr(import_module(module), function)()
    return driver


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
        self._post.send(talk.ARENAS, sizes, fds)
        self._post.mark("uploader: device arenas", start, sum(work.arenas))
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
            try:
                os.write(self._free, b"".join(map(wire.SLOT.pack, slots)))
            except OSError:
                return  # the reader is gone: `full` tells

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


class OwnReader:
    """The reader as threads of this process, its ring in private memory. At work once this returns.

    Args:
        fds: of plan, rows, `free`, `full` and `ctl`.
    Raises: Refused: no memory for the ring.
    """

    def __init__(self, fds: list[int]) -> None:
        from loader.host_memory import first_touch, private_memory

        plan_fd, rows_fd, free, full, ctl = fds
        self._reader = wire.reader_of(free, full, ctl, rows_fd, plan_fd)
        plan = wire.receive_plan(self._reader, plan_fd)
        try:
            self.memory: mmap.mmap | None = private_memory(plan.pool_bytes)
        except OSError as error:
            text = f"no ring of {plan.pool_bytes} bytes: {error}"
            raise Refused(InternalError(text, where="uploader process")) from error
        self._reader.untouched = set(range(plan.pool_bytes // plan.slot_bytes))
        self._thread = threading.Thread(
            target=self._reader._guard, args=(self._reader.serve, plan, memoryview(self.memory)), daemon=True
        )
        self._thread.start()
        self._reader.touch = first_touch(self.memory)  # the first reads need not wait for it

    def wait(self) -> None:
        """Until the parent wants nothing more of it."""
        self._thread.join()


def _receive(sock: socket.socket) -> tuple[int, list[int]]:
    """(kind, descriptors) of the next packet. Raises: Stop."""
    import socket

    data, fds, _, _ = socket.recv_fds(sock, talk.PACKET_BYTES, talk.MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise Stop
    return data[0], fds


def _read_work(fd: int) -> talk.UploadWork:
    work = talk.decode_work(os.pread(fd, os.fstat(fd).st_size, 0))
    os.close(fd)
    return work


def _wait_for(opening: Opening, sock: socket.socket) -> Driver:
    poll = select.poll()
    poll.register(opening.fd, select.POLLIN)
    poll.register(sock.fileno(), select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if opening.fd not in ready:
        os._exit(0)  # told to stop while the driver starts, which nothing can interrupt
    return opening.take()


def _serve(sock: socket.socket, post: Post, opening: Opening, ordinal: int) -> None:
    from contextlib import suppress

    from loader.budget import RingChoice
    from loader.ring import Ring
    from loader.slots import SlotStack

    kind, fds = _receive(sock)
    reader = None
    if kind == talk.READER:
        reader = OwnReader(fds)
        kind, fds = _receive(sock)
    work_fd, *ring_fd, full, free = fds
    work = _read_work(work_fd)
    memory = _shared_memory(ring_fd[0], work) if reader is None else reader.memory
    assert memory is not None, "nobody has taken it yet"
    if work.unpack is not None:
        work.unpack.prepare(lambda: opening.end_ns > 0)
    driver = _wait_for(opening, sock)
    post.send(talk.MARK, talk.encode_mark("uploader: cuda context", opening.start_ns, opening.end_ns))
    post.send(talk.CONTEXT)
    prefault = _start_prefault(memory, work) if reader is None else None
    ring = Ring(driver, memory, RingChoice(work.slots, work.slot_bytes, ""), "register", work.may_shrink)
    del memory  # it goes with the ring
    upload = Upload(
        driver, opening.context, ordinal, work, (full, free), ring, SlotStack(work.slots, work.keep), post
    )
    try:
        upload.run(sock)
    except BaseException:
        upload.close(is_failed=True)
        raise
    if reader is not None:
        reader.memory = None
    upload.close()
    name, start_ns, pinned = upload.pinned
    if prefault is not None:
        prefault.stop()
        name += f", mapped {prefault.mapped_bytes} bytes ahead in {prefault.seconds:.3f} s"
    post.mark(name, start_ns, pinned)
    post.send(talk.DONE)
    post.wait_empty()
    sock.recv(1)  # the end: what was not imported must not go before
    with suppress(WorkerError):  # a context that stays goes with the process; rows may be wanted before
        driver.release_context(ordinal)
    if reader is not None:
        reader.wait()


def _shared_memory(fd: int, work: talk.UploadWork) -> mmap.mmap:
    memory = mmap.mmap(fd, work.slots * work.slot_bytes)
    os.close(fd)
    return memory


def _start_prefault(memory: mmap.mmap, work: talk.UploadWork) -> Prefault:
    """Not before the context is there: both want this process's memory map, and a context takes twice as long then."""
    from loader.prefault import Prefault

    return Prefault(memory, work.slot_bytes)


def main(arguments: list[str]) -> None:
    """Entry. Arguments: descriptor of the socket, parent's pid or 0, device ordinal, driver factory of tests or ""."""
    import _signal  # type: ignore[import-not-found]  # the public module spends 8 ms on its enums

    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    fd, parent, ordinal = map(int, arguments[:3])
    opening = Opening(arguments[3], ordinal)
    if parent:
        wire._die_with_parent(parent)
    import socket

    sock = socket.socket(fileno=fd)
    post = Post(sock)
    try:
        _serve(sock, post, opening, ordinal)
    except (Stop, wire.Stop):
        return
    except EOFError:
        _last_words(post, talk.GONE)
    except Refused as refused:
        _last_words(post, talk.REFUSED, refused.error)
    except WorkerError as error:
        _last_words(post, talk.FAILED, error)
    except Exception as error:  # noqa: BLE001 - border of the process: reported to the parent
        _last_words(
            post, talk.FAILED, InternalError(f"uploader failed: {error!r}", where="loader.upload_process")
        )


def _last_words(post: Post, kind: int, error: WorkerError | None = None) -> None:
    try:
        post.send(kind, talk.encode_error(error) if error else b"")
        post.wait_empty()
    except Stop:
        sys.exit(1)
