"""What one upload holds on a device: context, stream, arenas, ring and reader, opened in order and closed in reverse."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loader.arena import DeviceArena, allocate_arena
from loader.budget import RingChoice
from loader.child_process import STUCK
from loader.driver import Driver, PinningRefused, require_memory
from loader.errors import CapabilityError, WorkerError
from loader.load_plan import LoadPlan
from loader.progress import LoadProgress
from loader.reader_link import ReaderLink, ThreadReader
from loader.ring import Ring

if TYPE_CHECKING:
    from loader.codec.unpack_plan import UnpackPlan
    from loader.codec.unpacker import Unpacker


class DeviceSession:
    """Made on the uploader's thread.

    Args:
        link: the reader that already fills the ring; None = path C, which needs the context first.
        begin: starts a reader on the plan and gives it all slots.
        adopt: tells everyone else that a reader is in use.
        path: "A" … "D"; `may_fall` = a refusal may choose a lower one.
        unpack: what unpacking the plan takes; None where nothing is coded.
    Raises: CapabilityError: no device, or its memory is short (names both numbers).
    """

    def __init__(
        self,
        plan: LoadPlan,
        make_driver: Callable[[], Driver],
        ordinal: int,
        choice: RingChoice,
        link: ReaderLink | None,
        begin: Callable[[ReaderLink], None],
        adopt: Callable[[ReaderLink], None],
        progress: LoadProgress,
        path: str,
        may_fall: bool,
        reserve_bytes: int,
        unpack: UnpackPlan | None = None,
    ) -> None:
        self.path = path
        self.is_broken = False
        self.arenas: dict[int, DeviceArena] = {}
        self.unpacker: Unpacker | None = None
        self._unpack = unpack
        self._choice = choice
        self._begin, self._adopt = begin, adopt
        self._progress = progress
        self._may_fall = may_fall
        self._lock = threading.Lock()
        self._link = link
        self._ring: Ring | None = None
        self._host_memory = 0
        self._stream: int | None = None
        self._is_reader_stuck = False
        try:
            self.driver = make_driver()
            self._open(plan, ordinal, reserve_bytes)
        except BaseException:
            self.stop_reader(drain=True)
            self.settle(is_failed=True)
            self.close()
            raise

    @property
    def link(self) -> ReaderLink:
        assert self._link is not None, "a session that is open has a reader"
        return self._link

    @property
    def ring(self) -> Ring:
        assert self._ring is not None, "a session that is open has a ring"
        return self._ring

    @property
    def stream(self) -> int:
        assert self._stream is not None, "a session that is open has a stream"
        return self._stream

    def _open(self, plan: LoadPlan, ordinal: int, reserve_bytes: int) -> None:
        start = time.monotonic_ns()
        self.context = self.driver.retain_context(ordinal)
        self.driver.use_context(self.context)
        self._progress.mark("cuda context", start)
        beside = 0
        if self._unpack is not None:
            from loader.codec.unpacker import Unpacker

            self.unpacker = Unpacker(self.driver, self._unpack)
            beside = self.unpacker.sizes.device_bytes
        require_memory(self.driver, ordinal, plan.arena_bytes, beside, reserve_bytes)
        start = time.monotonic_ns()
        for index, arena in enumerate(plan.arenas):
            self.arenas[index] = allocate_arena(arena.name, arena.bytes, self.driver, self.context)
        self._stream = self.driver.stream_create()
        if self.unpacker is not None:
            self.unpacker.open(
                [self.arenas[index].pointer for index in range(len(plan.arenas))], self._stream
            )
        self._progress.mark("device arenas", start, size=plan.arena_bytes)
        if self._link is None:
            self._use_driver_memory()
        else:
            memory = self._link.map_pool(0, self._choice.bytes)
            self._link.drop_pool()
            pinning = "pageable" if self.path == "D" else "register"
            self._ring = Ring(self.driver, memory, self._choice, pinning, self._link.recycles)

    def pin(self, slots: Sequence[int]) -> list[int] | None:
        """Pin filled slots; the ones that may be filled again. None = the ring was replaced and refills from the start.

        A refusal before anything was pinned chooses path C, or D if the driver has no pinned memory either. A later
        one leaves the ring as large as it got.
        """
        refused_before = self.ring.refusal
        reusable = [slot for slot in slots if self.ring.pin(slot)]
        if not self.ring.refusal or refused_before:
            return reusable
        asked, got = self._choice.bytes, self.ring.pinned_bytes
        self._progress.mark(f"warning: pinned {got} of {asked} bytes: {self.ring.refusal}", size=got)
        if got == 0 and self._may_fall:
            return self._fall(slots)
        return reusable

    def _fall(self, slots: Sequence[int]) -> list[int] | None:
        refusal = self.ring.refusal
        try:
            self._host_memory = self.driver.host_alloc(self._choice.bytes)
        except PinningRefused as error:
            self.path, self.ring.pinning = "D", "pageable"
            self._progress.mark(f"path D, {self.link.kind}: {error}")
            return list(slots)
        self.stop_reader(drain=True)
        self.ring.close()
        self.link.close()
        self._use_driver_memory(refusal)
        return None

    def _use_driver_memory(self, reason: str = "forced") -> None:
        """Path C: a ring that only this process sees, filled by threads."""
        if not self._host_memory:
            try:
                self._host_memory = self.driver.host_alloc(self._choice.bytes)
            except PinningRefused as error:
                raise CapabilityError(
                    str(error), where="path C", hint="leave the path out to use pageable memory"
                ) from error
        self.path = "C"
        memory = memoryview((ctypes.c_char * self._choice.bytes).from_address(self._host_memory)).cast("B")
        self._ring = Ring(self.driver, memory, self._choice, "pinned")
        link = ThreadReader(memory)
        with self._lock:
            self._link = link
        self._progress.mark(f"path C, threads: {reason}", size=self._choice.bytes)
        self._begin(link)
        self._adopt(link)

    def stop_reader(self, drain: bool = False) -> None:
        with self._lock:
            link = self._link
        if link is not None:
            self._is_reader_stuck = link.stop(drain=drain) == STUCK

    def settle(self, is_failed: bool = False) -> None:
        """The safe point: no copy is in flight after it; the ring is given back. May be called again."""
        if self._stream is not None:
            try:
                self.driver.stream_synchronize(self._stream)
                self.driver.stream_destroy(self._stream)
                if self.unpacker is not None:
                    self.unpacker.close()
            except WorkerError:
                self.is_broken = True  # a sticky error: the context is of no use to anyone
                if not is_failed:
                    raise
            self._stream = None
        if self._ring is not None:
            if self.is_broken:
                self._ring.abandon()
            else:
                self._ring.close()
        self._ring = None
        if self._host_memory and not (self._is_reader_stuck or self.is_broken):
            self.driver.host_free(self._host_memory)
            self._host_memory = 0

    def close(self) -> None:
        """Forget reader and arenas; device memory goes with its last view. May be called again."""
        if self._link is not None:
            self._link.stop()
            self._link.close()
        if self.is_broken:
            for arena in self.arenas.values():
                arena.abandon()
        self.arenas = {}
