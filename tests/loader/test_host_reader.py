"""One reader for all ranks of a host: ranks are streams of this process with fake devices, sockets and child are real."""

from __future__ import annotations

import os
import random
import signal
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loader.errors import InternalError, WorkerError
from loader.host_link import HostLink, join_host, socket_address
from loader.host_plan import HostPlan, host_plan
from loader.host_reader import HostReader
from loader.hub_link import HubProcess, spawn_hub
from loader.load_plan import plan_load
from loader.manifest import read_manifest
from loader.options import StreamOptions
from loader.stream import WeightStream, start
from tests.fakes.driver import FakeDriver
from tests.loader.prepared import SMALL_ORDER, write_prepared
from tests.loader.rungs import raw_bytes

CHUNK = 4096
ORDERS: list[tuple[Sequence[str], ...]] = [
    (SMALL_ORDER, SMALL_ORDER),
    (SMALL_ORDER[:3], SMALL_ORDER[2:]),
    (SMALL_ORDER, ["encoder/visual", "dit/blocks.1"], SMALL_ORDER[::-1]),
]


class Host:
    """A leader and the streams of its ranks."""

    def __init__(
        self,
        directory: Path,
        orders: Sequence[Sequence[str]],
        slots: int = 3,
        path: str = "A",
        hub: HubProcess | None = None,
        pin_limit: int | None = None,
        **options: Any,
    ) -> None:
        self.path = path
        manifest = read_manifest(directory)
        self.shared: HostPlan = host_plan([plan_load(manifest, order, chunk_bytes=CHUNK) for order in orders])
        self.directory = directory
        address = socket_address(uuid.uuid4().hex, 0)
        self.reader = HostReader(
            self.shared,
            directory,
            StreamOptions(ring_bytes=slots * CHUNK, threads=2, **options),
            address,
            hub=hub,
        )
        self.remote = "plain" if pin_limit is None else "little_pinning"
        self.drivers = [FakeDriver(seed=rank, pin_limit=pin_limit) for rank in range(len(orders))]
        self.links: list[HostLink] = []

    def stream(self, rank: int) -> WeightStream:
        link = join_host(self.reader.address, rank, 10.0)
        self.links.append(link)
        options = StreamOptions(
            driver=self.drivers[rank],
            ring_bytes=link.ring_bytes,
            slot_bytes=link.slot_bytes,
            path=self.path,
            uploader_driver=f"tests.fakes.remote_driver:{self.remote}" if self.path == "U" else "",
            max_load_s=20.0,
        )
        return start(self.shared.members[rank], self.directory, device="cuda", options=options, reader=link)

    def read_bytes(self, streams: Sequence[WeightStream]) -> int:
        """Bytes of chunks that the reader read; it tells all ranks the same, once it has sent the last chunk."""
        for stream in streams:
            while not any("reader used" in mark.name for mark in stream.marks()):
                _ = stream.rows_async("embed/table.weight", [0]).bytes
        (count,) = {mark.bytes for stream in streams for mark in stream.marks() if "reader used" in mark.name}
        return count

    def finish(self) -> None:
        assert self.reader.wait_closed(10.0), "the leader still runs"
        for driver in self.drivers:
            driver.finish()


def contents(stream: WeightStream, driver: FakeDriver) -> dict[str, bytes]:
    state = stream.state_dict()
    driver.caller.synchronize()
    return {name: raw_bytes(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("path", ["U", "A"])
@pytest.mark.parametrize("slots", [1, 3, 50])
@pytest.mark.parametrize("orders", ORDERS, ids=["same", "overlapping", "three ranks"])
def test_every_rank_gets_its_own_and_shared_bytes_are_read_once(
    tmp_path: Path, orders: Sequence[Sequence[str]], slots: int, path: str
) -> None:
    prepared = write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    host = Host(tmp_path, orders, slots, path)
    streams = [host.stream(rank) for rank in random.Random(slots).sample(range(len(orders)), len(orders))]
    by_rank = dict(zip(random.Random(slots).sample(range(len(orders)), len(orders)), streams, strict=True))
    manifest = read_manifest(tmp_path)
    for rank, stream in by_rank.items():
        assert stream.path == path
        expected = {t.name for t in manifest.tensors.values() if t.group in orders[rank]}
        found = contents(stream, host.drivers[rank])
        assert found == {name: prepared.content[name] for name in expected}
    needed = {group for order in orders for group in order}
    stats = host.read_bytes(streams)
    assert stats == sum(chunk.bytes for chunk in host.shared.plan.chunks)
    # A chunk is one rank's and another's where their ranges end alike; elsewhere a part of a chunk is read twice.
    once = sum(chunk.bytes for chunk in plan_load(manifest, sorted(needed), chunk_bytes=CHUNK).chunks)
    assert 0 <= stats - once < CHUNK * len(orders)
    assert stats == once or set(orders[0]) != set(orders[1])
    for stream in streams:
        stream.close()
    host.finish()


@pytest.mark.parametrize("path", ["U", "A"])
def test_rows_of_several_ranks_do_not_mix(tmp_path: Path, path: str) -> None:
    prepared = write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    host = Host(tmp_path, ORDERS[0], path=path)
    streams = [host.stream(rank) for rank in range(2)]
    table, row = prepared.content["embed/table.weight"], 48
    asked = [[3, 1, 3], [49, 0]]
    requests = [
        stream.rows_async("embed/table.weight", rows) for stream, rows in zip(streams, asked, strict=True)
    ]
    for request, rows in zip(requests, asked, strict=True):
        assert request.bytes == b"".join(table[row * index : row * (index + 1)] for index in rows)
    for stream in streams:
        stream.close()
    host.finish()


@pytest.mark.parametrize("path", ["U", "A"])
def test_a_rank_that_closes_early_holds_nobody_up(tmp_path: Path, path: str) -> None:
    prepared = write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    host = Host(tmp_path, ORDERS[0], slots=1, path=path)
    leaving, staying = host.stream(0), host.stream(1)
    leaving.close()
    found = contents(staying, host.drivers[1])
    assert all(found[name] == prepared.content[name] for name in found)
    staying.close()
    host.finish()


@pytest.mark.parametrize("path", ["U", "A"])
def test_a_rank_that_dies_fails_all_ranks_with_that_cause(tmp_path: Path, path: str) -> None:
    write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    host = Host(tmp_path, ORDERS[0], slots=1, path=path)
    dying = join_host(host.reader.address, 1, 10.0)
    stream = host.stream(0)
    dying.close()  # without a word, as the kernel closes a killed process's socket
    with pytest.raises(InternalError, match="rank 1 of this host ended while its weights were loading"):
        stream.wait_all()
    stream.close()
    host.finish()


@pytest.mark.parametrize("path", ["U", "A"])
def test_a_killed_reader_fails_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("COLDFRAME_ALLOW_STORAGE_FAULT", "1")
    write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    host = Host(tmp_path, ORDERS[0], path=path, storage_fault="kill@2")
    streams = [host.stream(rank) for rank in range(2)]
    for stream in streams:
        with pytest.raises(InternalError, match="killed by signal 9"):
            stream.wait_all()
        stream.close()
    host.finish()


@pytest.mark.parametrize("path", ["U", "A"])
def test_a_damaged_tensor_is_named_to_all_ranks(tmp_path: Path, path: str) -> None:
    write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    manifest = read_manifest(tmp_path)
    tensor = manifest.tensors["dit/blocks.0.w"]
    file = manifest.files[tensor.file]
    damaged = tmp_path / file.path
    data = bytearray(damaged.read_bytes())
    data[(file.data_start or 0) + tensor.offset] ^= 1
    damaged.write_bytes(data)
    host = Host(tmp_path, ORDERS[1], path=path)
    streams = [host.stream(rank) for rank in range(2)]
    for stream in streams:
        with pytest.raises(WorkerError, match=r"dit/blocks\.0\.w"):
            stream.wait_all()
        stream.close()
    host.finish()


@pytest.mark.parametrize("path", ["U", "A"])
def test_a_killed_hub_fails_all_ranks_and_leaves_nothing(tmp_path: Path, path: str) -> None:
    write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    hub = spawn_hub()
    host = Host(tmp_path, ORDERS[0], slots=1, path=path, hub=hub)
    stream = host.stream(0)  # the other never joins, so the load cannot end
    os.kill(hub.pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="the process between the reader and its ranks ended"):
        stream.wait_all()
    stream.close()
    host.finish()


def test_strangers_and_second_comers_are_refused(tmp_path: Path) -> None:
    write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    host = Host(tmp_path, ORDERS[0])
    first = join_host(host.reader.address, 0, 10.0)
    for member in (0, 7):
        with pytest.raises(InternalError, match="refused"):
            join_host(host.reader.address, member, 10.0)
    other = join_host(host.reader.address, 1, 10.0)
    for link in (first, other):
        link.stop()
        link.close()
    host.finish()


def test_a_leader_that_never_comes_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"did not open its reader.*within 0.05 s"):
        join_host(socket_address(uuid.uuid4().hex, 0), 1, 0.05)


def test_plans_must_agree_on_directory_and_chunks(tmp_path: Path) -> None:
    write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    manifest = read_manifest(tmp_path)
    plans = [plan_load(manifest, SMALL_ORDER, chunk_bytes=size) for size in (4096, 8192)]
    with pytest.raises(InternalError, match="plan alike"):
        host_plan(plans)


def test_orders_are_interleaved(tmp_path: Path) -> None:
    write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    manifest = read_manifest(tmp_path)
    plans = [plan_load(manifest, [group], chunk_bytes=CHUNK) for group in ("dit/blocks.0", "dit/blocks.1")]
    shared = host_plan(plans)
    assert shared.takers[:2] == ((0,), (1,))
    for member, plan in zip(shared.members, plans, strict=True):
        wanted = [shared.plan.chunks[index].offset for index in member.groups[0].chunks]
        assert wanted == sorted(chunk.offset for chunk in plan.chunks)


@pytest.mark.parametrize("path", ["U", "A"])
def test_ranks_that_may_pin_little_leave_each_other_slots(tmp_path: Path, path: str) -> None:
    """Each may pin two slots of four, mostly not the same ones; what one cannot pin the other has pinned."""
    prepared = write_prepared(tmp_path, orders={"a/b": SMALL_ORDER})
    host = Host(tmp_path, (SMALL_ORDER[:3], SMALL_ORDER[3:]), slots=4, path=path, pin_limit=2 * CHUNK)
    streams = [host.stream(rank) for rank in range(2)]
    for stream, driver in zip(streams, host.drivers, strict=True):
        found = contents(stream, driver)
        assert all(found[name] == prepared.content[name] for name in found)
    for stream in streams:
        stream.close()
    host.finish()


def test_a_thread_that_cannot_be_had_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    write_prepared(tmp_path / "m")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        Host(tmp_path / "m", [SMALL_ORDER])
