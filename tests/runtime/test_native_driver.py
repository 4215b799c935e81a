"""The driver through ctypes: every call with the arguments of the C interface, against a library made of callbacks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from typing import Any

import pytest

from loader.errors import CapabilityError, InternalError
from runtime.native_driver import NativeDriver

IMAGE = b"\x7fELF\x00with\x00zeros"
REFUSED = 209  # CUDA_ERROR_NO_BINARY_FOR_GPU


class FakeLibrary:
    """The functions of libcuda with their C types, written out again here."""

    def __init__(self, missing: str = "", refuse: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._refuse = refuse
        handles, numbers = POINTER(c_void_p), POINTER(c_int)
        uints = (c_uint,) * 7
        functions: dict[str, tuple[Callable[..., int], Any]] = {
            "cuInit": (self.init, (c_uint,)),
            "cuDriverGetVersion": (self.version, (numbers,)),
            "cuDeviceGet": (self.device, (numbers, c_int)),
            "cuDeviceGetAttribute": (self.attribute, (numbers, c_int, c_int)),
            "cuLibraryLoadData": (
                self.load, (handles, c_void_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
            ),
            "cuLibraryGetKernel": (self.kernel, (handles, c_void_p, c_char_p)),
            "cuKernelGetFunction": (self.function, (handles, c_void_p)),
            "cuLaunchKernel": (self.launch, (c_void_p, *uints, c_void_p, c_void_p, c_void_p)),
            "cuLibraryUnload": (self.unload, (c_void_p,)),
            "cuGetErrorName": (self.error_name, (c_int, POINTER(c_void_p))),
        }  # fmt: skip
        self._name = ctypes.create_string_buffer(b"CUDA_ERROR_NO_BINARY_FOR_GPU")
        for name, (call, arguments) in functions.items():
            if name != missing:
                setattr(self, name, ctypes.CFUNCTYPE(c_int, *arguments)(self._refusing(name, call)))

    def _refusing(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        return (lambda *_: REFUSED) if name == self._refuse else call

    def init(self, flags: int) -> int:
        self.calls.append(("init", flags))
        return 0

    def version(self, out: Any) -> int:
        out[0] = 13000
        return 0

    def device(self, out: Any, ordinal: int) -> int:
        out[0] = 5 + ordinal
        return 0

    def attribute(self, out: Any, name: int, device: int) -> int:
        out[0] = {75: 9, 76: 0}[name] if device == 5 else -1
        return 0

    def load(self, out: Any, code: int, *options: int | None) -> int:
        self.calls.append(("load", ctypes.string_at(code, len(IMAGE)), options))
        out[0] = 2**40 + 1
        return 0

    def kernel(self, out: Any, library: int, name: bytes) -> int:
        self.calls.append(("kernel", library, name))
        out[0] = 2**40 + 2
        return 0

    def function(self, out: Any, kernel: int) -> int:
        self.calls.append(("function", kernel))
        out[0] = 2**40 + 3
        return 0

    def launch(self, *arguments: int | None) -> int:
        self.calls.append(("launch", *arguments))
        return 0

    def unload(self, library: int) -> int:
        self.calls.append(("unload", library))
        return 0

    def error_name(self, code: int, out: Any) -> int:
        out[0] = ctypes.addressof(self._name) if code == REFUSED else None
        return 0


def test_every_call_has_the_arguments_of_the_interface() -> None:
    library = FakeLibrary()
    driver = NativeDriver(library)
    assert (driver.version(), driver.capability(), driver.device_type) == (13000, (9, 0), "cuda")
    loaded = driver.load_library(IMAGE)
    function = driver.get_function(loaded, "kernel_name")
    driver.launch(function, 7, 128, 4096, 2**41, 2**42)
    driver.unload(loaded)
    base = 2**40
    assert library.calls == [
        ("init", 0),
        ("load", IMAGE, (None, None, 0, None, None, 0)),
        ("kernel", base + 1, b"kernel_name"),
        ("function", base + 2),
        ("launch", base + 3, 7, 1, 1, 128, 1, 1, 4096, 2**41, 2**42, None),
        ("unload", base + 1),
    ]


def test_the_legacy_stream_is_a_null_pointer() -> None:
    library = FakeLibrary()
    NativeDriver(library).launch(2**40, 1, 32, 0, 0, 2**42)
    assert library.calls[-1] == ("launch", 2**40, 1, 1, 1, 32, 1, 1, 0, None, 2**42, None)


@pytest.mark.parametrize("name", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"])
def test_what_the_driver_refuses_is_named(name: str) -> None:
    driver = NativeDriver(FakeLibrary(refuse=name))
    with pytest.raises(InternalError, match=f"{name}.*CUDA_ERROR_NO_BINARY_FOR_GPU"):
        driver.get_function(driver.load_library(IMAGE), "kernel_name")


def test_a_refused_launch_is_named() -> None:
    driver = NativeDriver(FakeLibrary(refuse="cuLaunchKernel"))
    with pytest.raises(InternalError, match=r"cuLaunchKernel.*NO_BINARY"):
        driver.launch(1, 1, 1, 0, 0, 8)


@pytest.mark.parametrize(
    "library",
    [FakeLibrary(missing="cuLibraryLoadData"), FakeLibrary(refuse="cuInit")],
    ids=["old", "no device"],
)
def test_without_a_driver_that_can_it_says_so(library: FakeLibrary) -> None:
    with pytest.raises(CapabilityError, match="precompiled kernels need a CUDA driver"):
        NativeDriver(library)
