"""One contiguous memory per component, host or device, and how it is shown to torch without a copy."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from loader.driver import InContext

if TYPE_CHECKING:
    from loader.driver import Driver, Importer


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


class Exposer(Protocol):
    """Shows device memory to torch."""

    def expose(self, arena: DeviceArena) -> object:
        """What torch can view without a copy: it has `__cuda_array_interface__` or is a buffer."""
        ...


class DeviceArena:
    """Device memory of `size` bytes, released when neither the stream nor any view holds it.

    The release waits for the whole device, so drop a component's last view between requests, not during denoising.
    """

    def __init__(
        self, name: str, size: int, pointer: int, exposer: Exposer, release: Callable[[], None]
    ) -> None:
        self.name = name
        self.bytes = size
        self.pointer = pointer
        self._exposer = exposer
        self._finalizer = weakref.finalize(self, release)
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
        return self._exposer.expose(self)

    def abandon(self) -> None:
        """Do not free it: the context is broken."""
        self._finalizer.detach()


def allocate_arena(name: str, size: int, driver: Driver, context: int) -> DeviceArena:
    """Memory of this process. Raises: CapabilityError: the device has not enough."""
    pointer = driver.alloc(size)
    return DeviceArena(name, size, pointer, driver, partial(_free, driver, context, pointer))


def import_arena(
    name: str, size: int, mapped: int, fd: int, importer: Importer, ordinal: int, context: int
) -> DeviceArena:
    """Memory that another process has allocated (`mapped` bytes of it) and fills. `fd` is not closed here.

    Raises: InternalError: the driver refuses.
    """
    pointer = importer.shared_import(fd, mapped, ordinal)
    return DeviceArena(name, size, pointer, importer, partial(_unmap, importer, context, pointer, mapped))


def _free(driver: Driver, context: int, pointer: int) -> None:
    with InContext(driver, context):
        driver.free(pointer)


def _unmap(importer: Importer, context: int, pointer: int, mapped: int) -> None:
    with InContext(importer, context):
        importer.shared_free(pointer, mapped)
