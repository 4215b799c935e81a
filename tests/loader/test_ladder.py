"""The same loads, failures and ends on every rung."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError
from loader.load_plan import plan_load
from loader.manifest import Manifest, read_manifest
from loader.options import StreamOptions
from loader.stream import WeightStream, start
from tests.fakes.driver import FakeDriver
from tests.loader.prepared import SMALL_ORDER, Prepared, write_prepared
from tests.loader.rungs import CHILD_RUNGS, RUNGS, Rung, raw_bytes


@pytest.fixture(params=RUNGS)
def rung(request: pytest.FixtureRequest) -> Iterator[Rung]:
    rung = Rung(request.param)
    yield rung
    rung.finish()


@pytest.fixture
def broken(tmp_path: Path, prepared: Prepared) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(prepared.directory, tmp_path / "m")
    return tmp_path / "m"


def expected(prepared: Prepared, manifest: Manifest) -> dict[str, bytes]:
    return {name: prepared.content[name] for name, t in manifest.tensors.items() if t.group in SMALL_ORDER}


def failure(stream: WeightStream) -> WorkerError:
    """What a waiter gets; the stream is closed afterwards."""
    with stream, pytest.raises(WorkerError) as caught:
        stream.wait_all()
    return caught.value


def failure_at_the_end(stream: WeightStream) -> WorkerError:
    """The failure of a check that follows the last chunk: asked for until it is there, one round trip each time."""
    caught: list[WorkerError] = []
    with stream:
        while not caught:
            try:
                _ = stream.rows_async("embed/table.weight", [0]).bytes
            except WorkerError as error:
                caught.append(error)
    return caught[0]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("verify", ["edges", "full"])
def test_bytes_are_the_files_bytes(rung: Rung, prepared: Prepared, manifest: Manifest, verify: str) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    with rung.start(plan, prepared.directory, verify=verify) as stream:
        found = rung.contents(stream)
        rows = stream.rows_async("embed/table.weight", [5, 5, 1]).bytes
        assert stream.path == rung.name[0]
        assert any(mark.name.startswith(f"path {rung.name[0]}") for mark in stream.marks())
        (hashed,) = [mark for mark in stream.marks() if mark.name == "hashed whole"]
    assert found == expected(prepared, manifest)
    table = prepared.content["embed/table.weight"]
    assert rows == table[240:288] * 2 + table[48:96]
    assert hashed.bytes == (plan.total_bytes if verify == "full" else 0)


def test_groups_are_complete_when_handed_out(rung: Rung, prepared: Prepared, manifest: Manifest) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    with rung.start(plan, prepared.directory, threads=3) as stream:
        for group in SMALL_ORDER:
            tensors = stream.tensors(group)
            if rung.driver is not None:
                rung.driver.caller.synchronize()
            for name, tensor in tensors.items():
                assert raw_bytes(tensor) == prepared.content[f"{group.partition('/')[0]}/{name}"]
        del tensors, tensor


def test_hold_is_released(rung: Rung, prepared: Prepared, manifest: Manifest) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096, hold="dit/blocks.1")
    with rung.start(plan, prepared.directory) as stream:
        stream.wait("dit/blocks.0")
        assert not stream.is_ready("dit/blocks.1")
        stream.release()
        assert rung.contents(stream) == expected(prepared, manifest)


@pytest.mark.parametrize("spec", ["short:100", "errno@2:2:EIO", "errno@0:1:ESTALE,errno@3:1:EAGAIN"])
def test_passing_trouble_is_invisible(rung: Rung, prepared: Prepared, manifest: Manifest, spec: str) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    with rung.start(plan, prepared.directory, storage_fault=spec) as stream:
        assert rung.contents(stream) == expected(prepared, manifest)
        retries = [mark.name for mark in stream.marks() if mark.name.startswith("retry")]
    assert len(retries) == spec.count("errno@") + (spec == "errno@2:2:EIO")


@pytest.mark.parametrize("name", ["U", "B"])
def test_slow_storage_gets_more_threads_than_there_are_slots(
    prepared: Prepared, manifest: Manifest, name: str
) -> None:
    """Every chunk takes 0.6 s; then more threads are wanted and are there, whatever they find to do."""
    rung = Rung(name)
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    slots = len(plan.chunks) - 1
    slow = ",".join(f"stall@{chunk}:0.6" for chunk in range(len(plan.chunks)))
    with rung.start(plan, prepared.directory, storage_fault=slow, ring_bytes=slots * 4096) as stream:
        assert rung.contents(stream) == expected(prepared, manifest)
        (grown,) = [mark.name for mark in stream.marks() if mark.name.startswith("storage is slow")]
        count = int(grown.removeprefix("storage is slow: ").split()[0])
        assert slots < count <= 4 * len(plan.chunks)
    rung.finish()


@pytest.mark.parametrize(
    ("spec", "kind", "texts"),
    [
        (
            "errno@2:9:EIO",
            InternalError,
            ["EIO", "weights/encoder-1.safetensors: encoder/layers.1.w", "after 4 attempts"],
        ),
        ("errno@2:9:EACCES", InternalError, ["EACCES", "after 1 attempts"]),
        ("truncate@7", ArtifactError, ["weights/dit-0.safetensors", "truncated", "end at byte"]),
    ],
    ids=["eio", "eacces", "truncated"],
)
def test_read_failures(
    rung: Rung, prepared: Prepared, manifest: Manifest, spec: str, kind: type[WorkerError], texts: list[str]
) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    error = failure(rung.start(plan, prepared.directory, storage_fault=spec))
    assert type(error) is kind
    assert all(text in str(error) for text in texts)


def test_truncated_file_is_named_with_its_end(rung: Rung, broken: Path, manifest: Manifest) -> None:
    """Not with the place that some thread was to read when it noticed."""
    tensor, path = manifest.tensors["dit/blocks.0.i"], broken / "weights/dit-0.safetensors"
    end = (manifest.files[tensor.file].data_start or 0) + tensor.offset + 5
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096, hold="dit/blocks.1")
    with rung.start(plan, broken) as stream:
        stream.wait("dit/blocks.0")
        os.truncate(path, end)
        stream.release()
        with pytest.raises(ArtifactError, match=f"dit/blocks.0.i.*end at byte {end};"):
            stream.wait_all()


@pytest.mark.parametrize("name", CHILD_RUNGS)
@pytest.mark.parametrize(("spec", "text"), [("kill@3", "killed by signal 9"), ("exit@3:7", "exit code 7")])
def test_dead_reader_is_an_internal_error(
    name: str, prepared: Prepared, manifest: Manifest, spec: str, text: str
) -> None:
    rung = Rung(name)
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    error = failure(rung.start(plan, prepared.directory, storage_fault=spec))
    assert type(error) is InternalError
    assert text in str(error)
    rung.finish()


def _missing_and_short(directory: Path) -> None:
    (directory / "weights/dit-0.safetensors").unlink()
    path = directory / "weights/encoder-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _head_flip(directory: Path) -> None:
    flip(directory / "weights/dit-0.safetensors", 4096)


def _inner_flip(directory: Path) -> None:
    flip(directory / "weights/dit-0.safetensors", 4096 + 4000)


def _table_flip(directory: Path) -> None:
    flip(directory / "weights/embed-0.safetensors", 4096)


@pytest.mark.parametrize(
    ("damage", "verify", "texts"),
    [
        (
            _missing_and_short,
            "edges",
            ["dit-0.safetensors: No such file", "encoder-1.safetensors", "bytes instead of"],
        ),
        (_head_flip, "edges", ["weights/dit-0.safetensors: dit/proj.weight", "digest"]),
        (_inner_flip, "full", ["weights/dit-0.safetensors: dit/proj.weight", "digest of bytes 4096..12288"]),
    ],
    ids=["P05-files", "P02-head", "P03-inner"],
)
def test_damaged_directory(
    rung: Rung, broken: Path, damage: Callable[[Path], None], verify: str, texts: list[str]
) -> None:
    damage(broken)
    plan = plan_load(read_manifest(broken), SMALL_ORDER, chunk_bytes=4096)
    error = failure(rung.start(plan, broken, verify=verify))
    assert type(error) is ArtifactError
    assert all(text in str(error) for text in texts), str(error)


def test_inner_flip_passes_under_edges(rung: Rung, broken: Path) -> None:
    _inner_flip(broken)
    plan = plan_load(read_manifest(broken), SMALL_ORDER, chunk_bytes=4096)
    with rung.start(plan, broken) as stream:
        assert rung.contents(stream)


def test_damaged_table_is_found_by_its_edges(rung: Rung, broken: Path) -> None:
    _table_flip(broken)
    with rung.start(plan_load(read_manifest(broken), SMALL_ORDER), broken) as stream:
        request = stream.rows_async("embed/table.weight", [0])
        with pytest.raises(ArtifactError, match=r"embed-0\.safetensors: embed/table\.weight"):
            _ = request.bytes


def test_file_that_changes_size_during_the_load(rung: Rung, broken: Path) -> None:
    plan = plan_load(read_manifest(broken), SMALL_ORDER, chunk_bytes=4096, hold="dit/prelude")
    stream = rung.start(plan, broken)
    stream.wait("encoder/layers.1")
    with (broken / "weights/encoder-1.safetensors").open("ab") as file:
        file.write(b"x")
    stream.release()
    error = failure_at_the_end(stream)
    assert type(error) is ArtifactError
    assert "encoder-1.safetensors: size changed" in str(error)


def test_fault_hook_needs_its_variable(
    rung: Rung, prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLDFRAME_ALLOW_STORAGE_FAULT")
    error = failure(rung.start(plan_load(manifest, SMALL_ORDER), prepared.directory, storage_fault="short:1"))
    assert "fault injection is not allowed" in str(error)


def test_deadline_states_bytes_rate_and_expected_time(
    rung: Rung, prepared: Prepared, manifest: Manifest
) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    error = failure(rung.start(plan, prepared.directory, storage_gbps=1e-5, max_load_s=0.3))
    assert type(error) is CapabilityError
    assert "GB/s, expected time" in str(error)


@pytest.mark.parametrize("spec", ["", "stall@1:0.05", "stall@9:0.05"])
def test_close_at_any_time(rung: Rung, prepared: Prepared, manifest: Manifest, spec: str) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    stream = rung.start(plan, prepared.directory, storage_fault=spec)
    caught: list[WorkerError] = []

    def wait() -> None:
        try:
            stream.wait_all()
        except WorkerError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    if spec.startswith("stall@9"):
        stream.wait(SMALL_ORDER[0])
    stream.close()
    waiter.join()
    stream.close()
    with pytest.raises(InternalError, match="closed"):
        stream.wait(SMALL_ORDER[0])


def test_forgotten_component_lives_as_long_as_its_views(
    rung: Rung, prepared: Prepared, manifest: Manifest
) -> None:
    with rung.start(plan_load(manifest, SMALL_ORDER), prepared.directory) as stream:
        kept = stream.tensor("encoder/layers.0.w")
        stream.forget("encoder")
        stream.forget("encoder")
        if rung.driver is not None:
            rung.driver.caller.synchronize()
        assert raw_bytes(kept) == prepared.content["encoder/layers.0.w"]
        with pytest.raises(InternalError, match="given up"):
            stream.tensor("encoder/layers.0.w")
        if rung.driver is not None:
            sizes = [arena.bytes for arena in stream.plan.arenas]
            assert rung.driver.memory_used() == rung.device_bytes(*sizes)
        del kept
        if rung.driver is not None:
            assert rung.driver.memory_used() == rung.device_bytes(stream.plan.arenas[1].bytes)
        assert stream.tensor("dit/scale").shape == ()
        with pytest.raises(InternalError, match="component is not in the plan"):
            stream.forget("embed")


def test_every_caller_gets_the_first_failure(rung: Rung, prepared: Prepared, manifest: Manifest) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    with rung.start(plan, prepared.directory, storage_fault="errno@2:1:EACCES") as stream:
        with pytest.raises(InternalError) as first:
            stream.wait_all()
        for call in (
            lambda: stream.tensors("dit/prelude"),
            lambda: stream.tensor("dit/scale"),
            stream.state_dict,
        ):
            with pytest.raises(InternalError) as caught:
                call()
            assert caught.value is first.value
        with pytest.raises(InternalError):
            _ = stream.rows_async("embed/table.weight", [0]).bytes
        assert stream.failure is first.value
        assert not stream.is_ready("dit/prelude")


# -- CUDA only -----------------------------------------------------------------------------------------------------


def device_stream(prepared: Prepared, manifest: Manifest, driver: FakeDriver, **options: Any) -> WeightStream:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    return start(plan, prepared.directory, device="cuda", options=StreamOptions(driver=driver, **options))


def contents(stream: WeightStream, driver: FakeDriver) -> dict[str, bytes]:
    state = stream.state_dict()
    driver.caller.synchronize()
    return {name: raw_bytes(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("pin_limit", "host_alloc_allowed", "path", "text"),
    [(None, True, "A", "first choice"), (0, True, "C", "fake limit"), (0, False, "D", "no pinned memory")],
    ids=["pinned", "driver-memory", "pageable"],
)
def test_refused_registration_falls_down_the_ladder(
    prepared: Prepared,
    manifest: Manifest,
    pin_limit: int | None,
    host_alloc_allowed: bool,
    path: str,
    text: str,
) -> None:
    driver = FakeDriver(pin_limit=pin_limit, host_alloc_allowed=host_alloc_allowed)
    with device_stream(prepared, manifest, driver, ring_bytes=16384) as stream:
        request = stream.rows_async("embed/table.weight", [9])
        assert contents(stream, driver) == expected(prepared, manifest)
        assert request.bytes == prepared.content["embed/table.weight"][432:480]
        assert stream.path == path
        assert any(mark.name.startswith(f"path {path}") and text in mark.name for mark in stream.marks())
    driver.finish()


@pytest.mark.parametrize("limit", [4096, 8192, 12288])
def test_partly_refused_registration_shrinks_the_ring(
    prepared: Prepared, manifest: Manifest, limit: int
) -> None:
    driver = FakeDriver(pin_limit=limit)
    with device_stream(prepared, manifest, driver, ring_bytes=16384) as stream:
        assert contents(stream, driver) == expected(prepared, manifest)
        assert any(f"pinned {limit} of 16384 bytes" in mark.name for mark in stream.marks())
    assert driver.largest_pinned == limit
    driver.finish()


def test_forced_path_does_not_fall(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver(host_alloc_allowed=False)
    error = failure(device_stream(prepared, manifest, driver, path="C"))
    assert type(error) is CapabilityError
    driver.finish()


def test_short_device_memory_names_both_numbers(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver(device_bytes=60_000)
    error = failure(device_stream(prepared, manifest, driver))
    assert type(error) is CapabilityError
    assert "found 60000 of 60000 bytes free" in str(error)
    assert "61440 bytes of arenas" in str(error)
    driver.finish()


def test_no_device_is_a_missing_capability(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver(has_device=False)
    assert type(failure(device_stream(prepared, manifest, driver))) is CapabilityError
    driver.finish()


@pytest.mark.parametrize("copy", [1, 5, 11])
def test_sticky_error_ends_the_load(prepared: Prepared, manifest: Manifest, copy: int) -> None:
    driver = FakeDriver(fail_copy=copy)
    # a broken context keeps its ring mapped on purpose; the private ring of path B has no descriptor to show for it
    error = failure(device_stream(prepared, manifest, driver, ring_bytes=8192, path="B"))
    assert type(error) is InternalError
    assert "sticky error" in str(error)
    driver.abandon()


@pytest.mark.parametrize("seed", range(20))
def test_random_loads_never_reuse_a_slot_too_early(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    layout = {
        name: [
            {
                f"{name}/g{file}.{group}": {
                    f"t{file}.{group}.{i}": ("U8", (rng.randrange(9000),)) for i in range(rng.randint(1, 4))
                }
                for group in range(rng.randint(1, 4))
            }
            for file in range(rng.randint(1, 2))
        ]
        for name in ("a", "b")[: rng.randint(1, 2)]
    }
    prepared = write_prepared(tmp_path, layout, orders={}, chunk_bytes=4096 * rng.randint(1, 4), seed=seed)
    manifest = read_manifest(tmp_path)
    order = rng.sample(sorted(manifest.groups), len(manifest.groups))
    plan = plan_load(manifest, order, chunk_bytes=4096 * rng.randint(1, 3))
    driver = FakeDriver(seed=seed, max_delay_s=rng.choice([0.0, 0.0005, 0.002]))
    options = StreamOptions(
        driver=driver,
        path="UABCD"[seed % 5],
        uploader_driver="tests.fakes.remote_driver:slow",
        threads=rng.randint(1, 6),
        ring_bytes=plan.chunk_bytes * rng.randint(1, 5),
    )
    with start(plan, tmp_path, device="cuda", options=options) as stream:
        assert contents(stream, driver) == prepared.content, f"seed {seed}"
    driver.finish()


def test_views_keep_their_arena_alive(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    with device_stream(prepared, manifest, driver) as stream:
        tensor = stream.tensor("dit/proj.weight")
        driver.caller.synchronize()
    digest = hashlib.sha256(raw_bytes(tensor)).hexdigest()
    assert digest == hashlib.sha256(prepared.content["dit/proj.weight"]).hexdigest()
    del tensor
    driver.finish()
