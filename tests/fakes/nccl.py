"""NCCL with its C types, and streams, over host memory: ranks are threads, a stream is a thread of its own.

As on a device, calls return before anything has moved, memory is read and written some time later, and a message that is sent by
itself keeps its stream until it is received.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable
from ctypes import POINTER, c_int, c_size_t, c_ubyte, c_void_p
from dataclasses import dataclass
from typing import Any

WAIT_S = 60.0
FAILED = 2  # ncclSystemError


class Id(ctypes.Structure):
    """ncclUniqueId, written out again."""

    _fields_ = (("internal", c_ubyte * 128),)


class FakeStreams:
    """A `runtime.native_nccl.StreamDriver`."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._queues: dict[int, queue.Queue[Callable[[], None] | None]] = {}
        self._memory: dict[int, Any] = {}
        self.errors: list[BaseException] = []

    def stream_create(self) -> int:
        with self._lock:
            handle = len(self._queues) + 1
            self._queues[handle] = queue.Queue()
        rng = random.Random(self._seed * 100 + handle)
        threading.Thread(target=self._run, args=(self._queues[handle], rng), daemon=True).start()
        return handle

    def put(self, stream: int, work: Callable[[], None]) -> None:
        self._queues[stream].put(work)

    def event(self, stream: int) -> Callable[[], None]:
        """A call that waits for all that the stream holds now."""
        done = threading.Event()
        self.put(stream, done.set)

        def wait() -> None:
            assert done.wait(WAIT_S), "the stream is stuck"

        return wait

    def stream_synchronize(self, stream: int) -> None:
        self.event(stream)()

    def stream_destroy(self, stream: int) -> None:
        self._queues[stream].put(None)

    def alloc(self, size: int) -> int:
        memory = ctypes.create_string_buffer(size)
        address = ctypes.addressof(memory)
        self._memory[address] = memory
        return address

    def free(self, pointer: int) -> None:
        del self._memory[pointer]

    @property
    def allocations(self) -> int:
        return len(self._memory)

    def _run(self, work: queue.Queue[Callable[[], None] | None], rng: random.Random) -> None:
        while (item := work.get()) is not None:
            time.sleep(rng.choice((0.0, 0.0, 0.001, 0.003)))
            try:
                item()
            except BaseException as error:  # noqa: BLE001 - looked at by the tests
                self.errors.append(error)


class World:
    """What the ranks of one communicator share: letters from rank to rank, and who has them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.letters: dict[Any, bytes] = {}
        self.is_aborted = False

    def put(self, key: Any, data: bytes) -> None:
        with self.changed:
            assert key not in self.letters, f"{key} twice"
            self.letters[key] = data
            self.changed.notify_all()

    def take(self, key: Any) -> bytes:
        with self.changed:
            self._wait(lambda: key in self.letters, f"nobody sent {key}")
            data = self.letters.pop(key)
            self.changed.notify_all()
            return data

    def taken(self, key: Any) -> None:
        """Wait until somebody has taken it."""
        with self.changed:
            self._wait(lambda: key not in self.letters, f"nobody took {key}")

    def abort(self) -> None:
        with self.changed:
            self.is_aborted = True
            self.changed.notify_all()

    def _wait(self, is_done: Callable[[], bool], failure: str) -> None:
        is_in_time = self.changed.wait_for(lambda: is_done() or self.is_aborted, timeout=WAIT_S)
        assert not self.is_aborted, "called off"
        assert is_in_time, failure


@dataclass(frozen=True)
class _Message:
    """A half of one. All of a group begin before any is finished, and what is received before what is sent."""

    stream: int
    begin: Callable[[], None]
    finish: Callable[[], None]
    is_sent: bool


class FakeNccl:
    """libnccl for ranks of one process. `refuse`: function that fails; `missing`: one that is not there."""

    def __init__(
        self, streams: FakeStreams, refuse: str = "", missing: str = "", version: int = 22809
    ) -> None:
        self.streams = streams
        self.number = version
        self.destroyed: list[int] = []
        self.aborted: list[int] = []
        self._joining = threading.Condition()
        self._worlds: dict[bytes, World] = {}
        self._ranks: dict[int, tuple[World, int]] = {}
        self._counts: dict[Any, int] = {}
        self._groups = threading.local()
        self._text = ctypes.create_string_buffer(b"unhandled system error")
        functions: dict[str, tuple[Callable[..., Any], Any]] = {
            "ncclGetVersion": (self.version, (POINTER(c_int),)),
            "ncclGetUniqueId": (self.new_id, (POINTER(Id),)),
            "ncclCommInitRank": (self.join, (POINTER(c_void_p), c_int, Id, c_int)),
            "ncclCommDestroy": (self.destroy, (c_void_p,)),
            "ncclCommAbort": (self.abort, (c_void_p,)),
            "ncclAllGather": (self.gather, (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p)),
            "ncclBroadcast": (
                self.broadcast, (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
            ),
            "ncclSend": (self.send, (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)),
            "ncclRecv": (self.receive, (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)),
            "ncclGroupStart": (self.group_start, ()),
            "ncclGroupEnd": (self.group_end, ()),
        }  # fmt: skip
        for name, (function, arguments) in functions.items():
            if name != missing:
                call = (lambda *_: FAILED) if name == refuse else function
                setattr(self, name, ctypes.CFUNCTYPE(c_int, *arguments)(call))
        self.ncclGetErrorString = ctypes.CFUNCTYPE(c_void_p, c_int)(lambda code: ctypes.addressof(self._text))

    def version(self, out: Any) -> int:
        out[0] = self.number
        return 0

    def new_id(self, out: Any) -> int:
        with self._joining:
            out[0].internal[:] = [(7 * len(self._worlds) + place) % 256 for place in range(128)]
        return 0

    def join(self, out: Any, size: int, unique_id: Id, rank: int) -> int:
        with self._joining:
            world = self._worlds.setdefault(bytes(unique_id.internal), World(size))
            handle = 1000 + len(self._ranks)
            self._ranks[handle] = (world, rank)
            self._joining.notify_all()
            here = [other for other, _ in self._ranks.values()]
            assert self._joining.wait_for(
                lambda: [other for other, _ in self._ranks.values()].count(world) == size, WAIT_S
            ), f"{here.count(world)} of {size} ranks came"
        out[0] = handle
        return 0

    def destroy(self, handle: int) -> int:
        self.destroyed.append(handle)
        return 0

    def abort(self, handle: int) -> int:
        self.aborted.append(handle)
        self._ranks[handle][0].abort()
        return 0

    def gather(self, source: int, target: int, count: int, kind: int, handle: int, stream: int) -> int:
        assert kind == 1, "not bytes"
        world, rank = self._ranks[handle]
        number = self._count(("gather", handle))

        def work() -> None:
            for other in range(world.size):
                world.put(("gather", number, rank, other), ctypes.string_at(source, count))
            for other in range(world.size):
                data = world.take(("gather", number, other, rank))
                assert len(data) == count, "parts of different sizes"
                ctypes.memmove(target + other * count, data, count)

        self.streams.put(stream, work)
        return 0

    def broadcast(
        self, source: int, target: int, count: int, kind: int, root: int, handle: int, stream: int
    ) -> int:
        assert kind == 1, "not bytes"
        world, rank = self._ranks[handle]
        number = self._count(("broadcast", handle))

        def work() -> None:
            if rank == root:
                for other in range(world.size):
                    world.put(("broadcast", number, other), ctypes.string_at(source, count))
            data = world.take(("broadcast", number, rank))
            assert len(data) == count, "another size"
            ctypes.memmove(target, data, count)

        self.streams.put(stream, work)
        return 0

    def send(self, address: int, count: int, kind: int, peer: int, handle: int, stream: int) -> int:
        assert kind == 1, "not bytes"
        world, rank = self._ranks[handle]
        key = ("message", rank, peer, self._count(("send", handle, peer)))

        def begin() -> None:
            world.put(key, ctypes.string_at(address, count))

        self._queue(stream, begin, lambda: world.taken(key), is_sent=True)
        return 0

    def receive(self, address: int, count: int, kind: int, peer: int, handle: int, stream: int) -> int:
        assert kind == 1, "not bytes"
        world, rank = self._ranks[handle]
        key = ("message", peer, rank, self._count(("receive", handle, peer)))

        def finish() -> None:
            data = world.take(key)
            assert len(data) == count, "another size"
            ctypes.memmove(address, data, count)

        self._queue(stream, lambda: None, finish, is_sent=False)
        return 0

    def group_start(self) -> int:
        assert getattr(self._groups, "work", None) is None, "a group in a group"
        self._groups.work = []
        return 0

    def group_end(self) -> int:
        group, self._groups.work = self._groups.work, None

        def work() -> None:
            for message in group:
                message.begin()
            for message in sorted(group, key=lambda item: item.is_sent):
                message.finish()

        for stream in {message.stream for message in group}:
            self.streams.put(stream, work)
        return 0

    def _queue(
        self, stream: int, begin: Callable[[], None], finish: Callable[[], None], is_sent: bool
    ) -> None:
        group = getattr(self._groups, "work", None)
        if group is not None:
            group.append(_Message(stream, begin, finish, is_sent))
            return

        def work() -> None:
            begin()
            finish()

        self.streams.put(stream, work)

    def _count(self, key: Any) -> int:
        with self._joining:
            self._counts[key] = self._counts.get(key, 0) + 1
            return self._counts[key]
