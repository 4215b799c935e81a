"""The reader: many threads move file bytes into a ring or into host arenas, in plan order.

Runs as threads of an uploader process, as a bare child (`python -S -E -I reader.py …`), or as threads of the parent, which
imports this file for the wire format. It may import nothing but a short list of the standard library: start-up time is
most of its reason to exist.

Wire format, all little-endian. `free` (to the reader): 4-byte slot numbers, end of file = stop. `full` (from it):
64-byte records. `ctl` (to it): u32 length, u8 kind, payload. The plan lies in a memfd:
HEAD, files (FILE + path), chunks (CHUNK), reads (READ), edges (EDGE), block digests (32 bytes); its last ERROR_BYTES are
the reader's for the text of an unforeseen error.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
import threading
import time

try:
    from _queue import SimpleQueue as SimpleQueue  # `queue` itself imports three times as much
except ImportError:
    from queue import SimpleQueue as SimpleQueue

TYPE_CHECKING = False  # the typing module costs as much as everything else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RECORD = struct.Struct(
    "<IIIiQQQQQQ"
)  # kind, chunk, slot, errno, bytes, start ns, end ns, offset, extra, checked
SLOT = struct.Struct("<I")
MESSAGE = struct.Struct("<IB")
HEAD = struct.Struct("<8sIIIIIIIIQQIIIIId")
FILE = struct.Struct("<QQH")  # size, data start, path bytes
CHUNK = struct.Struct("<IIIIIi")  # file, first read, reads, first edge, edges, block or -1
READ = struct.Struct("<QQQ")  # file offset, bytes, destination (in the slot, or in the pool)
EDGE = struct.Struct("<IHQI32s")  # file, bytes, file offset, tensor index, SHA-256
BLOCK = struct.Struct("<QQ32s")  # file offset, bytes, SHA-256
ROWS = struct.Struct(
    "<IIQQQII"
)  # request, file, tensor offset, row bytes, place in the rows memory, rows, edges
MAGIC = b"cfread1\0"
SIZE = struct.Struct("<Q")  # payload of PLAN: bytes of the plan, then u32 CPU numbers to run on (none = all)
ERROR_BYTES = 16384
NO_SLOT = 0xFFFFFFFF

# record kinds
HELLO, FULL, RETRY, BAD_FILE, ERROR, DONE, STATS, GATHERED, CHANGED, HASHED, CRASH, GREW = range(12)
# meaning of `extra` in an ERROR record
WHY_ERRNO, WHY_SHORT, WHY_EDGE, WHY_BLOCK, WHY_SIZE, WHY_FAULT, WHY_OPEN = range(7)
# message kinds
PLAN, GATHER, RELEASE, STOP = range(4)
# modes: slots of a ring, straight into the pool, or hash only
RING, DIRECT, HASH = range(3)
# verification
EDGES, WHOLE, AUTO = range(3)

RETRY_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOMEM)
# What an open says of a directory that is not what the plan was made of; anything else is the machine's or the storage's.
NO_SUCH_FILE_ERRNOS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EACCES,
)
RETRY_DELAYS_S = (0.01, 0.1, 1.0)
FAULT_VARIABLE = "COLDFRAME_ALLOW_STORAGE_FAULT"
_HASH_BYTES_PER_S = (
    1.4e9  # one core with SHA extensions; measured, good for a decision within a factor of two
)
_GROW_AFTER_S, _GROW_BELOW = 0.5, 3e9
_MAX_READ = 16 << 20
_OTHER_FILES = 256  # descriptors that a process needs besides, a GPU's driver with it
# Of a chunk, for one thread: all threads fill few slots at a time, which the caches can hold.
PART_BYTES = 4 << 20
_PARTS_OF_A_CHUNK = 4  # as a rule


def bytes_of_a_thread(verify: int, part_bytes: int, slot_bytes: int) -> int:
    """What one thread works on: a part, or all of a slot while it hashes that."""
    return part_bytes if verify == EDGES else max(part_bytes, slot_bytes)


def load_sha256(whole: bool = False) -> Callable[..., Any]:
    """The interpreter's own SHA-256 (no start-up cost), or OpenSSL's where whole chunks are hashed (7x faster)."""
    if whole:
        import hashlib

        return hashlib.sha256
    for name in ("_sha2", "_sha256"):  # since 3.12, before
        try:
            function: Callable[..., Any] = __import__(name).sha256
            return function
        except ImportError:
            continue
    return load_sha256(whole=True)


if TYPE_CHECKING:
    Segment = tuple[int, int, int]  # read, first byte of it, bytes
    Part = tuple[int, int, bool, list[Segment]]  # chunk, slot, whether it is the chunk's first, what to read


class Stop(Exception):
    """The parent closed a pipe or asked to stop."""


class Failure(Exception):
    """A failure with a record to send."""

    def __init__(self, why: int, code: int, file: int, offset: int, count: int, extra: int = 0) -> None:
        super().__init__(why, code, file, offset)
        self.why, self.code, self.file, self.offset, self.count, self.extra = (
            why,
            code,
            file,
            offset,
            count,
            extra,
        )


class Throttle:
    """One token bucket for all threads. `rate`: bytes per second, 0 = off."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.piece = max(65536, int(rate * 0.002)) if rate else _MAX_READ
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self, count: int) -> None:
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(self._next, now - 0.004)  # lateness of a sleep may be caught up, idle time may not
            self._next = begin + count / self.rate
        delay = begin - now
        if delay > 0:
            time.sleep(delay)


class Faults:
    """Test hook: `kind@chunk[:argument[:errno name]]`, comma separated. Kinds: short, errno, stall, exit, kill, truncate.

    `short:<bytes>` has no chunk: no read returns more. `errno@3:2:EIO`: chunk 3 fails twice.
    """

    def __init__(self, text: str) -> None:
        self.short = 0
        self.rules: dict[int, list[list[str]]] = {}
        self._lock = threading.Lock()
        for item in filter(None, text.split(",")):
            kind, _, place = item.partition("@")
            if kind.startswith("short:"):
                self.short = int(kind[6:])
                continue
            chunk, *arguments = place.split(":")
            self.rules.setdefault(int(chunk), []).append([kind, *arguments])

    def before(self, chunk: int) -> bool:
        """Acts on a read of `chunk`; True means: pretend that the file ends here."""
        for rule in self.rules.get(chunk, ()):
            kind = rule[0]
            if kind == "truncate":
                return True
            if kind == "exit":
                os._exit(int(rule[1]))
            if kind == "kill":
                os.kill(os.getpid(), 9)
            if kind == "stall":
                time.sleep(float(rule[1]))
            if kind == "errno":
                with self._lock:
                    left = int(rule[1])
                    rule[1] = str(left - 1)
                if left > 0:
                    raise OSError(getattr(errno, rule[2]), "injected")
        return False


class Plan:
    """The decoded plan. Sequences are tuples of the wire structs."""

    def __init__(self, data: bytes) -> None:
        head = HEAD.unpack_from(data)
        if head[0] != MAGIC:
            raise ValueError("not a plan")
        (self.mode, files, chunks, reads, edges, self.threads, self.verify, fault_bytes) = head[1:9]
        (self.slot_bytes, self.pool_bytes, self.cpus, self.hold, blocks, self.most_threads) = head[9:15]
        self.part_bytes, self.rate = head[15:]
        at = HEAD.size
        self.fault = data[at : at + fault_bytes].decode()
        at += fault_bytes
        self.files = []
        for _ in range(files):
            size, start, length = FILE.unpack_from(data, at)
            at += FILE.size
            self.files.append((size, start, data[at : at + length]))
            at += length
        tables: list[list[tuple[Any, ...]]] = []
        for layout, count in ((CHUNK, chunks), (READ, reads), (EDGE, edges), (BLOCK, blocks)):
            end = at + layout.size * count
            tables.append(list(layout.iter_unpack(data[at:end])))
            at = end
        self.chunks, self.reads, self.edges, self.blocks = tables


class Reader:
    """One load.

    Args:
        free, full, ctl: descriptors, see the module's text.
        put_rows: stores gathered rows at an offset of the rows memory.
        note: keeps the text of an unforeseen error for the parent.
        raise_limit: lets this process open more files, if it is the reader's own.
    """

    def __init__(
        self,
        free: int,
        full: int,
        ctl: int,
        put_rows: Callable[[int, memoryview], None],
        note: Callable[[str], None],
        raise_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self.free, self.full, self.ctl = free, full, ctl
        self.put_rows, self.note, self.raise_limit = put_rows, note, raise_limit
        self.lock = threading.Lock()
        self.gate = threading.Condition(self.lock)
        self.left = 0
        self.limit = 0
        self.stopped = False
        self.failed = False
        self.fds: list[int] = []
        self.stats: list[tuple[int, int, int]] = []
        self.threads: list[threading.Thread] = []
        self.read_bytes = 0
        self.slot_wait_s = 0.0
        self.grown = False
        self.num_workers = 0
        self.parts: SimpleQueue[Part | None] = SimpleQueue()
        self.unread: dict[int, list[int]] = {}  # chunk under way -> parts left, start ns
        self.checked_tables: set[tuple[int, int]] = set()
        self.pool = memoryview(b"")
        # Called with (first, count) of the pool before `untouched` slots are filled: see `loader.host_memory.first_touch`.
        self.touch: Callable[[int, int], None] | None = None
        self.untouched: set[int] = set()

    # -- records -----------------------------------------------------------------------------------------------

    def send(
        self,
        kind: int,
        chunk: int = 0,
        slot: int = NO_SLOT,
        code: int = 0,
        count: int = 0,
        start: int = 0,
        end: int = 0,
        offset: int = 0,
        extra: int = 0,
        checked: int = 0,
    ) -> None:
        """Write one record; atomic because it is shorter than PIPE_BUF."""
        record = RECORD.pack(kind, chunk, slot, code, count, start, end, offset, extra, checked)
        try:
            os.write(self.full, record)
        except (BrokenPipeError, OSError):
            raise Stop from None

    def fail(self, failure: Failure) -> None:
        with self.lock:
            first = not self.failed
            self.failed = True
            self._halt()
        if first:
            self.send(
                ERROR, failure.file, code=failure.code, count=failure.count, offset=failure.offset, start=failure.extra,
                extra=failure.why,
            )  # fmt: skip

    # -- control -----------------------------------------------------------------------------------------------

    def receive(self) -> tuple[int, bytes]:
        """The next message. Raises: Stop at end of file."""
        length, kind = MESSAGE.unpack(self._exactly(MESSAGE.size))
        return kind, self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                part = os.read(self.ctl, count - len(data))
            except OSError:
                raise Stop from None
            if not part:
                raise Stop
            data += part
        return data

    def serve(self, plan: Plan, pool: memoryview, started: Callable[[], None] | None = None) -> None:
        """Run the load into `pool` (ring or arenas), then answer control messages until the parent goes away.

        Args:
            pool: a view that nobody else uses; released after the last chunk.
            started: called once the first reads are under way.
        """
        self.plan, self.pool = plan, pool
        try:
            self.begin()
            if started:
                started()
            while True:
                kind, payload = self.receive()
                if kind == STOP:
                    raise Stop
                if kind == RELEASE:
                    with self.lock:
                        self.limit = len(plan.chunks)
                        self.gate.notify_all()
                if kind == GATHER:
                    self._start(self.gather, payload)
        except Stop:
            pass
        finally:
            with self.lock:
                self._halt()

    def _halt(self) -> None:
        """Wakes everyone who waits for something. The lock is held."""
        self.stopped = True
        self.gate.notify_all()
        self.parts.put(None)

    def begin(self) -> None:
        """Check every file, then start the threads."""
        plan = self.plan
        if plan.fault and os.environ.get(FAULT_VARIABLE) != "1":
            self.fail(Failure(WHY_FAULT, errno.EPERM, 0, 0, 0))
            return
        self.faults = Faults(plan.fault)
        self.throttle = Throttle(plan.rate)
        self.sha256 = load_sha256(plan.verify != EDGES or plan.mode == HASH)
        if not self.open_files():
            return
        self.limit = plan.hold
        self.left = len(plan.chunks)
        self.start_s, self.start_cpu = time.monotonic(), sum(os.times()[:2])
        if not self.left:
            self.finish()
            return
        self._start(self.feed)
        self._hire(min(plan.threads, self.left * _PARTS_OF_A_CHUNK))

    def _hire(self, count: int) -> None:
        """Start threads that read, or as many as the system grants. Raises: RuntimeError: not even one."""
        self.num_workers += count
        for started in range(count):
            try:
                self._start(self.work)
            except RuntimeError:
                self.num_workers -= count - started
                if not self.num_workers:
                    raise
                return

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=self._guard, args=(target, *arguments), daemon=True)
        with self.lock:  # gathers come and go for as long as the parent wants rows
            self.threads = [t for t in self.threads if t.is_alive() or t.ident is None]
            self.threads.append(thread)
        thread.start()

    def _guard(self, target: Callable[..., None], *arguments: object) -> None:
        try:
            try:
                target(*arguments)
            except Failure as failure:
                self.fail(failure)
            except Exception as error:  # noqa: BLE001 - border of the reader: everything is reported to the parent
                self.crash(error)
        except Stop:
            return

    def crash(self, error: Exception) -> None:
        if isinstance(error, Stop):
            raise error
        self.note(f"{type(error).__name__}: {error}")
        self.send(CRASH)

    # -- files -------------------------------------------------------------------------------------------------

    def open_files(self) -> bool:
        """Raises: Failure: one that is no fault of the directory."""
        bad = False
        if len(self.plan.files) + _OTHER_FILES > _most_files():
            self.raise_limit()
        for index, (size, _, _) in enumerate(self.plan.files):
            try:
                fd, stat = self.open_file(index)
            except OSError as error:
                self.fds.append(-1)
                self.send(BAD_FILE, index, code=error.errno or 0)
                bad = True
                continue
            self.fds.append(fd)
            self.stats.append((stat.st_size, stat.st_ino, stat.st_mtime_ns))
            if stat.st_size != size:
                self.send(BAD_FILE, index, count=stat.st_size)
                bad = True
        if bad:
            self.fail(Failure(WHY_SIZE, 0, 0, 0, 0))
        return not bad

    def open_file(self, file: int) -> tuple[int, os.stat_result]:
        """A few errors are tried again. Raises: OSError: there is no such file; Failure: any other."""
        attempts = 0
        while True:
            try:
                return _open(self.plan.files[file][2])
            except OSError as error:
                code = error.errno or errno.EIO
                if code in NO_SUCH_FILE_ERRNOS:
                    raise
                if code not in RETRY_ERRNOS or attempts == len(RETRY_DELAYS_S):
                    raise Failure(WHY_OPEN, code, file, 0, _most_files(), attempts + 1) from error
            self.send(RETRY, file, code=code, extra=attempts + 1)
            self.pause(RETRY_DELAYS_S[attempts])
            attempts += 1

    def close_files(self) -> None:
        """For readers inside the parent; a child's files end with it."""
        for fd in self.fds:
            if fd >= 0:
                os.close(fd)
        self.fds = []
        self.drop_pool()

    def drop_pool(self) -> None:
        """Let go of the memory, which frames of this load's threads may still name; its owner frees it."""
        pool, self.pool = self.pool, memoryview(b"")
        pool.release()

    def recheck_files(self) -> None:
        """Size, inode and time once more; another size is an error, the rest a warning."""
        for index, fd in enumerate(self.fds):
            stat = os.fstat(fd)
            now = (stat.st_size, stat.st_ino, stat.st_mtime_ns)
            if now[0] != self.stats[index][0]:
                raise Failure(WHY_SIZE, 0, index, 0, now[0], 1)
            if now != self.stats[index]:
                self.send(CHANGED, index)

    def read_range(self, file: int, offset: int, target: memoryview, chunk: int) -> None:
        """Fill `target` from `offset`. Short reads go on, a few errors are tried again, an early end is final."""
        done, attempts = 0, 0
        while done < len(target):
            size = min(len(target) - done, self.throttle.piece, self.faults.short or _MAX_READ)
            if self.stopped:
                raise Stop
            self.throttle.wait(size)
            try:
                ended = chunk >= 0 and self.faults.before(chunk)
                count = 0 if ended else os.preadv(self.fds[file], [target[done : done + size]], offset + done)
            except OSError as error:
                code = error.errno or errno.EIO
                if code not in RETRY_ERRNOS or attempts == len(RETRY_DELAYS_S):
                    raise Failure(
                        WHY_ERRNO, code, file, offset + done, len(target) - done, attempts + 1
                    ) from error
                self.send(
                    RETRY, file, code=code, count=len(target) - done, offset=offset + done, extra=attempts + 1
                )
                self.pause(RETRY_DELAYS_S[attempts])
                attempts += 1
                if code == errno.ESTALE:
                    self.reopen(file)
                continue
            if count == 0:
                end = min(offset + done, os.fstat(self.fds[file]).st_size)  # it may be far before this part
                raise Failure(WHY_SHORT, 0, file, end, offset + len(target) - end)
            done += count

    def pause(self, seconds: float) -> None:
        with self.gate:
            self.gate.wait_for(lambda: self.stopped, seconds)

    def reopen(self, file: int) -> None:
        """A fresh handle under the same number, so that other threads profit as well."""
        try:
            fd = os.open(self.plan.files[file][2], os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # the next attempt reports it
        os.dup2(fd, self.fds[file], inheritable=False)
        os.close(fd)

    # -- work --------------------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Hand out chunks in plan order, each as soon as it is released and has a slot. Ends all threads after the last."""
        ring = self.plan.mode == RING
        for chunk in range(len(self.plan.chunks)):
            if chunk >= self.limit or self.stopped:
                self.wait_for_release(chunk)
            slot = self.take_slot() if ring else NO_SLOT
            cuts = self.cut(chunk)
            self.unread[chunk] = [len(cuts), 0]
            for number, segments in enumerate(cuts):
                self.parts.put((chunk, slot, number == 0, segments))
        self.parts.put(None)

    def cut(self, chunk: int) -> list[list[Segment]]:
        """A chunk's reads in parts for one thread each; whole where it is only hashed."""
        most = 1 << 62 if self.plan.mode == HASH else self.plan.part_bytes
        cuts: list[list[Segment]] = [[]]
        room = most
        for index in self.read_indexes(chunk):
            first, end = 0, self.plan.reads[index][1]
            while first < end:
                if not room:
                    cuts.append([])
                    room = most
                count = min(end - first, room)
                cuts[-1].append((index, first, count))
                first, room = first + count, room - count
        return cuts

    def work(self) -> None:
        """Read parts of chunks; the thread that reads the last one of a chunk verifies and sends it."""
        while True:
            begin = time.monotonic()
            part = self.parts.get()
            self.slot_wait_s += time.monotonic() - begin
            if part is None:
                self.parts.put(None)  # for the others
                return
            chunk, slot, is_first, segments = part
            state = self.unread[chunk]
            if is_first:
                state[1] = time.monotonic_ns()
            if self.plan.mode != HASH:
                self.fill(chunk, slot, segments)
            with self.lock:
                state[0] -= 1
                is_last = not state[0]
            if is_last:
                del self.unread[chunk]
                self.complete(chunk, slot, state[1])

    def complete(self, chunk: int, slot: int, start: int) -> None:
        is_hashed = self.plan.mode == HASH
        checked = self.hash_block(chunk) if is_hashed else self.verify(chunk, slot)
        self.untouched.discard(slot)
        size = sum(self.plan.reads[i][1] for i in self.read_indexes(chunk))
        kind = HASHED if is_hashed else FULL
        self.send(kind, chunk, slot, 0, size, start, time.monotonic_ns(), checked=checked)
        self.after(size)

    def take_slot(self) -> int:
        try:
            data = os.read(self.free, SLOT.size)
        except OSError:
            raise Stop from None
        if len(data) != SLOT.size:
            raise Stop
        return int(SLOT.unpack(data)[0])

    def wait_for_release(self, chunk: int) -> None:
        with self.gate:
            self.gate.wait_for(lambda: self.stopped or chunk < self.limit)
            if self.stopped:
                raise Stop

    def read_indexes(self, chunk: int) -> range:
        first = self.plan.chunks[chunk][1]
        return range(first, first + self.plan.chunks[chunk][2])

    def target(self, index: int, slot: int, first: int = 0, count: int = -1) -> memoryview:
        """Where `count` bytes of a read go, from its `first` on; by default all of them."""
        _, size, place = self.plan.reads[index]
        begin = place + first if slot == NO_SLOT else slot * self.plan.slot_bytes + place + first
        return self.pool[begin : begin + (size if count < 0 else count)]

    def fill(self, chunk: int, slot: int, segments: list[Segment]) -> None:
        """Read one part of a chunk."""
        file = self.plan.chunks[chunk][0]
        for index, first, count in segments:
            # First, because this view keeps the memory mapped while it is touched.
            target = self.target(index, slot, first, count)
            if self.touch and slot in self.untouched:
                self.touch(slot * self.plan.slot_bytes + self.plan.reads[index][2] + first, count)
            self.read_range(file, self.plan.reads[index][0] + first, target, chunk)

    def verify(self, chunk: int, slot: int) -> int:
        """Returns what was checked of a chunk that is there (EDGES or WHOLE)."""
        self.check_edges(chunk, slot)
        if self.plan.chunks[chunk][5] >= 0 and self.wants_whole():
            self.check_block(chunk, slot)
            return WHOLE
        return EDGES

    def wants_whole(self) -> bool:
        if self.plan.verify != AUTO:
            return bool(self.plan.verify == WHOLE)
        elapsed = time.monotonic() - self.start_s
        return elapsed > 0.05 and self.read_bytes / elapsed < _HASH_BYTES_PER_S * self.plan.cpus / 2

    def check_edges(self, chunk: int, slot: int) -> None:
        """Digests of the first and last KiB of tensors that begin an edge in this chunk."""
        _, _, _, first, count, _ = self.plan.chunks[chunk]
        for file, size, offset, tensor, digest in self.plan.edges[first : first + count]:
            window = self.find(chunk, slot, offset, size)
            if window is None:  # crosses a border: read again on its own
                window = memoryview(bytearray(size))
                self.read_range(file, offset, window, -1)
            if self.sha256(window).digest() != digest:
                raise Failure(WHY_EDGE, 0, file, offset, size, tensor)

    def find(self, chunk: int, slot: int, offset: int, size: int) -> memoryview | None:
        for index in self.read_indexes(chunk):
            start, count, _ = self.plan.reads[index]
            if start <= offset and offset + size <= start + count:
                return self.target(index, slot, offset - start, size)
        return None

    def check_block(self, chunk: int, slot: int) -> None:
        """Hash the whole digest block; parts of it that this chunk does not hold are read once more."""
        file, _, _, _, _, block = self.plan.chunks[chunk]
        begin, size, digest = self.plan.blocks[block]
        state = self.sha256()
        position = begin
        for index in self.read_indexes(chunk):
            start, count, _ = self.plan.reads[index]
            self.hash_range(state, file, position, start)
            state.update(self.target(index, slot))
            position = start + count
        self.hash_range(state, file, position, begin + size)
        if state.digest() != digest:
            raise Failure(WHY_BLOCK, 0, file, begin, size, block)

    def hash_range(self, state: Any, file: int, start: int, end: int) -> None:
        buffer = memoryview(bytearray(min(1 << 20, max(end - start, 0))))
        while start < end:
            part = buffer[: min(len(buffer), end - start)]
            self.read_range(file, start, part, -1)
            state.update(part)
            start += len(part)

    def hash_block(self, chunk: int) -> int:
        """HASH mode: one block of a file, nothing is kept."""
        file, first, _, _, _, block = self.plan.chunks[chunk]
        start, count, _ = self.plan.reads[first]
        state = self.sha256()
        self.hash_range(state, file, start, start + count)
        if state.digest() != self.plan.blocks[block][2]:
            raise Failure(WHY_BLOCK, 0, file, start, count, block)
        return WHOLE

    def after(self, size: int) -> None:
        with self.lock:
            self.left -= 1
            self.read_bytes += size
            last = self.left == 0
        if last:
            self.finish()
        elif not self.grown and time.monotonic() - self.start_s > _GROW_AFTER_S:
            self.grow()

    def grow(self) -> None:
        """More threads where storage, not the CPU and not the parent, is what everyone waits for."""
        with self.lock:
            if self.grown:
                return
            self.grown = True
        plan, elapsed = self.plan, time.monotonic() - self.start_s
        cpu = sum(os.times()[:2]) - self.start_cpu
        slow = self.read_bytes / elapsed < _GROW_BELOW
        idle = cpu < 0.5 * elapsed * plan.cpus and self.slot_wait_s < 0.5 * elapsed * plan.threads
        if slow and idle:
            more = min(plan.most_threads, self.left * _PARTS_OF_A_CHUNK) - self.num_workers
            if more > 0:
                self._hire(more)
                filling = bytes_of_a_thread(plan.verify, plan.part_bytes, plan.slot_bytes)
                self.send(GREW, count=self.num_workers * filling, extra=self.num_workers)

    def finish(self) -> None:
        self.recheck_files()
        self.drop_pool()
        self.send(STATS, extra=self.num_workers, count=self.read_bytes, offset=int(self.slot_wait_s * 1e9))
        self.send(DONE)

    # -- rows --------------------------------------------------------------------------------------------------

    def gather(self, payload: bytes) -> None:
        """Read single rows of a table, in the order asked, into the rows memory."""
        start = time.monotonic_ns()
        request, file, base, row_bytes, place, rows, edges = ROWS.unpack_from(payload)
        at = ROWS.size + EDGE.size * edges
        if (file, base) not in self.checked_tables:
            for index, size, offset, tensor, digest in EDGE.iter_unpack(payload[ROWS.size : at]):
                window = memoryview(bytearray(size))
                self.read_range(index, offset, window, -1)
                if self.sha256(window).digest() != digest:
                    raise Failure(WHY_EDGE, 0, index, offset, size, tensor)
            self.checked_tables.add((file, base))
        data = memoryview(bytearray(rows * row_bytes))
        for position, row in enumerate(memoryview(payload)[at:].cast("Q")):
            self.read_range(
                file, base + row * row_bytes, data[position * row_bytes : (position + 1) * row_bytes], -1
            )
        self.put_rows(place, data)
        self.send(GATHERED, request, count=len(data), start=start, end=time.monotonic_ns())


def _open(path: bytes) -> tuple[int, os.stat_result]:
    """A descriptor, and what it is of."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return fd, os.fstat(fd)
    except OSError:
        os.close(fd)
        raise


def _most_files() -> int:
    """How many descriptors this process may have."""
    return os.sysconf("SC_OPEN_MAX")


def _raise_most_files() -> None:
    """As far as a process may by itself."""
    import resource  # a library that most starts do without; it cannot be opened at the limit

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _die_with_parent(parent: int) -> None:
    """SIGKILL when the spawning thread of the parent ends; checked once in case it already has.

    The end of `free` and `ctl` says the same to a reader that is not stuck in a read. ctypes takes 10 ms to import.
    """
    import ctypes

    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _run_in_background(nice: int) -> None:
    """Lowest CPU priority and the idle I/O class."""
    import ctypes

    os.nice(nice)
    number = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)
    if number:
        ctypes.CDLL(None).syscall(number, 1, 0, 3 << 13)  # ioprio_set(process, self, idle)


def main(arguments: list[str]) -> None:
    """Entry of the child. Arguments: descriptors pool, plan, rows, free, full, ctl; parent pid or 0; niceness."""
    pool_fd, plan_fd, rows_fd, free, full, ctl, parent, nice = map(int, arguments)
    import _signal  # type: ignore[import-not-found]  # the public module spends 8 ms on its enums

    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if nice:
        _run_in_background(nice)

    reader = reader_of(free, full, ctl, rows_fd, plan_fd)
    reader._guard(_run_child, reader, pool_fd, plan_fd, parent)
    os._exit(0)


def reader_of(free: int, full: int, ctl: int, rows_fd: int, plan_fd: int) -> Reader:
    """A reader for a parent in another process, with all that they share as descriptors."""

    def put_rows(offset: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(rows_fd, data, offset)
            offset, data = offset + count, data[count:]

    def note(text: str) -> None:
        size = os.fstat(plan_fd).st_size
        os.pwrite(plan_fd, text.encode("utf-8", "replace")[: ERROR_BYTES - 1] + b"\0", size - ERROR_BYTES)

    return Reader(free, full, ctl, put_rows, note, _raise_most_files)


def receive_plan(reader: Reader, plan_fd: int) -> Plan:
    """Say hello and wait for the plan; from here on this thread and those that it starts run on the plan's CPUs."""
    reader.send(HELLO, extra=os.getpid(), end=time.monotonic_ns())
    kind, payload = reader.receive()
    if kind != PLAN:
        raise Stop
    (size,) = SIZE.unpack_from(payload)
    cpus = memoryview(payload)[SIZE.size :].cast("I").tolist()
    if cpus:
        os.sched_setaffinity(0, cpus)
    with mmap.mmap(plan_fd, size) as plan_map:
        return Plan(plan_map[:])


def _run_child(reader: Reader, pool_fd: int, plan_fd: int, parent: int) -> None:
    plan = receive_plan(reader, plan_fd)
    pool = memoryview(mmap.mmap(pool_fd, plan.pool_bytes) if plan.pool_bytes else b"")
    os.close(pool_fd)  # the pages belong to the mappings from here on
    reader.serve(plan, pool, (lambda: _die_with_parent(parent)) if parent else None)


if __name__ == "__main__":
    main(sys.argv[1:])
