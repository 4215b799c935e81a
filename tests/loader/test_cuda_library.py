"""The driver through ctypes: streams and memory, with the C types of cuda.h written out again."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import pytest

from loader.cuda_library import _ARGUMENTS, CudaLibrary
from loader.errors import CapabilityError, InternalError

STREAM, MEMORY = 0x7F00_DEAD_BEE0, 0x7F12_3456_7800  # wider than an int


class FakeLibrary:
    """Those functions; `refuse`: one that fails. The others are there and not called."""

    def __init__(self, refuse: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        functions: dict[str, Any] = {
            "cuStreamCreate": ((POINTER(c_void_p), c_uint), self.create),
            "cuStreamSynchronize": ((c_void_p,), lambda stream: self.note("synchronize", stream)),
            "cuStreamDestroy_v2": ((c_void_p,), lambda stream: self.note("destroy", stream)),
            "cuMemAlloc_v2": ((POINTER(c_uint64), c_size_t), self.alloc),
            "cuMemFree_v2": ((c_uint64,), lambda pointer: self.note("free", pointer)),
        }
        self._name = ctypes.create_string_buffer(b"CUDA_ERROR_OUT_OF_MEMORY")
        for name in _ARGUMENTS:
            arguments, call = functions.get(name, ((), lambda *_: 0))
            self.__dict__[name] = ctypes.CFUNCTYPE(c_int, *arguments)(
                (lambda *_: 2) if name == refuse else call
            )
        self.cuGetErrorName = ctypes.CFUNCTYPE(c_int, c_int, POINTER(c_void_p))(self.name)

    def note(self, *call: Any) -> int:
        self.calls.append(call)
        return 0

    def create(self, out: Any, flags: int) -> int:
        out[0] = STREAM
        return self.note("create", flags)

    def alloc(self, out: Any, size: int) -> int:
        out[0] = MEMORY
        return self.note("alloc", size)

    def name(self, code: int, out: Any) -> int:
        out[0] = ctypes.addressof(self._name)
        return 0


def test_streams_and_memory_are_those_of_the_driver() -> None:
    fake = FakeLibrary()
    library = CudaLibrary(fake)
    stream, pointer = library.stream_create(), library.alloc(5 << 30)
    library.stream_synchronize(stream)
    library.stream_destroy(stream)
    library.free(pointer)
    assert (stream, pointer) == (STREAM, MEMORY)
    assert fake.calls == [
        ("create", 1), ("alloc", 5 << 30), ("synchronize", STREAM), ("destroy", STREAM), ("free", MEMORY),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["cuStreamCreate", "cuMemAlloc_v2"])
def test_a_call_that_fails_is_named(name: str) -> None:
    library = CudaLibrary(FakeLibrary(refuse=name))
    with pytest.raises(InternalError, match=f"{name} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        library.stream_create() if name == "cuStreamCreate" else library.alloc(1)


def test_a_driver_without_a_function_is_refused() -> None:
    fake = FakeLibrary()
    del fake.__dict__["cuMemSetAccess"]
    with pytest.raises(CapabilityError, match=r"no CUDA driver.*cuMemSetAccess"):
        CudaLibrary(fake)
