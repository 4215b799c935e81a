"""The whole path on the CPU: files → reader → host arenas → torch views."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.errors import ArtifactError, CapabilityError, InternalError
from loader.load_plan import plan_load
from loader.manifest import Manifest, read_manifest
from loader.options import StreamOptions
from loader.reader_link import spawn_reader
from loader.stream import WeightStream, start
from loader.torch_api import torch_dtype
from loader.uploader_link import spawn_uploader
from tests.loader.prepared import SMALL_ORDER, Prepared, write_prepared
from tests.loader.rungs import Rung

READERS = ["child", "threads"]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def begin(prepared: Prepared, manifest: Manifest, **options: Any) -> WeightStream:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    return start(plan, prepared.directory, options=StreamOptions(**options))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("verify", ["edges", "full", "auto"])
def test_every_tensor_arrives_bit_for_bit(
    prepared: Prepared, manifest: Manifest, reader: str, verify: str
) -> None:
    with begin(prepared, manifest, reader=reader, verify=verify) as stream:
        state = stream.state_dict()
    assert set(state) == {name for name, record in manifest.tensors.items() if record.group in SMALL_ORDER}
    for name, tensor in state.items():
        record = manifest.tensors[name]
        assert tensor.dtype == torch_dtype(record.dtype)
        assert tuple(tensor.shape) == record.shape
        assert raw_bytes(tensor) == prepared.content[name]


def test_groups_hand_out_local_names_and_views_of_one_arena(prepared: Prepared, manifest: Manifest) -> None:
    with begin(prepared, manifest) as stream:
        block = stream.tensors("dit/blocks.0")
        again = stream.tensors("dit/blocks.0")
        other = stream.tensor("dit/blocks.1.w")
    assert list(block) == ["blocks.0.w", "blocks.0.i"]
    assert block["blocks.0.w"] is again["blocks.0.w"]
    assert block["blocks.0.w"].untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_views_outlive_the_stream(prepared: Prepared, manifest: Manifest) -> None:
    with begin(prepared, manifest) as stream:
        tensor = stream.tensor("dit/proj.weight")
    assert raw_bytes(tensor) == prepared.content["dit/proj.weight"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("rows", [[3], [7, 0, 7, 49], list(range(49, -1, -1)), []])
def test_rows_come_in_the_order_asked_for(
    prepared: Prepared, manifest: Manifest, reader: str, rows: list[int]
) -> None:
    with begin(prepared, manifest, reader=reader) as stream:
        request = stream.rows_async("embed/table.weight", rows)
        data = prepared.content["embed/table.weight"]
        assert request.bytes == b"".join(data[row * 48 : row * 48 + 48] for row in rows)
        tensor = request.tensor()
    assert (tuple(tensor.shape), tensor.dtype) == ((len(rows), 24), torch.float16)


def test_many_gathers_at_once(prepared: Prepared, manifest: Manifest) -> None:
    data = prepared.content["embed/table.weight"]
    with begin(prepared, manifest) as stream:
        requests = [stream.rows_async("embed/table.weight", [i % 50, (i * 7) % 50]) for i in range(40)]
        for i, request in enumerate(requests):
            assert request.bytes[:48] == data[(i % 50) * 48 : (i % 50) * 48 + 48]


def test_rows_outside_the_table_are_refused(prepared: Prepared, manifest: Manifest) -> None:
    with begin(prepared, manifest) as stream:
        with pytest.raises(InternalError, match=r"found \[50, -1\]; allowed: 0\.\.49"):
            stream.rows("embed/table.weight", [1, 50, -1])
        with pytest.raises(InternalError, match="not a gathered table"):
            stream.rows("dit/proj.weight", [0])


def test_reader_may_be_spawned_before_the_plan(prepared: Prepared, manifest: Manifest) -> None:
    reader = spawn_reader()
    plan = plan_load(manifest, SMALL_ORDER)
    with start(plan, prepared.directory, reader=reader) as stream:
        assert raw_bytes(stream.tensor("dit/proj.weight")) == prepared.content["dit/proj.weight"]


def test_reader_spawned_by_a_thread_outlives_it(prepared: Prepared, manifest: Manifest) -> None:
    found: list[WeightStream] = []
    thread = threading.Thread(target=lambda: found.append(begin(prepared, manifest)))
    thread.start()
    thread.join()
    with found[0] as stream:
        assert stream.rows("embed/table.weight", [1]).shape == (1, 24)
        assert raw_bytes(stream.tensor("dit/scale")) == prepared.content["dit/scale"]


@pytest.mark.parametrize("reader", READERS)
def test_held_groups_wait_for_release(prepared: Prepared, manifest: Manifest, reader: str) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096, hold="dit/blocks.0")
    with start(plan, prepared.directory, options=StreamOptions(reader=reader)) as stream:
        stream.wait("dit/prelude")
        stream.rows("embed/table.weight", [0])  # a whole round trip later …
        assert not stream.is_ready("dit/blocks.0")
        stream.release()
        stream.release()
        stream.wait_all()
        assert stream.is_ready("dit/blocks.0")


def test_marks_add_up(prepared: Prepared, manifest: Manifest) -> None:
    with begin(prepared, manifest) as stream:
        stream.wait_all()
        marks = stream.marks()
    groups = {mark.name[6:]: mark for mark in marks if mark.name.startswith("group ")}
    assert {name: mark.bytes for name, mark in groups.items()} == {
        g.name: g.bytes for g in stream.plan.groups
    }
    (whole,) = [mark for mark in marks if mark.name == "all weights"]
    assert whole.bytes == stream.plan.total_bytes
    for mark in groups.values():
        assert whole.start_ns <= mark.start_ns <= mark.end_ns <= whole.end_ns
    assert any(mark.name.startswith("path E, child") for mark in marks)


def test_closed_stream_refuses(prepared: Prepared, manifest: Manifest) -> None:
    stream = begin(prepared, manifest)
    stream.wait_all()
    stream.close()
    stream.close()
    for call in (
        lambda: stream.wait("dit/prelude"),
        stream.state_dict,
        lambda: stream.rows("embed/table.weight", [0]),
    ):
        with pytest.raises(InternalError, match="closed"):
            call()
    assert not stream.is_ready("dit/prelude")


@pytest.mark.parametrize("reader", READERS)
def test_close_in_the_middle_of_a_load_wakes_waiters(
    prepared: Prepared, manifest: Manifest, reader: str
) -> None:
    stream = begin(prepared, manifest, reader=reader, storage_fault="stall@3:1.0", threads=1)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            stream.wait("dit/blocks.1")
        except InternalError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    stream.close()
    waiter.join()
    assert "closed" in str(caught[0])


def test_unknown_names_are_refused(prepared: Prepared, manifest: Manifest) -> None:
    with begin(prepared, manifest) as stream:
        with pytest.raises(InternalError, match="group is not in the plan"):
            stream.wait("encoder/visual")
        with pytest.raises(InternalError, match="tensor is not in the plan"):
            stream.tensor("embed/table.weight")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"verify": "none"}, "verify"),
        ({"path": "F"}, "path"),
        ({"reader": "x"}, "reader"),
        ({"verify": []}, "verify"),
        ({"threads": 0}, "threads"),
        ({"threads": 2.5}, "threads"),
        ({"threads": True}, "threads"),
        ({"threads": 1 << 33}, "threads"),
        ({"sharers": None}, "sharers"),
        ({"storage_gbps": -1.0}, "storage_gbps"),
        ({"storage_gbps": float("inf")}, "storage_gbps"),
        ({"storage_gbps": "1"}, "storage_gbps"),
        ({"max_load_s": float("nan")}, "max_load_s"),
        ({"max_load_s": float("inf")}, "max_load_s"),
        ({"ring_bytes": 1000}, "ring_bytes"),
        ({"ring_bytes": 8192.0}, "ring_bytes"),
        ({"slot_bytes": 1 << 63}, "slot_bytes"),
        ({"part_bytes": 1 << 33}, "part_bytes"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"staging_slots": 1.0}, "staging_slots"),
        ({"reserve_bytes": -5}, "reserve_bytes"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(CapabilityError, match=rf"^{field}: .*found .*allowed: "):
        StreamOptions(**options)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", ""])
def test_unknown_device_is_refused(prepared: Prepared, manifest: Manifest, device: str) -> None:
    with pytest.raises(CapabilityError, match="device"):
        start(plan_load(manifest, SMALL_ORDER), prepared.directory, device=device)


# -- starts that fail: what is left is looked for by a fixture of this folder ----------------------------------------


def test_an_unknown_device_ends_the_processes_that_were_given(prepared: Prepared, manifest: Manifest) -> None:
    reader, uploader = spawn_reader(), spawn_uploader("cuda", "tests.fakes.remote_driver:plain")
    with pytest.raises(CapabilityError, match="unknown device"):
        start(
            plan_load(manifest, SMALL_ORDER),
            prepared.directory,
            device="gpu",
            reader=reader,
            uploader=uploader,
        )


@pytest.mark.parametrize("path", ["U", "A"])
def test_a_path_of_gpus_is_refused_on_the_cpu(prepared: Prepared, manifest: Manifest, path: str) -> None:
    with pytest.raises(CapabilityError, match=f"path: path needs a CUDA device; found {path}"):
        start(
            plan_load(manifest, SMALL_ORDER),
            prepared.directory,
            options=StreamOptions(path=path),
            reader=spawn_reader(),
        )


def test_a_reader_that_is_not_the_forced_one_is_replaced(prepared: Prepared, manifest: Manifest) -> None:
    options = StreamOptions(reader="threads")
    plan = plan_load(manifest, SMALL_ORDER)
    with start(plan, prepared.directory, options=options, reader=spawn_reader()) as stream:
        assert raw_bytes(stream.tensor("dit/proj.weight")) == prepared.content["dit/proj.weight"]
        assert any(mark.name == "path E, threads: forced" for mark in stream.marks())


@pytest.mark.parametrize("is_given", [False, True], ids=["own reader", "given reader"])
@pytest.mark.parametrize("name", ["E", "E-threads", "B", "A", "U"])
def test_a_start_without_a_thread_leaves_nothing(
    prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, name: str, is_given: bool
) -> None:
    begin_thread = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in ("coldframe-collector", "coldframe-uploader", "coldframe-upload"):
            raise RuntimeError("can't start new thread")
        begin_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rung = Rung(name)
    reader = spawn_reader() if is_given else None
    with pytest.raises(InternalError, match="can't start new thread") as caught:
        rung.start(plan_load(manifest, SMALL_ORDER, chunk_bytes=4096), prepared.directory, reader_link=reader)
    assert isinstance(caught.value.__cause__, RuntimeError)
    rung.finish()


@pytest.mark.parametrize("name", ["E", "A", "U"])
@pytest.mark.parametrize(
    ("problem", "kind"), [(RuntimeError("no"), InternalError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_an_interrupted_start_leaves_nothing(
    prepared: Prepared,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    problem: BaseException,
    kind: type[BaseException],
) -> None:
    def fail(fd: int, size: int) -> None:
        raise problem

    rung = Rung(name)
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(kind):
        rung.start(plan, prepared.directory)
    rung.finish()


def test_an_uploader_for_the_cpu_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"device: an uploader needs a CUDA device; found 'cpu'"):
        spawn_uploader("cpu")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(33, 64, bias=False)
        self.register_buffer("scale", torch.zeros((), dtype=torch.float64))


def test_assign_gives_a_meta_module_its_views(prepared: Prepared, manifest: Manifest) -> None:
    with torch.device("meta"):
        net = Net()
    with start(plan_load(manifest, ["dit/prelude"]), prepared.directory) as stream:
        stream.assign(net, "dit")
        assert net.proj.weight.data_ptr() == stream.tensor("dit/proj.weight").data_ptr()
    assert raw_bytes(net.proj.weight.detach()) == prepared.content["dit/proj.weight"]
    assert raw_bytes(net.scale) == prepared.content["dit/scale"]


def test_assign_lists_every_problem(prepared: Prepared, manifest: Manifest) -> None:
    net = torch.nn.ModuleDict({"proj": torch.nn.Linear(32, 64), "more": torch.nn.Linear(2, 2)})
    with (
        start(plan_load(manifest, ["dit/prelude"]), prepared.directory) as stream,
        pytest.raises(ArtifactError) as caught,
    ):
        stream.assign(net, "dit")
    for text in (
        "missing proj.bias",
        "missing more.weight",
        "left over scale",
        "proj.weight is torch.float32 [64, 33]",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("strict", [True, False])
def test_assign_refuses_two_tensors_of_one_name(prepared: Prepared, manifest: Manifest, strict: bool) -> None:
    net = torch.nn.Linear(64, 40, bias=False, device="meta", dtype=torch.bfloat16)
    with start(plan_load(manifest, ["encoder/layers.0"]), prepared.directory) as stream:
        with pytest.raises(ArtifactError, match=r"1: weight is layers\.0\.w and layers\.0\.b"):
            stream.assign(net, "encoder", strict=strict, rename=lambda name: "weight")
        assert net.weight.is_meta


GUARD = """
import sys, threading
from pathlib import Path
from loader import StreamOptions, plan_load, read_manifest, start
directory = Path(sys.argv[1])
stream = start(plan_load(read_manifest(directory), sys.argv[2:]), directory)
data = stream.rows_async("embed/table.weight", [1, 2]).bytes
stream.wait(sys.argv[2])
assert len(data) == 96
heavy = {"torch", "numpy", "triton", "cuda"} & set(sys.modules)
assert not heavy, heavy
stream.close()
"""


def test_bytes_move_without_torch(prepared: Prepared) -> None:
    subprocess.run([sys.executable, "-c", GUARD, str(prepared.directory), *SMALL_ORDER], check=True)


def test_plan_without_groups_is_complete_at_once(prepared: Prepared, manifest: Manifest) -> None:
    with start(plan_load(manifest, []), prepared.directory) as stream:
        assert stream.state_dict() == {}
        assert stream.rows("embed/table.weight", [3]).shape == (1, 24)


def test_one_digest_block_may_hold_many_chunks(tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path, chunk_bytes=1 << 20)
    plan = plan_load(read_manifest(tmp_path), ["encoder/layers.1", "dit/blocks.1"], chunk_bytes=4096)
    with start(plan, tmp_path, options=StreamOptions(verify="full")) as stream:
        for name, tensor in stream.state_dict().items():
            assert raw_bytes(tensor) == prepared.content[name]
