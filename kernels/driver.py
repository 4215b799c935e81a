"""The few CUDA driver calls that a cubin needs, and the seam where tests put a fake.

`cuda.bindings` is imported on first use. A library can be loaded before a context exists; a function needs one.
"""

from __future__ import annotations

from typing import Any, Protocol

from loader.errors import CapabilityError, InternalError


class KernelDriver(Protocol):
    """What `cubin.py` needs of a driver. device_type: torch's name of the devices it drives."""

    device_type: str

    def version(self) -> int:
        """CUDA version the driver supports, 1000 * major + 10 * minor."""
        ...

    def load_library(self, image: bytes) -> Any: ...

    def get_function(self, library: Any, symbol: str) -> Any:
        """Handle for `launch`. Needs a current context; moves the code to the device."""
        ...

    def launch(
        self, function: Any, grid: int, threads: int, shared: int, cuda_stream: int, slots: int
    ) -> None:
        """Enqueue `grid` x 1 x 1 blocks. `slots`: address of an array of pointers to the parameter values."""
        ...

    def unload(self, library: Any) -> None: ...


class CudaDriver:
    """The real one. Every return code is checked.

    Raises: CapabilityError: there is no driver here, or no `cuda.bindings`.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver

            self._api = driver
            self._success = driver.CUresult.CUDA_SUCCESS
            initialised = driver.cuInit(0)
        except (ImportError, RuntimeError) as cause:  # RuntimeError: libcuda was not found
            raise CapabilityError(
                "precompiled kernels need a CUDA driver",
                found=str(cause),
                hint="the eager operators run instead",
            ) from cause
        self._check("cuInit", initialised)

    def version(self) -> int:
        return int(self._check("cuDriverGetVersion", self._api.cuDriverGetVersion()))

    def load_library(self, image: bytes) -> Any:
        result = self._api.cuLibraryLoadData(image, None, None, 0, None, None, 0)
        return self._check("cuLibraryLoadData", result)

    def get_function(self, library: Any, symbol: str) -> Any:
        result = self._api.cuLibraryGetKernel(library, symbol.encode())
        kernel = self._check("cuLibraryGetKernel", result)
        return self._check("cuKernelGetFunction", self._api.cuKernelGetFunction(kernel))

    def launch(
        self, function: Any, grid: int, threads: int, shared: int, cuda_stream: int, slots: int
    ) -> None:
        result = self._api.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, shared, cuda_stream, slots, 0)
        if result[0] != self._success:
            self._check("cuLaunchKernel", result)

    def unload(self, library: Any) -> None:
        self._check("cuLibraryUnload", self._api.cuLibraryUnload(library))

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if code != self._success:
            raise InternalError("CUDA driver call failed", where=call, found=str(code))
        return values[0] if values else None
