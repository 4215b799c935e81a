"""Coded weights: every rung unpacks to the original bytes, and names what does not."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader.codec.pieces import UNIT_BYTES
from loader.codec.unpack_plan import lanes_plus, unpack_plan_of
from loader.codec.unpacker import Unpacker
from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError
from loader.header import read_header
from loader.load_plan import LoadPlan, plan_load, recut
from loader.manifest import Manifest, read_manifest
from loader.options import StreamOptions
from loader.reader_link import spawn_reader
from loader.stream import start
from loader.upload_wire import decode_work, work_of
from loader.verify import start_rehash
from prepare.codec import CodecLimits
from tests.fakes.codec import FakeCodec
from tests.fakes.driver import CONTEXT, FakeDriver
from tests.loader.coded import LIMITS, coded_names, flip, write_coded
from tests.loader.prepared import SMALL_ORDER, Prepared
from tests.loader.rungs import Rung
from tests.loader.test_host_reader import Host, contents

DEVICE_RUNGS = ["U", "A", "B", "C", "D"]
MIXED = {
    "dit": [
        {
            "dit/a": {"a.w": ("BF16", (60, 100)), "a.s": ("F32", (9,)), "a.v": ("BF16", (41, 77))},
            "dit/b": {"b.small": ("BF16", (10, 10)), "b.e": ("I16", (0, 4))},
            "dit/c": {"c.w": ("F8_E4M3", (120, 90)), "c.f": ("F32", (50, 60))},
        }
    ]
}


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return write_coded(tmp_path_factory.mktemp("coded"))


@pytest.fixture(scope="module")
def coded_manifest(coded: Prepared) -> Manifest:
    return read_manifest(coded.directory)


def expected(prepared: Prepared, plan: LoadPlan) -> dict[str, bytes]:
    return {name: prepared.content[name] for name in plan.tensors}


# -- format and plan -------------------------------------------------------------------------------------------------


def test_large_tensors_are_coded_and_the_files_stay_safetensors(
    coded: Prepared, coded_manifest: Manifest
) -> None:
    from safetensors import safe_open

    assert coded_names(coded_manifest) == [
        "dit/blocks.0.w", "dit/blocks.1.w", "dit/proj.weight", "encoder/layers.0.w", "encoder/layers.1.w",
    ]  # fmt: skip
    for file in coded_manifest.files:
        if file.data_start is not None:
            with safe_open(coded.directory / file.path, "pt") as opened:
                assert len(list(opened.keys())) == len(read_header(coded.directory / file.path).tensors)
    raw = sum(len(coded.content[name]) for name in coded_names(coded_manifest))
    stored = sum(coded_manifest.tensors[name].stored_bytes for name in coded_names(coded_manifest))
    assert stored < 0.9 * raw


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=st.integers(1, 6), count=st.integers(1, 5), shuffle=st.randoms(use_true_random=False))
def test_plan_reads_every_piece_once_and_cuts_none(
    coded_manifest: Manifest, pages: int, count: int, shuffle: random.Random
) -> None:
    order = list(SMALL_ORDER)
    shuffle.shuffle(order)
    plan = plan_load(coded_manifest, order[:count], chunk_bytes=pages * 4096)
    assert plan == recut(plan_load(coded_manifest, order[:count]), pages * 4096)
    pieces: list[tuple[int, int]] = []
    copied = 0
    for chunk in plan.chunks:
        assert 0 < chunk.bytes <= pages * 4096
        assert chunk.groups
        file = plan.files[chunk.file]
        inside = chunk.offset - file.data_start
        assert inside // file.digest_bytes == (inside + chunk.bytes - 1) // file.digest_bytes == chunk.block
        copied += sum(piece.bytes for piece in chunk.pieces)
        for number, first, length in chunk.coded:
            tensor = plan.tensors[plan.coded[number]]
            assert tensor.coded is not None
            assert plan.codec is not None
            for piece in range(first, first + length):
                start = plan.codec.table.places[tensor.coded.row + piece] * UNIT_BYTES
                end = start + plan.codec.table.sizes[tensor.coded.row + piece]
                assert inside <= start < end <= inside + chunk.bytes
                pieces.append((number, piece))
    assert sorted(pieces) == [
        (number, piece)
        for number, name in enumerate(plan.coded)
        for piece in range(-(-plan.tensors[name].bytes // 1024))
    ]
    assert copied == sum(t.bytes for t in plan.tensors.values() if t.coded is None)


def test_arenas_are_laid_out_as_without_a_codec(tmp_path: Path) -> None:
    write_coded(tmp_path)
    raw, coded = (plan_load(read_manifest(tmp_path / name), SMALL_ORDER) for name in ("raw", "coded"))
    assert raw.arenas == coded.arenas
    assert "codec ans: 5 tensors" in str(coded)
    assert "codec" not in str(raw)
    assert {n: (t.arena, t.arena_offset, t.bytes, t.head) for n, t in raw.tensors.items()} == {
        n: (t.arena, t.arena_offset, t.bytes, t.head) for n, t in coded.tensors.items()
    }
    assert coded.total_bytes < 0.9 * raw.total_bytes


def test_work_survives_the_wire(coded_manifest: Manifest) -> None:
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    work = work_of(plan, 4, 4096, 2, 0)
    again = decode_work(work.encode())
    assert again.encode() == work.encode()
    assert again.unpack is not None
    assert work.unpack is not None
    for chunk in work.unpack.chunks:
        here, there = work.unpack.table(chunk), again.unpack.table(chunk)
        assert (here.sources, here.targets, here.rooms) == (there.sources, there.targets, there.rooms)


def test_slot_smaller_than_a_piece_is_refused(tmp_path: Path) -> None:
    limits = CodecLimits(piece_bytes=8192, min_bytes=4096, block_bytes=16384)
    prepared = write_coded(tmp_path, MIXED, limits)
    with pytest.raises(InternalError, match=r"less than a coded piece; found 4096"):
        plan_load(read_manifest(prepared.directory), ["dit/a"], chunk_bytes=4096)


# -- every rung ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICE_RUNGS)
def test_rungs_unpack_to_the_original_bytes(coded: Prepared, coded_manifest: Manifest, name: str) -> None:
    rung = Rung(name)
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    with rung.start(plan, coded.directory) as stream:
        assert rung.contents(stream) == expected(coded, plan)
        assert stream.path == name
        sizes = [m.bytes for m in stream.marks() if m.name in ("unpacked", "uploader: unpacked")]
        while not sizes:  # the uploader's last words come after the last group
            time.sleep(0.001)
            sizes = [m.bytes for m in stream.marks() if m.name in ("unpacked", "uploader: unpacked")]
        assert sizes == [sum(plan.tensors[name].bytes for name in plan.coded)]
        rows = stream.rows_async("embed/table.weight", [3])
        assert rows.bytes == coded.content["embed/table.weight"][144:192]
    gc.collect()
    rung.finish()


@pytest.mark.timeout(300)  # dozens of loads with several threads each
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    pages=st.integers(1, 4),
    slots=st.integers(1, 6),
    ring=st.integers(1, 5),
    piece=st.sampled_from([256, 1024, 2048]),
)
def test_any_plan_slots_and_delays(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    pages: int,
    slots: int,
    ring: int,
    piece: int,
) -> None:
    """Staging rings down to one slot, host rings down to one; delays come from the seed."""
    limits = CodecLimits(piece_bytes=piece, min_bytes=2048, block_bytes=16384)
    prepared = write_coded(tmp_path_factory.mktemp("any"), MIXED, limits, seed=seed)
    groups = random.Random(seed).sample(["dit/a", "dit/b", "dit/c"], 3)
    plan = plan_load(read_manifest(prepared.directory), groups, chunk_bytes=4096 * pages)
    driver = FakeDriver(seed=seed, max_delay_s=0.003)
    ring_bytes = 4096 * pages * ring
    options = StreamOptions(path="B", driver=driver, ring_bytes=ring_bytes, staging_slots=slots)
    with start(plan, prepared.directory, device="cuda", options=options) as stream:
        rung = Rung("B")
        rung.driver = driver
        assert rung.contents(stream) == expected(prepared, plan)
    assert driver.codec is not None
    kinds = {plan.tensors[name].dtype for name in plan.coded}
    assert set(driver.codec.dtypes) <= kinds | {""}
    assert sum(driver.codec.calls) == sum(-(-plan.tensors[name].bytes // piece) for name in plan.coded)
    gc.collect()
    driver.finish()


@pytest.mark.parametrize("slots", [1, 2])
def test_another_process_with_the_fewest_slots(coded: Prepared, coded_manifest: Manifest, slots: int) -> None:
    rung = Rung("U")
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    options = {
        "uploader_driver": "tests.fakes.remote_driver:slow",
        "staging_slots": slots,
        "ring_bytes": 4096,
    }
    with rung.start(plan, coded.directory, **options) as stream:
        assert rung.contents(stream) == expected(coded, plan)
    gc.collect()
    rung.finish()


def test_killed_uploader_is_named(coded: Prepared, coded_manifest: Manifest) -> None:
    rung = Rung("U")
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096, hold="dit/blocks.1")
    with rung.start(plan, coded.directory) as stream:
        stream.wait("dit/blocks.0")
        (pid,) = [
            int(m.name.split()[1])
            for m in stream.marks()
            if m.name.startswith("uploader ") and "started" in m.name
        ]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InternalError, match=r"uploader process ended.*killed by signal 9"):
            stream.wait_all()
    assert rung.driver is not None
    rung.driver.finish()


def test_groups_are_ready_one_by_one(coded: Prepared, coded_manifest: Manifest) -> None:
    rung = Rung("A")
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096, hold="dit/blocks.1")
    with rung.start(plan, coded.directory) as stream:
        stream.wait("dit/blocks.0")
        assert not stream.is_ready("dit/blocks.1")
        stream.release()
        assert rung.contents(stream) == expected(coded, plan)
    gc.collect()
    rung.finish()


@pytest.mark.parametrize("path", ["U", "A"])
def test_ranks_of_a_host_unpack_what_one_reader_reads(
    coded: Prepared, coded_manifest: Manifest, path: str
) -> None:
    orders = [SMALL_ORDER, SMALL_ORDER[2:]]
    host = Host(coded.directory, orders, 3, path)
    streams = [host.stream(rank) for rank in range(2)]
    for rank, stream in enumerate(streams):
        found = contents(stream, host.drivers[rank])
        wanted = [name for name, t in coded_manifest.tensors.items() if t.group in orders[rank]]
        assert found == {name: coded.content[name] for name in wanted}
        del found
    assert host.read_bytes(streams) == sum(chunk.bytes for chunk in host.shared.plan.chunks)
    for stream in streams:
        stream.close()
    gc.collect()
    host.finish()


def test_background_pass_hashes_what_is_stored(tmp_path: Path) -> None:
    prepared = write_coded(tmp_path)
    manifest = read_manifest(prepared.directory)
    rehash = start_rehash(plan_load(manifest, SMALL_ORDER), prepared.directory)
    rehash.wait()
    rehash.close()
    flip(prepared, manifest, "dit/blocks.0.w", 3)
    rehash = start_rehash(plan_load(manifest, SMALL_ORDER), prepared.directory)
    with pytest.raises(ArtifactError, match=r"dit-0.safetensors: .*dit/blocks.0.w"):
        rehash.wait()
    rehash.close()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_reader", [False, True], ids=["plain", "spawned_reader"])
def test_cpu_refuses_and_says_what_to_do(
    coded: Prepared, coded_manifest: Manifest, with_reader: bool
) -> None:
    reader = spawn_reader() if with_reader else None
    with pytest.raises(CapabilityError, match=r"codec: .*found ans; allowed: none on a CPU.*--codec none"):
        start(plan_load(coded_manifest, SMALL_ORDER), coded.directory, reader=reader)


@pytest.mark.parametrize("version", [None, "5.9.9", "7.0.0"], ids=["missing", "older", "next_major"])
@pytest.mark.parametrize("name", ["A", "C"])
def test_library_that_is_missing_or_does_not_fit(
    coded: Prepared, coded_manifest: Manifest, version: str | None, name: str
) -> None:
    driver = FakeDriver(codec_version=version)
    options = StreamOptions(driver=driver, path=name, ring_bytes=16384)
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    with (
        start(plan, coded.directory, device="cuda", options=options) as stream,
        pytest.raises(CapabilityError, match=r"codec: .*prepare again with --codec none"),
    ):
        stream.wait_all()
    driver.finish()


def test_memory_to_unpack_in_is_counted(coded: Prepared, coded_manifest: Manifest) -> None:
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    driver = FakeDriver(device_bytes=plan.arena_bytes + 4096)
    options = StreamOptions(driver=driver, path="A", ring_bytes=16384)
    with (
        start(plan, coded.directory, device="cuda", options=options) as stream,
        pytest.raises(CapabilityError, match=rf"{plan.arena_bytes} bytes of arenas, \d+ to unpack in"),
    ):
        stream.wait_all()
    driver.finish()


def test_path_u_without_a_codec_falls_and_still_names_it(coded: Prepared, coded_manifest: Manifest) -> None:
    driver = FakeDriver(codec_version=None)
    options = StreamOptions(
        driver=driver, uploader_driver="tests.fakes.remote_driver:no_codec", ring_bytes=16384
    )
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    with (
        start(plan, coded.directory, device="cuda", options=options) as stream,
        pytest.raises(CapabilityError, match=r"codec: no codec"),
    ):
        stream.wait_all()
    driver.finish()


# -- damage ----------------------------------------------------------------------------------------------------------


def failure(name: str, prepared: Prepared, plan: LoadPlan, **options: Any) -> WorkerError:
    rung = Rung(name)
    with rung.start(plan, prepared.directory, **options) as stream, pytest.raises(WorkerError) as caught:
        stream.wait_all()
    gc.collect()
    rung.finish()
    return caught.value


@pytest.mark.parametrize("name", DEVICE_RUNGS)
@pytest.mark.parametrize("at", [60, -60], ids=["code_table", "payload"])
def test_flipped_bit_names_tensor_piece_and_file(tmp_path: Path, name: str, at: int) -> None:
    prepared = write_coded(tmp_path)
    manifest = read_manifest(prepared.directory)
    flip(prepared, manifest, "encoder/layers.1.w", 5, at)
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    error = failure(name, prepared, plan)
    assert isinstance(error, ArtifactError)
    assert "encoder-1.safetensors: encoder/layers.1.w: piece 5 at byte" in str(error)
    assert "does not unpack" in str(error)


def test_whole_verification_finds_it_before_it_is_unpacked(tmp_path: Path) -> None:
    prepared = write_coded(tmp_path)
    manifest = read_manifest(prepared.directory)
    flip(prepared, manifest, "encoder/layers.1.w", 5)
    error = failure("A", prepared, plan_load(manifest, SMALL_ORDER, chunk_bytes=4096), verify="full")
    assert isinstance(error, ArtifactError)
    assert "digest of bytes" in str(error)
    assert "encoder/layers.1.w" in str(error)


def test_wrong_status_is_named(coded: Prepared, coded_manifest: Manifest) -> None:
    plan = plan_load(coded_manifest, ["encoder/layers.1"], chunk_bytes=4096)
    driver = FakeDriver()
    assert driver.codec is not None
    driver.codec.wrong_status = (0, 2)
    options = StreamOptions(driver=driver, path="B", ring_bytes=4096, threads=1)
    with (
        start(plan, coded.directory, device="cuda", options=options) as stream,
        pytest.raises(ArtifactError, match=r"layers.1.w: piece 2 at byte .*status 12 \(fake 12\)"),
    ):
        stream.wait_all()
    driver.finish()


def test_decoder_that_returns_the_wrong_bytes_is_not_believed(
    coded: Prepared, coded_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statuses, sizes and checksums can be fine by the library's own account: the ends are hashed here."""
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    tensor = plan.tensors["encoder/layers.0.w"]
    driver = FakeDriver()

    class Wrong(FakeCodec):
        def checksum(self, targets: int, rooms: int, count: int, sums: int, stream: int) -> None:
            import ctypes

            super().checksum(targets, rooms, count, sums, stream)
            first = tensor.arena_offset

            def spoil() -> None:
                arena = min(a for a, m in driver._device.items() if len(m) == plan.arenas[0].bytes)
                ctypes.memset(arena + first + 3, 0xFF, 1)

            driver.enqueue(stream, spoil)

    driver.codec = Wrong(driver)
    options = StreamOptions(driver=driver, path="B", ring_bytes=16384)
    with (
        start(plan, coded.directory, device="cuda", options=options) as stream,
        pytest.raises(ArtifactError, match=r"layers.0.w: first 1024 bytes as unpacked differ"),
    ):
        stream.wait_all()
    driver.finish()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-12], "piece table is truncated"),
        (lambda data: data + b"\0" * 12, "piece table is too long"),
        (lambda data: data[:5] + b"\xff" + data[6:], "piece table differs from the manifest"),
        (None, "piece table cannot be read"),
    ],
    ids=["truncated", "too_long", "changed", "missing"],
)
def test_damaged_table_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    prepared = write_coded(tmp_path)
    path = prepared.directory / "codec" / "pieces.bin"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ArtifactError, match=message):
        read_manifest(prepared.directory)


def test_table_that_contradicts_itself_is_refused(coded: Prepared, coded_manifest: Manifest) -> None:
    """A decoder reads as many bytes as it is told to; a size must not lead out of the staging slot."""
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    unpack = unpack_plan_of(plan, 4096)
    assert unpack is not None
    table, row = unpack.table_of_pieces, unpack.tensors[1].row + 3
    before, table.sizes[row] = table.sizes[row], 5000
    try:
        with pytest.raises(
            ArtifactError, match=r"layers.1.w: piece 3: piece table contradicts itself; found 5000"
        ):
            unpack.prepare(lambda: False)
    finally:
        table.sizes[row] = before


DAMAGE: dict[str, tuple[Any, str]] = {
    "codec_missing": (lambda m: m.pop("codec"), "codec: field is missing"),
    "codec_unknown": (lambda m: m["codec"].update(name="zip"), "codec: name: .*allowed: ans"),
    "piece_bytes": (lambda m: m["codec"].update(piece_bytes=100), "piece_bytes"),
    "table_index": (lambda m: m["codec"].update(table=0), "codec: table"),
    "row": (lambda m: m["tensors"]["dit/proj.weight"]["coded"].update(row=10_000), "coded: row"),
    "row_of_another": (lambda m: m["tensors"]["dit/proj.weight"]["coded"].update(row=1), "coded: bytes"),
    "stored_bytes": (lambda m: m["tensors"]["dit/proj.weight"]["coded"].update(bytes=512), "coded: bytes"),
    "place": (lambda m: m["tensors"]["dit/proj.weight"].update(place=1 << 40), "place"),
    "place_odd": (lambda m: m["tensors"]["dit/proj.weight"].update(place=3), "place"),
    "places_overlap": (lambda m: m["tensors"]["dit/scale"].update(place=0), "decoded tensors overlap"),
    "group_place": (lambda m: m["groups"][1].pop("place"), "place: field is missing"),
    "old_format": (lambda m: m.update(format="coldframe-manifest/1"), "names no codec"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_manifest_that_lies_about_coded_weights(tmp_path: Path, name: str) -> None:
    prepared = write_coded(tmp_path)
    change, message = DAMAGE[name]
    change(prepared.manifest)
    prepared.rewrite()
    with pytest.raises(ArtifactError, match=message):
        read_manifest(prepared.directory)


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICE_RUNGS)
def test_closing_in_the_middle_leaves_nothing(coded: Prepared, coded_manifest: Manifest, name: str) -> None:
    rung = Rung(name)
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    options = {"uploader_driver": "tests.fakes.remote_driver:slow"} if name == "U" else {}
    with rung.start(plan, coded.directory, **options):
        pass
    rung.finish()


def test_reader_killed_in_the_middle(coded: Prepared, coded_manifest: Manifest) -> None:
    rung = Rung("A")
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096, hold="dit/blocks.1")
    with rung.start(plan, coded.directory) as stream:
        stream.wait("dit/blocks.0")
        (pid,) = [
            int(m.name.split()[1]) for m in stream.marks() if m.name.startswith("reader ") and " up" in m.name
        ]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="reader ended"):
            stream.wait_all()
    rung.finish()


def test_sticky_error_while_unpacking(coded: Prepared, coded_manifest: Manifest) -> None:
    driver = FakeDriver(fail_copy=6)
    options = StreamOptions(
        driver=driver, path="B", ring_bytes=16384
    )  # whose private ring has no descriptor to leak
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    with (
        start(plan, coded.directory, device="cuda", options=options) as stream,
        pytest.raises(InternalError, match="sticky error"),
    ):
        stream.wait_all()
    driver.abandon()


def test_unpacker_stays_within_what_it_announces(coded_manifest: Manifest) -> None:
    driver = FakeDriver()
    driver.use_context(CONTEXT)
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    unpack = unpack_plan_of(plan, 4096, slots=2)
    assert unpack is not None
    stream = driver.stream_create()
    unpacker = Unpacker(driver, unpack)
    unpacker.open([driver.alloc(arena.bytes) for arena in plan.arenas], stream)
    assert driver.memory_used() - plan.arena_bytes == unpacker.sizes.device_bytes
    assert unpacker.sizes.staging == 2 * 4096
    assert unpacker.room() == 2
    unpacker.close()
    assert driver.memory_used() == plan.arena_bytes
    driver.stream_destroy(stream)
    driver.caller.end()


def test_lanes_are_the_sums_they_stand_for(coded_manifest: Manifest) -> None:
    """Pointer tables by one large addition each, against the plain way."""
    plan = plan_load(coded_manifest, SMALL_ORDER, chunk_bytes=4096)
    unpack = unpack_plan_of(plan, 4096)
    assert unpack is not None
    base, arena_base = 0x7F12_3456_7000, 0x7FFF_0000_0000
    for number, (origin, size, spans) in unpack.chunks.items():
        table = unpack.table(number)
        sources, sizes, rooms, targets, sums = [], [], [], [], []
        for index, first, count in spans:
            tensor = unpack.tensors[index]
            for piece in range(first, first + count):
                sources.append(base + unpack.table_of_pieces.places[tensor.row + piece] * UNIT_BYTES - origin)
                sizes.append(unpack.table_of_pieces.sizes[tensor.row + piece])
                sums.append(unpack.table_of_pieces.sums[tensor.row + piece])
                rooms.append(min(1024, tensor.size - 1024 * piece))
                targets.append(arena_base + tensor.offset + 1024 * piece)
        assert lanes_plus(table.sources, table.count, base) == array("Q", sources).tobytes()
        assert lanes_plus(table.targets, table.count, arena_base) == array("Q", targets).tobytes()
        assert (table.sizes, table.rooms) == (array("Q", sizes).tobytes(), array("Q", rooms).tobytes())
        assert table.sums == array("I", sums).tobytes()
        assert (table.bytes, table.decoded) == (size, sum(rooms))
        kinds = {unpack.tensors[index].dtype for index, _, _ in spans}
        assert table.dtype == (kinds.pop() if len(kinds) == 1 else "")


def test_nothing_is_coded_where_it_does_not_pay(tmp_path: Path) -> None:
    prepared = write_coded(tmp_path, letters=256)
    assert prepared.manifest["format"] == "coldframe-manifest/1"
    assert "codec" not in prepared.manifest
    assert LIMITS.max_ratio == 0.9
