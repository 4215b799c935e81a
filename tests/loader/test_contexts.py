"""Streams of one device in a thread that works on another: calls are made in their device's context, and the thread keeps its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest

from loader.arena import import_arena
from loader.cuda_library import _ARGUMENTS, CudaLibrary
from loader.driver import CudaDriver, Importer, InContext
from loader.load_plan import plan_load
from loader.manifest import Manifest
from loader.options import StreamOptions
from loader.stream import start
from tests.fakes.driver import CONTEXT, FakeDriver
from tests.loader.prepared import SMALL_ORDER, Prepared
from tests.loader.rungs import raw_bytes

OURS, ANOTHER = 0xB1, 0xA0


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("path", ["U", "A", "B", "C", "D"])
def test_a_stream_is_used_from_a_thread_of_any_device(
    prepared: Prepared, manifest: Manifest, path: str, current: int
) -> None:
    driver = FakeDriver()
    driver.use_context(driver.retain_context(current))
    remote = "tests.fakes.remote_driver:plain" if path == "U" else ""
    options = StreamOptions(driver=driver, uploader_driver=remote, path=path, ring_bytes=16384)
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    with start(plan, prepared.directory, device="cuda:1", options=options) as stream:
        state = stream.state_dict()
        driver.caller.synchronize()
        found = {name: raw_bytes(tensor) for name, tensor in state.items()}
        assert found == {name: prepared.content[name] for name in state}
        stream.forget("encoder")
    assert driver.current_context == CONTEXT + current
    del state, stream
    driver.finish()
    assert driver.current_context == CONTEXT + current


def test_a_thread_without_a_context_gets_the_streams(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    options = StreamOptions(driver=driver, path="A", ring_bytes=16384)
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    with start(plan, prepared.directory, device="cuda:1", options=options) as stream:
        stream.wait_all()
        assert driver.current_context == CONTEXT + 1
    driver.finish()


class FakeCuda:
    """The calls about contexts, of one thread. `calls`: those that change something, and synchronisations where they happen."""

    def __init__(self, current: int) -> None:
        self.stack = [current] if current else []
        self.calls: list[tuple[str, int]] = []

    @property
    def current(self) -> int:
        return self.stack[-1] if self.stack else 0

    def set(self, context: int) -> int:
        self.stack = [*self.stack[:-1], context]
        return self.note("set", context)

    def push(self, context: int) -> int:
        self.stack.append(context)
        return self.note("push", context)

    def pop(self) -> int:
        return self.note("pop", self.stack.pop())

    def note(self, name: str, context: int) -> int:
        self.calls.append((name, context))
        return 0

    def bindings(self) -> CudaDriver:
        driver = CudaDriver.__new__(CudaDriver)
        driver._cu = SimpleNamespace(
            CUcontext=int,
            cuCtxGetCurrent=lambda: (0, self.current),
            cuCtxSetCurrent=lambda context: (self.set(context),),
            cuCtxPushCurrent=lambda context: (self.push(context),),
            cuCtxPopCurrent=lambda: (self.pop(), 0),
        )
        return driver

    def library(self) -> CudaLibrary:
        def current(out: Any) -> int:
            out[0] = self.current
            return 0

        functions: dict[str, tuple[tuple[Any, ...], Callable[..., int]]] = {
            "cuCtxGetCurrent": ((POINTER(c_void_p),), current),
            "cuCtxSetCurrent": ((c_void_p,), self.set),
            "cuCtxPushCurrent_v2": ((c_void_p,), self.push),
            "cuCtxPopCurrent_v2": ((POINTER(c_void_p),), lambda _: self.pop()),
            "cuCtxSynchronize": ((), lambda: self.note("synchronize", self.current)),
        }
        library = SimpleNamespace()
        for name in _ARGUMENTS:
            arguments, call = functions.get(name, ((), lambda *_: 0))
            setattr(library, name, ctypes.CFUNCTYPE(c_int, *arguments)(call))
        return CudaLibrary(library)


@pytest.mark.parametrize("make", [FakeCuda.bindings, FakeCuda.library])
@pytest.mark.parametrize(
    ("current", "calls", "after"),
    [
        (0, [("set", OURS)], OURS),
        (OURS, [], OURS),
        (ANOTHER, [("push", OURS), ("pop", OURS)], ANOTHER),
    ],
    ids=["none", "ours", "another"],
)
def test_another_context_is_put_behind_and_comes_back(
    make: Callable[[FakeCuda], Importer], current: int, calls: list[tuple[str, int]], after: int
) -> None:
    cuda = FakeCuda(current)
    with InContext(make(cuda), OURS):
        assert cuda.current == OURS
    assert cuda.calls == calls
    assert cuda.current == after


def test_the_context_comes_back_after_a_failure() -> None:
    cuda = FakeCuda(ANOTHER)
    with pytest.raises(ValueError, match="inside"), InContext(cuda.library(), OURS):
        raise ValueError("inside")
    assert cuda.current == ANOTHER


def test_the_last_view_of_imported_memory_waits_for_its_own_device() -> None:
    cuda = FakeCuda(ANOTHER)
    arena = import_arena("files", 4096, 65536, 3, cuda.library(), 1, OURS)
    del arena
    assert cuda.calls == [("push", OURS), ("synchronize", OURS), ("pop", OURS)]
    assert cuda.current == ANOTHER
