"""The few calls of libcuda that are needed where `cuda.bindings` is in the way, through ctypes.

A process that imports torch maps device memory of its uploader and connects its GPUs with them: ctypes is there already and lets go
of the interpreter lock during each call. The uploader makes its context with them while it imports `cuda.bindings`.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p

from loader.errors import CapabilityError, InternalError

TYPE_CHECKING = False  # the typing module costs as much as everything else on the way to the context
if TYPE_CHECKING:
    from typing import Any

    from loader.arena import DeviceArena

START_HINT = "check that the container has a GPU and a driver for CUDA 13"
_SUCCESS = 0
_BY_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_ON_DEVICE, _READ_WRITE = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Access(ctypes.Structure):
    """CUmemAccessDesc of CUDA 11.2 and later: location type, location id, flags."""

    _fields_ = (("type", c_int), ("id", c_int), ("flags", c_int))


_ARGUMENTS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (ctypes.POINTER(c_int),),
    "cuDeviceGet": (ctypes.POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (ctypes.POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (ctypes.POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, ctypes.POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuStreamCreate": (ctypes.POINTER(c_void_p), ctypes.c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemAlloc_v2": (ctypes.POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuGetErrorName": (c_int, ctypes.POINTER(c_char_p)),
}


@functools.cache
def cuda_library() -> CudaLibrary:
    """The process's one. Opening it and looking up its functions waits for the dynamic linker with the interpreter lock held,
    so a program that maps large libraries on a thread calls this before.

    Raises: CapabilityError: see `CudaLibrary`.
    """
    return CudaLibrary()


class CudaLibrary:
    """Implements `loader.driver.Importer`.

    Args: library: in place of libcuda, for tests.
    Raises: CapabilityError: no driver library here.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
            for name, arguments in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise CapabilityError(
                f"no CUDA driver: {error}",
                where="libcuda.so.1",
                hint="run on a machine with an NVIDIA driver",
            ) from error

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise InternalError(
                f"{name} failed: {(text.value or b'unknown error').decode()}", where="CUDA driver", found=code
            )

    def retain_context(self, ordinal: int) -> int:
        count, device, context = c_int(), c_int(), c_void_p()
        try:
            self._call("cuInit", 0)
        except InternalError as error:
            raise CapabilityError(f"CUDA cannot start: {error}", where="cuInit", hint=START_HINT) from error
        self._call("cuDeviceGetCount", byref(count))
        if ordinal >= count.value:
            raise CapabilityError(
                "no such CUDA device", where="device", found=ordinal, expected=f"0..{count.value - 1}"
            )
        self._call("cuDeviceGet", byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context.value or 0

    def use_context(self, context: int) -> None:
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if not current.value:
            self._call("cuCtxSetCurrent", context)

    def enter_context(self, context: int) -> bool:
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if not current.value:
            self._call("cuCtxSetCurrent", context)
        elif current.value != context:
            self._call("cuCtxPushCurrent_v2", context)
        return current.value not in (None, context)

    def leave_context(self) -> None:
        self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def shared_import(self, fd: int, mapped: int, ordinal: int) -> int:
        handle, pointer = c_uint64(), c_uint64()
        access = _Access(_ON_DEVICE, ordinal, _READ_WRITE)
        self._call("cuMemImportFromShareableHandle", byref(handle), fd, _BY_DESCRIPTOR)
        try:
            self._call("cuMemAddressReserve", byref(pointer), mapped, 0, 0, 0)
            try:
                self._call("cuMemMap", pointer, mapped, 0, handle, 0)
                try:
                    self._call("cuMemSetAccess", pointer, mapped, byref(access), 1)
                except InternalError:
                    self._library.cuMemUnmap(pointer, mapped)
                    raise
            except InternalError:
                self._library.cuMemAddressFree(pointer, mapped)
                raise
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        return pointer.value

    def shared_free(self, pointer: int, mapped: int) -> None:
        self._call("cuCtxSynchronize")
        self._call("cuMemUnmap", pointer, mapped)
        self._call("cuMemAddressFree", pointer, mapped)

    def stream_create(self) -> int:
        """A stream that does not wait for the default stream."""
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def stream_synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def stream_destroy(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def alloc(self, size: int) -> int:
        """Device memory of this process alone."""
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", byref(pointer), size)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Waits for the device."""
        self._call("cuMemFree_v2", pointer)

    def expose(self, arena: DeviceArena) -> object:
        return arena
