"""The parent's end of a reader: pipes, shared memory, and the child process or the threads behind them.

`spawn_reader` needs no plan, so a start can spawn first and parse the manifest while the child boots. Order at the end:
`stop` (the reader is gone, `read_records` meets the end), join whoever reads records, `close`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from loader import reader as wire
from loader.child_process import FIRST_FD, STUCK, Child, parent_argument, spawn
from loader.errors import InternalError
from loader.host_memory import private_memory

if TYPE_CHECKING:
    from loader.uploader_link import UploaderProcess

_F_ADD_SEALS = 1033
_SEAL_SHRINK_AND_GROW = 0x2 | 0x4
_REAP_S = 5.0
_MAX_CPUS_NAMED = 4096


class ReaderLink(Protocol):
    """What stream and uploader need of a reader. Everything but `read_records` may be called from any thread."""

    kind: str  # "child" | "threads" | "shared" | "uploader"
    can_share: bool  # whether an uploader process can copy from its ring: then it has `shared_fds`
    recycles: bool  # whether slots that are given back are filled again at once

    @property
    def records_fd(self) -> int: ...

    def begin(self, plan: bytes, pool_bytes: int, cpus: Sequence[int] = ()) -> None:
        """Size the pool and start reading, on `cpus` if any are named."""
        ...

    def map_pool(self, offset: int, length: int) -> mmap.mmap | memoryview:
        """A part of the pool, after `begin`; keeps its memory alive."""
        ...

    def drop_pool(self) -> None:
        """No more mappings will be made; the pool's memory goes with those that exist. May be called again."""
        ...

    def read_records(self) -> bytes:
        """Whole records; blocks while there are none; empty when the reader is gone."""
        ...

    def give_slots(self, slots: Iterable[int]) -> None: ...

    def send(self, kind: int, payload: bytes = b"") -> None: ...

    def take_rows(self, place: int, count: int) -> bytes: ...

    def shared_fds(self) -> tuple[int, ...]:
        """For an uploader process; only if `can_share`. Still owned here.

        (ring, records to read, slots to write), without the ring where that is the uploader's own.
        """
        ...

    def crash_text(self) -> str: ...

    def stop(self, grace_s: float = 0.0, drain: bool = False) -> str:
        """End the reader and wait for it; returns how it ended. May be called again.

        Args:
            grace_s: how long it may take to end by itself first (it closed its pipe already).
            drain: the caller is the one that reads records.
        """
        ...

    def close(self) -> None:
        """Release descriptors; memory that was mapped lives as long as its mappings. May be called again."""
        ...


AnyLink = TypeVar("AnyLink", bound=ReaderLink)


def end_links(*links: ReaderLink | UploaderProcess | None) -> None:
    """Stop and close what there is of them. May be called again."""
    for link in links:
        if link is not None:
            link.stop()
            link.close()


def begun(link: AnyLink, begin: Callable[[AnyLink], None]) -> AnyLink:
    """A reader that has begun, or that has ended if it could not. Raises: what `begin` raises."""
    try:
        begin(link)
    except BaseException:
        end_links(link)
        raise
    return link


class _Pipes:
    """`free`, `full`, `ctl`, each (read end, write end), close-on-exec."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._lock = threading.Lock()
        try:
            self.free, self.full, self.ctl = self._make(), self._make(), self._make()
        except OSError:
            self.close(*self._open)
            raise

    def _make(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def close(self, *fds: int) -> None:
        with self._lock:
            mine = [fd for fd in fds if fd in self._open]
            self._open.difference_update(mine)
        for fd in mine:
            os.close(fd)

    def close_all(self) -> None:
        self.close(*self.free, *self.full, *self.ctl)

    def read_records(self) -> bytes:
        return os.read(self.full[0], wire.RECORD.size * 1024)  # all that a pipe holds

    def write(self, fd: int, data: bytes) -> None:
        """Write all, unless the pipe is closed on either side: a reader that is gone shows in `full`."""
        view = memoryview(data)
        with self._lock:
            while view and fd in self._open:
                try:
                    view = view[os.write(fd, view) :]
                except BrokenPipeError:
                    return

    def give_slots(self, slots: Iterable[int]) -> None:
        self.write(self.free[1], b"".join(map(wire.SLOT.pack, slots)))

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.write(self.ctl[1], wire.MESSAGE.pack(len(payload), kind) + payload)


class _Piped:
    """What every reader behind pipes does with them alone."""

    def __init__(self, pipes: _Pipes) -> None:
        self._pipes = pipes
        self.read_records, self.give_slots, self.send = pipes.read_records, pipes.give_slots, pipes.send

    @property
    def records_fd(self) -> int:
        return self._pipes.full[0]


def _write_plan(memory: int, plan: bytes) -> int:
    """Into a memfd, with room for last words; bytes of the plan."""
    os.ftruncate(memory, len(plan) + wire.ERROR_BYTES)
    os.pwrite(memory, plan, 0)
    return len(plan)


def _plan_message(plan: bytes, cpus: Sequence[int]) -> bytes:
    named = list(cpus)[:_MAX_CPUS_NAMED]
    return wire.SIZE.pack(len(plan)) + struct.pack(f"<{len(named)}I", *named)


def _crash_text(memory: int, plan_bytes: int) -> str:
    text = os.pread(memory, wire.ERROR_BYTES, plan_bytes)
    return text.partition(b"\0")[0].decode("utf-8", "replace")


class ChildReader(_Piped):
    """A reader in a process of its own. Created by `spawn_reader`."""

    kind = "child"
    can_share = True
    recycles = True

    def __init__(self, child: Child, pipes: _Pipes, fds: tuple[int, int, int]) -> None:
        super().__init__(pipes)
        self.pid = child.pid
        self._child = child
        self._pool, self._plan, self._rows = fds
        self._lock = threading.Lock()
        self._is_closed = False
        self._plan_bytes = 0

    def begin(self, plan: bytes, pool_bytes: int, cpus: Sequence[int] = ()) -> None:
        os.ftruncate(self._pool, pool_bytes)
        fcntl.fcntl(self._pool, _F_ADD_SEALS, _SEAL_SHRINK_AND_GROW)
        self._plan_bytes = _write_plan(self._plan, plan)
        self.send(wire.PLAN, _plan_message(plan, cpus))

    def map_pool(self, offset: int, length: int) -> mmap.mmap | memoryview:
        return mmap.mmap(self._pool, length, offset=offset)

    def drop_pool(self) -> None:
        with self._lock:
            if self._pool >= 0:
                os.close(self._pool)
            self._pool = -1

    def take_rows(self, place: int, count: int) -> bytes:
        return os.pread(self._rows, count, place)

    def crash_text(self) -> str:
        return _crash_text(self._plan, self._plan_bytes)

    def stop(self, grace_s: float = 0.0, drain: bool = False) -> str:
        """Kill and reap: the child holds nothing that needs an orderly end."""
        return self._child.stop(grace_s)

    def shared_fds(self) -> tuple[int, ...]:
        """(pool, read end of `full`, write end of `free`) for an uploader in another process; still owned here."""
        return self._pool, self._pipes.full[0], self._pipes.free[1]

    def hub_fds(self) -> tuple[int, int, int, int, int, int]:
        """(`full` to read, `free` and `ctl` to write, pool, rows, plan) for a hub; still owned here."""
        pipes = self._pipes
        return pipes.full[0], pipes.free[1], pipes.ctl[1], self._pool, self._rows, self._plan

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.drop_pool()
        self._pipes.close_all()
        os.close(self._plan)
        os.close(self._rows)


def spawn_reader(nice: int = 0) -> ChildReader:
    """Start a bare interpreter that waits for a plan.

    Call it from the main thread where possible: only then the kernel kills the child with its parent; the end of the
    `free` and `ctl` pipes tells it in every case.
    Raises: OSError: no shared memory or no child process here.
    """
    pipes = _Pipes()
    memory: list[int] = []
    try:
        memory += [
            os.memfd_create(f"coldframe-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            for name in ("pool", "plan", "rows")
        ]
        fds = [*memory, pipes.free[0], pipes.full[1], pipes.ctl[0]]
        numbers = [str(FIRST_FD + index) for index in range(len(fds))]
        child = spawn([_script()], [*numbers, parent_argument(), str(nice)], fds)
    except (OSError, AttributeError) as error:
        pipes.close_all()
        for fd in memory:
            os.close(fd)
        raise OSError(f"no reader process: {error}") from error
    pipes.close(pipes.free[0], pipes.full[1], pipes.ctl[0])
    return ChildReader(child, pipes, (memory[0], memory[1], memory[2]))


def _script() -> str:
    """The reader's bytecode where it is known to be fresh: compiling the source costs more than the interpreter's start."""
    source, cached = Path(wire.__file__), Path(importlib.util.cache_from_source(wire.__file__))
    try:
        stat = source.stat()
        with cached.open("rb") as file:
            head = file.read(16)
    except OSError:
        return str(source)
    fresh = head[4:8] == b"\0\0\0\0" and head[8:] == struct.pack(
        "<II", int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF
    )
    unchecked = head[4:8] == b"\1\0\0\0"
    return str(cached) if fresh or unchecked else str(source)


class EmbeddedReader(_Piped):
    """A reader that is to run as threads of an uploader process, whose private memory the ring is.

    Raises: OSError: no shared memory here, for the plan and for rows.
    """

    kind = "uploader"
    can_share = True
    recycles = True

    def __init__(self, process: UploaderProcess) -> None:
        super().__init__(_Pipes())
        self._process = process
        self._memory: list[int] = []
        self._lock = threading.Lock()
        self._plan_bytes = 0
        try:
            self._memory += [
                os.memfd_create(f"coldframe-{name}", os.MFD_CLOEXEC) for name in ("plan", "rows")
            ]
        except (OSError, AttributeError) as error:
            self.close()
            raise OSError(f"no memory to share: {error}") from error

    def begin(self, plan: bytes, pool_bytes: int, cpus: Sequence[int] = ()) -> None:
        self._plan_bytes = _write_plan(self._memory[0], plan)
        self.send(wire.PLAN, _plan_message(plan, cpus))
        pipes = self._pipes
        theirs = pipes.free[0], pipes.full[1], pipes.ctl[0]
        self._process.begin_reader([*self._memory, *theirs])
        pipes.close(*theirs)

    def map_pool(self, offset: int, length: int) -> mmap.mmap | memoryview:
        raise InternalError("this reader's ring is another process's", where="loader.reader_link")

    def drop_pool(self) -> None:
        return  # it never was here

    def take_rows(self, place: int, count: int) -> bytes:
        return os.pread(self._memory[1], count, place)

    def shared_fds(self) -> tuple[int, ...]:
        return self._pipes.full[0], self._pipes.free[1]

    def crash_text(self) -> str:
        return _crash_text(self._memory[0], self._plan_bytes)

    def stop(self, grace_s: float = 0.0, drain: bool = False) -> str:
        """Process and all; that has its own patience."""
        pipes = self._pipes
        pipes.close(pipes.free[0], pipes.free[1], pipes.full[1], pipes.ctl[0], pipes.ctl[1])
        return self._process.stop()

    def close(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, []
        self._pipes.close_all()
        for fd in memory:
            os.close(fd)


class ThreadReader(_Piped):
    """The same reader as threads of this process, for places that refuse a child or shared memory.

    Args:
        pool: memory to read into (pinned by the driver); None = private anonymous memory made by `begin`.
    """

    kind = "threads"
    can_share = False
    recycles = True

    def __init__(self, pool: memoryview | None = None) -> None:
        super().__init__(_Pipes())
        self._pool = pool
        self._rows: dict[int, bytes] = {}
        self._crash = ""
        self._lock = threading.Lock()
        self._ending: str | None = None
        self._main: threading.Thread | None = None
        self._reader = wire.Reader(
            self._pipes.free[0], self._pipes.full[1], self._pipes.ctl[0], self._put_rows, self._note
        )

    def _put_rows(self, place: int, data: memoryview) -> None:
        self._rows[place] = bytes(data)

    def _note(self, text: str) -> None:
        self._crash = text

    def begin(self, plan: bytes, pool_bytes: int, cpus: Sequence[int] = ()) -> None:
        if self._pool is None:
            self._pool = memoryview(private_memory(pool_bytes) if pool_bytes else b"")
        arguments = (self._reader.serve, wire.Plan(plan), memoryview(self._pool))
        self._main = threading.Thread(
            target=self._reader._guard, args=arguments, name="coldframe-reader", daemon=True
        )
        self._main.start()

    def map_pool(self, offset: int, length: int) -> mmap.mmap | memoryview:
        assert self._pool is not None, "begin() comes first"
        return self._pool[offset : offset + length]

    def drop_pool(self) -> None:
        self._pool = None

    def take_rows(self, place: int, count: int) -> bytes:
        return self._rows.pop(place)

    def shared_fds(self) -> tuple[int, ...]:
        raise InternalError("this reader's ring is private", where="loader.reader_link", expected="can_share")

    def crash_text(self) -> str:
        return self._crash

    def stop(self, grace_s: float = 0.0, drain: bool = False) -> str:
        with self._lock:
            if self._ending is not None:
                return self._ending
            self._pipes.close(self._pipes.free[1], self._pipes.ctl[1])
            end = time.monotonic() + _REAP_S
            while (alive := self._alive()) and time.monotonic() < end:
                if drain and select.select([self._pipes.full[0]], [], [], 0.001)[0]:
                    self._pipes.read_records()
                alive[0].join(0.001)
            self._ending = STUCK if alive else "stopped"
            self._pipes.close(self._pipes.full[1])
            if not alive:
                self._reader.close_files()
            return self._ending

    def _alive(self) -> list[threading.Thread]:
        return [thread for thread in (self._main, *self._reader.threads) if thread and thread.is_alive()]

    def close(self) -> None:
        if self._ending == "stopped":
            self._pipes.close_all()
