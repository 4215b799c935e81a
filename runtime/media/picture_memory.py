"""Memory that the worker fills with pictures and encoder processes read, without a name that could be left behind.

One anonymous file, inherited by the encoder processes, cut into slots of one unit each. It can be pinned for
asynchronous copies from a CUDA device. Standard library only; torch where pinning needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

from loader.errors import InternalError


@dataclass(frozen=True)
class PictureSlot:
    """Room for one unit: `view` is writable, `offset` its place in the shared file."""

    index: int
    offset: int
    view: memoryview


class PictureMemory:
    """Slots of equal size. `file_descriptor` stays the same when the memory is resized."""

    def __init__(self) -> None:
        self.file_descriptor = _anonymous_file()
        self.slot_bytes = 0
        self.slots = 0
        self.pinned = False
        self.refusal = ""
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._free: list[int] = []
        self._changed = threading.Condition()

    def resize(self, slot_bytes: int, slots: int, *, pin: bool = False) -> None:
        """Make room for `slots` units of `slot_bytes`; keeps what is there if it is enough. All slots must be free.

        Args:
            pin: register the memory with the CUDA driver; where that is refused copies are slower but right, and
                `refusal` says why.
        Raises: InternalError: slots are in use, or there is no memory for them.
        """
        with self._changed:
            if slot_bytes <= self.slot_bytes and slots <= self.slots and (self.pinned or not pin):
                return
            if len(self._free) != self.slots:
                raise InternalError("picture slots are in use", where="picture memory")
            self._unmap()
            page = mmap.ALLOCATIONGRANULARITY
            self.slot_bytes = -(-max(slot_bytes, self.slot_bytes, 1) // page) * page
            self.slots = max(slots, self.slots)
            size = self.slot_bytes * self.slots
            try:
                os.ftruncate(self.file_descriptor, size)
                _reserve(self.file_descriptor, size)
                self._map = mmap.mmap(self.file_descriptor, size)
            except OSError as error:
                self.slots, self.slot_bytes, self._free = 0, 0, []
                raise InternalError(
                    "no memory for pictures", where="picture memory", found=f"{size} bytes: {error.strerror}"
                ) from error
            self._view = memoryview(self._map)
            self._free = list(range(self.slots))
            if pin:
                self._pin(size)

    def acquire(self, timeout_s: float) -> PictureSlot | None:
        """A free slot, waiting for one up to `timeout_s`; None if there was none."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                return None
            index = self._free.pop()
            assert self._view is not None
            offset = index * self.slot_bytes
            return PictureSlot(index, offset, self._view[offset : offset + self.slot_bytes])

    def release(self, slot: PictureSlot) -> None:
        with self._changed:
            self._free.append(slot.index)
            self._changed.notify()

    def close(self) -> None:
        """Unpin, unmap and free; no copy may be in flight. May be called again."""
        with self._changed:
            self._unmap()
            self.slots, self._free = 0, []
            if self.file_descriptor >= 0:
                os.close(self.file_descriptor)
                self.file_descriptor = -1

    def _pin(self, size: int) -> None:
        assert self._map is not None
        status = _cuda().cudaHostRegister(_address(self._map), size, 0)
        self.pinned = int(status) == 0
        self.refusal = "" if self.pinned else f"cudaHostRegister: {status}"

    def _unmap(self) -> None:
        if self._map is None:
            return
        if self.pinned:
            _cuda().cudaHostUnregister(_address(self._map))
            self.pinned = False
        self._view = None
        with contextlib.suppress(
            BufferError
        ):  # a slot's view is still referred to; it unmaps with the last one
            self._map.close()
        self._map = None


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("coldframe-pictures")
        except OSError:
            pass  # a sandbox without it: a file that loses its name at once does the same on disk
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _reserve(file_descriptor: int, size: int) -> None:
    """Take the pages now: on a full file system a later write through the map would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file_descriptor, 0, size)


def _cuda() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
