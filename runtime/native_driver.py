"""The driver calls that compiled operators need, through ctypes: a `kernels.driver.KernelDriver` without `cuda.bindings`.

Importing that package holds the interpreter lock for 40 to 140 ms, in the middle of the import of torch. Standard library only.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

from loader.errors import CapabilityError, InternalError

_SUCCESS = 0
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (ctypes.POINTER(c_int),),
    "cuDeviceGet": (ctypes.POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(c_int), c_int, c_int),
    "cuLibraryLoadData": (
        ctypes.POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint,
    ),
    "cuLibraryGetKernel": (ctypes.POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelGetFunction": (ctypes.POINTER(c_void_p), c_void_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuLibraryUnload": (c_void_p,),
    "cuGetErrorName": (c_int, ctypes.POINTER(c_char_p)),
}  # fmt: skip
"""Call → its arguments. All are in drivers for CUDA 12.1 and later."""


class NativeDriver:
    """See `kernels.driver.KernelDriver`. Every return code is checked.

    Args:
        library: in place of libcuda, for tests.
    Raises: CapabilityError: there is no driver here, or it is too old.
    """

    device_type = "cuda"

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
            for name, arguments in _ARGUMENTS.items():
                getattr(self._library, name).argtypes = arguments
            self._call("cuInit", 0)
        except (OSError, AttributeError, InternalError) as cause:
            raise CapabilityError(
                "precompiled kernels need a CUDA driver", where="libcuda.so.1", found=str(cause)
            ) from cause
        self._launch = self._library.cuLaunchKernel

    def version(self) -> int:
        return self._number("cuDriverGetVersion")

    def capability(self) -> tuple[int, int]:
        """Compute capability of device 0."""
        device = self._number("cuDeviceGet", 0)
        major, minor = (self._number("cuDeviceGetAttribute", name, device) for name in (_MAJOR, _MINOR))
        return major, minor

    def load_library(self, image: bytes) -> int:
        return self._handle("cuLibraryLoadData", image, None, None, 0, None, None, 0)

    def get_function(self, library: int, symbol: str) -> int:
        kernel = self._handle("cuLibraryGetKernel", library, symbol.encode())
        return self._handle("cuKernelGetFunction", kernel)

    def launch(
        self, function: int, grid: int, threads: int, shared: int, cuda_stream: int, slots: int
    ) -> None:
        code = self._launch(function, grid, 1, 1, threads, 1, 1, shared, cuda_stream, slots, None)
        if code != _SUCCESS:
            self._fail("cuLaunchKernel", code)

    def unload(self, library: int) -> None:
        self._call("cuLibraryUnload", library)

    def _number(self, name: str, *arguments: int) -> int:
        out = c_int()
        self._call(name, byref(out), *arguments)
        return out.value

    def _handle(self, name: str, *arguments: Any) -> int:
        out = c_void_p()
        self._call(name, byref(out), *arguments)
        return out.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            self._fail(name, code)

    def _fail(self, name: str, code: int) -> None:
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        found = text.value.decode() if text.value else str(code)
        raise InternalError("CUDA driver call failed", where=name, found=found)
