"""The CUDA driver calls that the loader uses, and nothing else of CUDA. The only file that imports `cuda.bindings`.

Handles are plain integers. Every return code is checked. Each thread that calls in must have a current context:
`use_context` first, `InContext` in a thread that may work on another device. A fake with the same methods stands in for tests.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol

from loader.errors import CapabilityError, InternalError

if TYPE_CHECKING:
    from loader.arena import DeviceArena
    from loader.codec.unpacker import PieceCodec

_REGISTER_PORTABLE = 1
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_SUCCESS, _OUT_OF_MEMORY, _NOT_READY = 0, 2, 600


class PinningRefused(Exception):
    """The driver will not pin this memory; the load goes on without."""


class Driver(Protocol):
    """Raises of all methods: CapabilityError where something is missing here, InternalError for failed calls."""

    def retain_context(self, ordinal: int) -> int:
        """Initialise the driver; the device's primary context, which is never released."""
        ...

    def release_context(self, ordinal: int) -> None:
        """Undo one `retain_context`: without another one in this process, all that it holds on the device is freed."""
        ...

    def use_context(self, context: int) -> None:
        """Make it current in this thread, unless this thread has a current context. For threads of the loader's own."""
        ...

    def enter_context(self, context: int) -> bool:
        """`use_context` for other threads: one that is current and is not `context` goes behind it. See `InContext`.

        Returns: whether it did, so that `leave_context` must follow.
        """
        ...

    def leave_context(self) -> None:
        """The one behind comes back."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        ...

    def alloc(self, size: int) -> int: ...

    def free(self, pointer: int) -> None:
        """Waits for the device."""
        ...

    def shared_alloc(self, size: int, ordinal: int) -> tuple[int, int, int]:
        """Device memory that other processes can import: (pointer, mapped bytes >= size, descriptor to send).

        The caller closes the descriptor; the memory lives as long as it, or any mapping in any process.
        """
        ...

    def shared_import(self, fd: int, mapped: int, ordinal: int) -> int:
        """Map memory whose descriptor came from `shared_alloc` elsewhere; the pointer. `fd` may be closed then."""
        ...

    def shared_free(self, pointer: int, mapped: int) -> None:
        """Waits for the device, then unmaps what was allocated or imported."""
        ...

    def host_register(self, address: int, size: int) -> None:
        """Pin pages that exist. Raises: PinningRefused."""
        ...

    def host_unregister(self, address: int) -> None: ...

    def host_alloc(self, size: int) -> int:
        """Pinned memory of the driver's own. Raises: PinningRefused."""
        ...

    def host_free(self, address: int) -> None: ...

    def stream_create(self) -> int:
        """A stream that does not wait for the default stream."""
        ...

    def stream_destroy(self, stream: int) -> None: ...

    def stream_synchronize(self, stream: int) -> None: ...

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        """Host to device; `source` must stay untouched until an event recorded after it is complete.

        Pageable memory is staged by the driver: slower, the same rules.
        """
        ...

    def copy_back_async(self, target: int, source: int, size: int, stream: int) -> None:
        """Device to host; `target` is whole when an event recorded after it is complete."""
        ...

    def open_codec(self) -> PieceCodec:
        """The library that unpacks coded pieces; a context is current. Raises: CapabilityError: it is missing."""
        ...

    def event_create(self) -> int: ...

    def event_destroy(self, event: int) -> None: ...

    def event_record(self, event: int, stream: int) -> None: ...

    def event_query(self, event: int) -> bool: ...

    def stream_wait_event(self, stream: int, event: int) -> None:
        """`event` must have been recorded; otherwise CUDA waits for nothing."""
        ...

    def caller_stream(self, ordinal: int) -> int:
        """The current stream of the calling thread, as its torch sees it."""
        ...

    def expose(self, arena: DeviceArena) -> object:
        """What torch can view without a copy: it has `__cuda_array_interface__` or is a buffer."""
        ...


class Importer(Protocol):
    """What a process needs that only looks at device memory of another one; see `Driver` for what the calls mean."""

    def retain_context(self, ordinal: int) -> int: ...

    def use_context(self, context: int) -> None: ...

    def enter_context(self, context: int) -> bool: ...

    def leave_context(self) -> None: ...

    def shared_import(self, fd: int, mapped: int, ordinal: int) -> int: ...

    def shared_free(self, pointer: int, mapped: int) -> None: ...

    def expose(self, arena: DeviceArena) -> object: ...


class InContext:
    """`with InContext(driver, context):` calls inside are made in `context`, whatever device the thread works on."""

    def __init__(self, driver: Driver | Importer, context: int) -> None:
        self._driver = driver
        self._context = context
        self._is_entered = False

    def __enter__(self) -> None:
        self._is_entered = self._driver.enter_context(self._context)

    def __exit__(self, *_: object) -> None:
        if self._is_entered:
            self._driver.leave_context()


def require_memory(driver: Driver, ordinal: int, arenas: int, beside: int, reserve: int) -> None:
    """Raises: CapabilityError: the device has less free than these bytes of arenas, to unpack in and in reserve."""
    free, total = driver.memory_info()
    if arenas + beside + reserve > free:
        raise CapabilityError(
            "device memory is short",
            where=f"cuda:{ordinal}",
            found=f"{free} of {total} bytes free",
            expected=f"{arenas} bytes of arenas, {beside} to unpack in and {reserve} in reserve",
            hint="stop what else holds the card, or load fewer groups",
        )


def address_of(memory: object) -> int:
    """Address of a writable buffer."""
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # type: ignore[arg-type]


class CudaDriver:
    """`cuda.bindings`, imported on first use (about 40 ms).

    Raises: CapabilityError: the package or the driver library is missing.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except (ImportError, RuntimeError) as error:
            raise CapabilityError(
                f"no CUDA driver interface: {error}",
                where="cuda.bindings",
                hint="install cuda-bindings 13 and run on a machine with an NVIDIA driver, or use the CPU",
            ) from error
        self._cu: Any = driver

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        code = int(result[0])
        if code == _SUCCESS:
            return result[1] if len(result) > 1 else None
        raise InternalError(f"{call} failed: {self._text(result[0])}", where="CUDA driver", found=code)

    def _text(self, code: Any) -> str:
        status, name = self._cu.cuGetErrorName(code)
        return name.decode() if int(status) == _SUCCESS else f"error {int(code)}"

    def retain_context(self, ordinal: int) -> int:
        from loader.cuda_library import START_HINT

        cu = self._cu
        try:
            result = cu.cuInit(0)
        except RuntimeError as error:  # no libcuda
            raise CapabilityError(f"CUDA cannot start: {error}", where="cuInit", hint=START_HINT) from error
        if int(result[0]) != _SUCCESS:
            problem = f"CUDA cannot start: {self._text(result[0])}"
            raise CapabilityError(problem, where="cuInit", hint=START_HINT)
        count = self._check("cuDeviceGetCount", cu.cuDeviceGetCount())
        if ordinal >= count:
            raise CapabilityError(
                "no such CUDA device", where="device", found=ordinal, expected=f"0..{count - 1}"
            )
        device = self._check("cuDeviceGet", cu.cuDeviceGet(ordinal))
        return int(self._check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device)))

    def release_context(self, ordinal: int) -> None:
        device = self._check("cuDeviceGet", self._cu.cuDeviceGet(ordinal))
        self._check("cuDevicePrimaryCtxRelease", self._cu.cuDevicePrimaryCtxRelease(device))

    def use_context(self, context: int) -> None:
        if int(self._check("cuCtxGetCurrent", self._cu.cuCtxGetCurrent())) == 0:
            self._check("cuCtxSetCurrent", self._cu.cuCtxSetCurrent(self._cu.CUcontext(context)))

    def enter_context(self, context: int) -> bool:
        current = int(self._check("cuCtxGetCurrent", self._cu.cuCtxGetCurrent()))
        if current == 0:
            self._check("cuCtxSetCurrent", self._cu.cuCtxSetCurrent(self._cu.CUcontext(context)))
        elif current != context:
            self._check("cuCtxPushCurrent", self._cu.cuCtxPushCurrent(self._cu.CUcontext(context)))
        return current not in (0, context)

    def leave_context(self) -> None:
        self._check("cuCtxPopCurrent", self._cu.cuCtxPopCurrent())

    def memory_info(self) -> tuple[int, int]:
        code, free, total = self._cu.cuMemGetInfo()
        self._check("cuMemGetInfo", (code,))
        return int(free), int(total)

    def alloc(self, size: int) -> int:
        result = self._cu.cuMemAlloc(size)
        if int(result[0]) == _OUT_OF_MEMORY:
            free, total = self.memory_info()
            raise CapabilityError(
                "device memory is short",
                where="cuMemAlloc",
                found=f"{free} of {total} bytes free",
                expected=f"{size} bytes",
            )
        return int(self._check("cuMemAlloc", result))

    def free(self, pointer: int) -> None:
        self._check("cuMemFree", self._cu.cuMemFree(pointer))

    def shared_alloc(self, size: int, ordinal: int) -> tuple[int, int, int]:
        self._check_sharing(ordinal)
        cu = self._cu
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._by_descriptor
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        option = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = int(
            self._check("cuMemGetAllocationGranularity", cu.cuMemGetAllocationGranularity(properties, option))
        )
        mapped = -(-size // unit) * unit
        handle = self._check("cuMemCreate", cu.cuMemCreate(mapped, properties, 0))
        try:
            fd = self._check(
                "cuMemExportToShareableHandle",
                cu.cuMemExportToShareableHandle(handle, self._by_descriptor, 0),
            )
            try:
                return self._map(handle, mapped, unit, ordinal), mapped, int(fd)
            except InternalError:
                os.close(int(fd))
                raise
        finally:
            self._check("cuMemRelease", cu.cuMemRelease(handle))  # mapping and descriptor keep the memory

    def shared_import(self, fd: int, mapped: int, ordinal: int) -> int:
        cu = self._cu
        handle = self._check(
            "cuMemImportFromShareableHandle", cu.cuMemImportFromShareableHandle(fd, self._by_descriptor)
        )
        try:
            return self._map(handle, mapped, 0, ordinal)
        finally:
            self._check("cuMemRelease", cu.cuMemRelease(handle))

    @property
    def _by_descriptor(self) -> Any:
        return self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _check_sharing(self, ordinal: int) -> None:
        """Raises: CapabilityError: the device cannot be used by two processes, or not share memory between them."""
        cu = self._cu
        device = self._check("cuDeviceGet", cu.cuDeviceGet(ordinal))
        names = cu.CUdevice_attribute
        for name, wanted in (
            (names.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0),
            (names.CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED, 1),
            (names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1),
        ):
            found = int(self._check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(name, device)))
            if found != wanted:
                raise CapabilityError(
                    "device memory cannot be shared", where=name.name, found=found, expected=wanted
                )

    def _map(self, handle: Any, mapped: int, unit: int, ordinal: int) -> int:
        cu = self._cu
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        pointer = self._check("cuMemAddressReserve", cu.cuMemAddressReserve(mapped, unit, 0, 0))
        try:
            self._check("cuMemMap", cu.cuMemMap(pointer, mapped, 0, handle, 0))
            try:
                self._check("cuMemSetAccess", cu.cuMemSetAccess(pointer, mapped, [access], 1))
            except InternalError:
                cu.cuMemUnmap(pointer, mapped)
                raise
        except InternalError:
            cu.cuMemAddressFree(pointer, mapped)
            raise
        return int(pointer)

    def shared_free(self, pointer: int, mapped: int) -> None:
        self._check("cuCtxSynchronize", self._cu.cuCtxSynchronize())
        self._check("cuMemUnmap", self._cu.cuMemUnmap(pointer, mapped))
        self._check("cuMemAddressFree", self._cu.cuMemAddressFree(pointer, mapped))

    def host_register(self, address: int, size: int) -> None:
        result = self._cu.cuMemHostRegister(address, size, _REGISTER_PORTABLE)
        if int(result[0]) != _SUCCESS:
            raise PinningRefused(f"cuMemHostRegister of {size} bytes: {self._text(result[0])}")

    def host_unregister(self, address: int) -> None:
        self._check("cuMemHostUnregister", self._cu.cuMemHostUnregister(address))

    def host_alloc(self, size: int) -> int:
        result = self._cu.cuMemHostAlloc(size, _REGISTER_PORTABLE)
        if int(result[0]) != _SUCCESS:
            raise PinningRefused(f"cuMemHostAlloc of {size} bytes: {self._text(result[0])}")
        return int(result[1])

    def host_free(self, address: int) -> None:
        self._check("cuMemFreeHost", self._cu.cuMemFreeHost(address))

    def stream_create(self) -> int:
        return int(self._check("cuStreamCreate", self._cu.cuStreamCreate(_STREAM_NON_BLOCKING)))

    def stream_destroy(self, stream: int) -> None:
        self._check("cuStreamDestroy", self._cu.cuStreamDestroy(self._cu.CUstream(stream)))

    def stream_synchronize(self, stream: int) -> None:
        self._check("cuStreamSynchronize", self._cu.cuStreamSynchronize(self._cu.CUstream(stream)))

    def copy_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._check(
            "cuMemcpyHtoDAsync", self._cu.cuMemcpyHtoDAsync(target, source, size, self._cu.CUstream(stream))
        )

    def copy_back_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._check(
            "cuMemcpyDtoHAsync", self._cu.cuMemcpyDtoHAsync(target, source, size, self._cu.CUstream(stream))
        )

    def open_codec(self) -> PieceCodec:
        from loader.codec.nvcomp import Nvcomp

        return Nvcomp()

    def event_create(self) -> int:
        return int(self._check("cuEventCreate", self._cu.cuEventCreate(_EVENT_DISABLE_TIMING)))

    def event_destroy(self, event: int) -> None:
        self._check("cuEventDestroy", self._cu.cuEventDestroy(self._cu.CUevent(event)))

    def event_record(self, event: int, stream: int) -> None:
        self._check(
            "cuEventRecord", self._cu.cuEventRecord(self._cu.CUevent(event), self._cu.CUstream(stream))
        )

    def event_query(self, event: int) -> bool:
        result = self._cu.cuEventQuery(self._cu.CUevent(event))
        if int(result[0]) == _NOT_READY:
            return False
        self._check("cuEventQuery", result)
        return True

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._check(
            "cuStreamWaitEvent",
            self._cu.cuStreamWaitEvent(self._cu.CUstream(stream), self._cu.CUevent(event), 0),
        )

    def caller_stream(self, ordinal: int) -> int:
        if "torch" not in sys.modules:
            return 0
        from loader import torch_api

        return torch_api.current_stream(ordinal)

    def expose(self, arena: DeviceArena) -> object:
        return arena
