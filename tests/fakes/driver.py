"""A CUDA driver over host memory that is as late as it may be.

Copies from pinned memory read their source at *completion*, after a random delay on the stream's own thread, so a slot
that is reused too early gives wrong bytes. Copies from pageable memory are staged at the call, as CUDA does. Rules of use
are checked: in every calling thread the context of what is used, one for each device, no wait on or query of an event that was never recorded, no unregister
while a copy from it is queued, everything released at the end.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import queue
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from loader.driver import PinningRefused
from loader.errors import CapabilityError, InternalError
from tests.fakes.codec import FakeCodec

if TYPE_CHECKING:
    from loader.arena import DeviceArena

CONTEXT = 77  # of the first device, the next numbers are those of the others
SHARED_UNIT = 1 << 16


class _Event:
    def __init__(self) -> None:
        self.is_recorded = False
        self.done = threading.Event()


class _Stream:
    """Operations in order on a thread of their own."""

    def __init__(self, name: str) -> None:
        self.queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (operation := self.queue.get()) is not None:
            operation()

    def synchronize(self) -> None:
        reached = threading.Event()
        self.queue.put(reached.set)
        reached.wait()

    def end(self) -> None:
        self.queue.put(None)
        self.thread.join()


class FakeDriver:
    """Implements `loader.driver.Driver`.

    Args:
        seed, max_delay_s: of the delays before each copy.
        device_bytes: size of the device.
        pin_limit: bytes that may be registered or allocated pinned; None = any.
        host_alloc_allowed: whether `host_alloc` works at all.
        fail_copy: number of the copy that meets a sticky error.
        sharing_allowed: whether memory can be exported and imported.
        codec_version: of the library that unpacks; None = it is missing.
    """

    def __init__(
        self,
        seed: int = 0,
        max_delay_s: float = 0.0005,
        device_bytes: int = 1 << 40,
        pin_limit: int | None = None,
        host_alloc_allowed: bool = True,
        fail_copy: int | None = None,
        has_device: bool = True,
        sharing_allowed: bool = True,
        codec_version: str | None = "6.0.0",
    ) -> None:
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._device_bytes = device_bytes
        self._pin_limit = pin_limit
        self._host_alloc_allowed = host_alloc_allowed
        self._fail_copy = fail_copy
        self._has_device = has_device
        self.contexts = 0  # retained and not released
        self._sharing_allowed = sharing_allowed
        self.codec = None if codec_version is None else FakeCodec(self, codec_version)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._numbers = itertools.count(1000)
        self._owners: dict[int, int] = {}  # contexts of streams, events and device memory
        self._device: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._host: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.registered: dict[int, int] = {}
        self._queued: list[tuple[int, int]] = []
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}
        self._clock = threading.Event()
        self.caller = _Stream("caller")
        self.copies = 0
        self.largest_pinned = 0
        self.is_broken = False
        self.violations: list[str] = []

    # -- checks ------------------------------------------------------------------------------------------------

    def _require(self, condition: bool, rule: str) -> None:
        if not condition:
            self.violations.append(rule)
            raise AssertionError(rule)

    @property
    def current_context(self) -> int:
        """Of the calling thread; 0 = none."""
        stack = getattr(self._local, "contexts", [])
        return stack[-1] if stack else 0

    def _enter(self, *used: int) -> None:
        """`used`: streams, events and device memory."""
        current = self.current_context
        self._require(current != 0, "a call without a current context")
        owners = {self._owners[number] for number in used}
        self._require(owners <= {current}, f"a call in context {current} on what is of {owners}")
        if self.is_broken:
            raise InternalError("sticky error", where="CUDA driver", found=700)

    def finish(self, released: bool = True) -> None:
        """Call at the end of a test. `released`: also device memory must be gone."""
        self.caller.end()
        assert self.violations == []
        assert self.registered == {}
        assert self._host == {}
        assert self._streams == {}
        assert self._events == {}
        if released:
            assert self._device == {}

    def abandon(self) -> None:
        """After a sticky error nothing is released; end the threads."""
        self.caller.end()
        for stream in self._streams.values():
            stream.end()
        assert self.violations == []

    # -- context and memory ------------------------------------------------------------------------------------

    def retain_context(self, ordinal: int) -> int:
        if not self._has_device:
            raise CapabilityError("no such CUDA device", where="device", found=ordinal)
        self.contexts += 1
        return CONTEXT + ordinal

    def release_context(self, ordinal: int) -> None:
        self.contexts -= 1

    def use_context(self, context: int) -> None:
        if not self.current_context:
            self._local.contexts = [context]

    def enter_context(self, context: int) -> bool:
        current = self.current_context
        self.use_context(context)
        if current not in (0, context):
            self._local.contexts.append(context)
        return current not in (0, context)

    def leave_context(self) -> None:
        self._require(len(self._local.contexts) > 1, "the only context of a thread is left")
        self._local.contexts.pop()

    def _own(self, number: int) -> int:
        """What was just made is of the calling thread's context."""
        self._owners[number] = self.current_context
        return number

    def memory_used(self) -> int:
        return sum(map(len, self._device.values()))

    def memory_info(self) -> tuple[int, int]:
        self._enter()
        return self._device_bytes - sum(map(len, self._device.values())), self._device_bytes

    def alloc(self, size: int) -> int:
        self._enter()
        memory = ctypes.create_string_buffer(b"\xa5" * size, size)
        with self._lock:
            self._device[ctypes.addressof(memory)] = memory
        return self._own(ctypes.addressof(memory))

    def free(self, pointer: int) -> None:
        self._enter(pointer)
        with self._lock:
            del self._device[pointer]

    def shared_alloc(self, size: int, ordinal: int) -> tuple[int, int, int]:
        """A memfd stands for memory that can be exported, in units of 64 KiB."""
        self._enter()
        if not self._sharing_allowed:
            raise CapabilityError("device memory cannot be shared", where="fake", found=0, expected=1)
        mapped = -(-size // SHARED_UNIT) * SHARED_UNIT
        fd = os.memfd_create("fake-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, mapped)
        return self._map(fd, mapped), mapped, fd

    def shared_import(self, fd: int, mapped: int, ordinal: int) -> int:
        self._enter()
        if not self._sharing_allowed:
            raise InternalError("cannot import", where="fake driver")
        self._require(os.fstat(fd).st_size == mapped, "imported with another size")
        return self._map(fd, mapped)

    def _map(self, fd: int, mapped: int) -> int:
        memory = (ctypes.c_char * mapped).from_buffer(mmap.mmap(fd, mapped))
        with self._lock:
            self._device[ctypes.addressof(memory)] = memory
        return self._own(ctypes.addressof(memory))

    def shared_free(self, pointer: int, mapped: int) -> None:
        self._enter(pointer)
        with self._lock:
            self._require(len(self._device.pop(pointer)) == mapped, "unmapped with another size")

    def host_register(self, address: int, size: int) -> None:
        self._enter()
        with self._lock:
            overlap = any(address < a + n and a < address + size for a, n in self.registered.items())
            self._require(not overlap, "memory registered twice")
            if self._pin_limit is not None and sum(self.registered.values()) + size > self._pin_limit:
                raise PinningRefused(f"fake limit of {self._pin_limit} bytes")
            self.registered[address] = size
            self.largest_pinned = max(self.largest_pinned, sum(self.registered.values()))

    def host_unregister(self, address: int) -> None:
        self._enter()
        with self._lock:
            size = self.registered.pop(address)
            busy = any(a < address + size and address < a + n for a, n in self._queued)
            self._require(not busy, "unregistered with a copy in flight")

    def host_alloc(self, size: int) -> int:
        self._enter()
        if not self._host_alloc_allowed:
            raise PinningRefused("fake: no pinned memory")
        memory = ctypes.create_string_buffer(size)
        with self._lock:
            self._host[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def host_free(self, address: int) -> None:
        self._enter()
        with self._lock:
            memory = self._host.pop(address)
            busy = any(a < address + len(memory) and address < a + n for a, n in self._queued)
            self._require(not busy, "pinned memory freed with a copy in flight")

    # -- streams and events ------------------------------------------------------------------------------------

    def stream_create(self) -> int:
        self._enter()
        number = next(self._numbers)
        self._streams[number] = _Stream(f"stream-{number}")
        return self._own(number)

    def stream_destroy(self, stream: int) -> None:
        self._enter(stream)
        self._streams.pop(stream).end()

    def stream_synchronize(self, stream: int) -> None:
        self._enter(stream)
        self._streams[stream].synchronize()

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._enter(stream)
        self._require(self.is_device_range(target, size), "copy outside device memory")
        with self._lock:
            self.copies += 1
            if self.copies == self._fail_copy:
                self.is_broken = True
                self._enter()
            delay = self._random.random() * self._max_delay_s
            pinned = self._is_pinned(source, size)
            if pinned:
                self._queued.append((source, size))
        staged = None if pinned else ctypes.string_at(source, size)

        def complete() -> None:
            self._clock.wait(delay)
            ctypes.memmove(target, source if staged is None else staged, size)
            if staged is None:
                with self._lock:
                    self._queued.remove((source, size))

        self._streams[stream].queue.put(complete)

    def _is_pinned(self, source: int, size: int) -> bool:
        ranges = [*self.registered.items(), *((a, len(m)) for a, m in self._host.items())]
        return any(a <= source and source + size <= a + n for a, n in ranges)

    def copy_back_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._enter(stream)
        self._require(self.is_device_range(source, size), "copy from outside device memory")
        self._streams[stream].queue.put(lambda: ctypes.memmove(target, source, size))

    def is_device_range(self, address: int, size: int) -> bool:
        return any(a <= address and address + size <= a + len(m) for a, m in self._device.items())

    def enqueue(self, stream: int, operation: Callable[[], object]) -> None:
        """For libraries on top of the driver: done in order on a stream, after a random delay."""
        self._enter(stream)
        with self._lock:
            delay = self._random.random() * self._max_delay_s

        def complete() -> None:
            self._clock.wait(delay)
            operation()

        self._streams[stream].queue.put(complete)

    def open_codec(self) -> FakeCodec:
        self._enter()
        if self.codec is None:
            raise CapabilityError("no codec", where="codec", hint="prepare again with --codec none")
        return self.codec

    def event_create(self) -> int:
        self._enter()
        number = next(self._numbers)
        self._events[number] = _Event()
        return self._own(number)

    def event_destroy(self, event: int) -> None:
        self._enter(event)
        del self._events[event]

    def event_record(self, event: int, stream: int) -> None:
        self._enter(event, stream)
        entry = self._events[event]
        entry.is_recorded, entry.done = True, threading.Event()
        self._streams[stream].queue.put(entry.done.set)

    def event_query(self, event: int) -> bool:
        self._enter(event)
        self._require(self._events[event].is_recorded, "query of an event that was never recorded")
        return self._events[event].done.is_set()

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._enter(event)  # a caller's default stream is that of the current context
        entry = self._events[event]
        self._require(entry.is_recorded, "wait on an event that was never recorded")
        done = entry.done
        (self.caller if stream == 1 else self._streams[stream]).queue.put(done.wait)

    # -- torch -------------------------------------------------------------------------------------------------

    def caller_stream(self, ordinal: int) -> int:
        return 1

    def expose(self, arena: DeviceArena) -> object:
        """Bytes of the arena, which lives as long as they do; synchronise `caller` before reading them."""
        memory = self._device[arena.pointer]
        view = (ctypes.c_char * arena.bytes).from_address(arena.pointer)
        view.keep = (memory, arena)  # type: ignore[attr-defined]
        return view
