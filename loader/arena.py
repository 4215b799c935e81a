"""One contiguous memory per component, host or device, and how it is shown to torch without a copy."""

from __future__ import annotations

import mmap
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loader.driver import Driver


class HostArena:
    """Host memory that the reader writes into. `memory` keeps the mapping alive; views of it do, too."""

    def __init__(self, name: str, memory: mmap.mmap | memoryview) -> None:
        self.name = name
        self.memory = memory

    @property
    def bytes(self) -> int:
        return len(self.memory)

    def expose(self) -> object:
        return self.memory


class DeviceArena:
    """Device memory, freed when neither the stream nor any view holds it.

    `cuMemFree` waits for the whole device, so drop a component's last view between requests, not during denoising.
    """

    def __init__(self, name: str, size: int, driver: Driver, context: int) -> None:
        self.name = name
        self.bytes = size
        self.pointer = driver.alloc(size)
        self._driver = driver
        self._finalizer = weakref.finalize(self, _free, driver, context, self.pointer)
        self._finalizer.atexit = False  # the end of the process frees it; the driver may be gone by then

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3, bytes; torch keeps this object as long as any tensor of it lives."""
        return {
            "shape": (self.bytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }

    def expose(self) -> object:
        return self._driver.expose(self)

    def abandon(self) -> None:
        """Do not free it: the context is broken."""
        self._finalizer.detach()


def _free(driver: Driver, context: int, pointer: int) -> None:
    driver.use_context(context)
    driver.free(pointer)
