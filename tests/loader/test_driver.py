"""The real driver interface on a machine without a GPU, and on one with it."""

from __future__ import annotations

import ctypes
import inspect
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from loader.arena import DeviceArena
from loader.cuda_library import CudaLibrary
from loader.driver import CudaDriver, Driver
from loader.errors import CapabilityError
from loader.load_plan import plan_load
from loader.manifest import Manifest
from loader.options import StreamOptions
from loader.stream import start
from loader.uploader_link import spawn_uploader
from tests.fakes.driver import FakeDriver
from tests.loader.prepared import SMALL_ORDER, Prepared
from tests.loader.rungs import raw_bytes

HAS_GPU = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
CALLS = [
    name for name, value in vars(Driver).items() if inspect.isfunction(value) and not name.startswith("_")
]


@pytest.mark.parametrize("name", CALLS)
def test_fake_and_real_driver_have_the_same_calls(name: str) -> None:
    wanted = list(inspect.signature(getattr(Driver, name)).parameters)
    for implementation in (CudaDriver, FakeDriver):
        assert list(inspect.signature(getattr(implementation, name)).parameters) == wanted


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
def test_machine_without_a_gpu_is_named(prepared: Prepared, manifest: Manifest) -> None:
    with (
        start(plan_load(manifest, SMALL_ORDER), prepared.directory, device="cuda") as stream,
        pytest.raises(CapabilityError, match="CUDA"),
    ):
        stream.wait_all()


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["U", "A", "B", "C", "D"])
@pytest.mark.parametrize("verify", ["edges", "full"])
def test_bytes_reach_a_real_device(prepared: Prepared, manifest: Manifest, path: str, verify: str) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    options = StreamOptions(path=path, verify=verify, ring_bytes=16384)
    with start(plan, prepared.directory, device="cuda", options=options) as stream:
        state = {name: raw_bytes(tensor.cpu()) for name, tensor in stream.state_dict().items()}
        rows = stream.rows("embed/table.weight", [3, 1])
        assert (rows.device.type, stream.path) == ("cuda", path)
    assert state == {name: prepared.content[name] for name in state}
    assert raw_bytes(rows.cpu()[:1]) == prepared.content["embed/table.weight"][144:192]
    assert torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.parametrize("is_spawned", [False, True], ids=["at-start", "before-the-plan"])
def test_memory_of_an_uploader_process_outlives_it(
    prepared: Prepared, manifest: Manifest, is_spawned: bool
) -> None:
    """The tensors are used, and freed, by this process's kernels when the process that allocated them is gone."""
    uploader = spawn_uploader("cuda") if is_spawned else None
    with start(
        plan_load(manifest, SMALL_ORDER), prepared.directory, device="cuda", uploader=uploader
    ) as stream:
        stream.wait_all()
        rows = stream.rows(
            "embed/table.weight", [7]
        )  # a round trip through the reader, after the process's end
        weight = stream.tensor("dit/proj.weight")
        names = [mark.name for mark in stream.marks()]
    assert stream.path == "U"
    assert not any("refused" in name or name.startswith("warning") for name in names), names
    assert raw_bytes(rows.cpu()) == prepared.content["embed/table.weight"][336:384]
    bits = weight.view(torch.int32)  # the bytes are random: some are NaNs
    assert torch.equal((bits + 1).cpu(), bits.cpu() + 1)
    assert raw_bytes(weight.cpu()) == prepared.content["dit/proj.weight"]
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info()  # after the first kernels, whose code takes memory itself
    del weight, bits
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] > free_before


@pytest.mark.gpu
def test_ctypes_and_bindings_map_the_same_memory() -> None:
    driver, library = CudaDriver(), CudaLibrary()
    context = driver.retain_context(0)
    assert library.retain_context(0) == context
    driver.use_context(context)
    pointer, mapped, fd = driver.shared_alloc(3 << 20, 0)
    views = [library.shared_import(fd, mapped, 0), driver.shared_import(fd, mapped, 0)]
    os.close(fd)
    source = bytes(range(256)) * 4096
    stream = driver.stream_create()
    memory = ctypes.create_string_buffer(source, len(source))
    driver.copy_async(pointer, ctypes.addressof(memory), len(source), stream)
    driver.stream_synchronize(stream)
    driver.stream_destroy(stream)
    driver.shared_free(pointer, mapped)
    for view in views:
        arena = DeviceArena("view", len(source), view, library, partial(library.shared_free, view, mapped))
        assert raw_bytes(torch.as_tensor(arena.expose(), device="cuda").cpu()) == source
        del arena
