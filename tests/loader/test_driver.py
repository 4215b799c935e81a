"""The real driver interface on a machine without a GPU, and on one with it."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import pytest
import torch

from loader.driver import CudaDriver, Driver
from loader.errors import CapabilityError
from loader.load_plan import plan_load
from loader.manifest import Manifest
from loader.options import StreamOptions
from loader.stream import start
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
@pytest.mark.parametrize("path", ["A", "B", "C", "D"])
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
