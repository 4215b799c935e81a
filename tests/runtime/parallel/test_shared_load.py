"""The start of two ranks on one host, as threads with fake devices, on a directory with shards."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from pathlib import Path

import pytest

from loader.errors import CapabilityError, InternalError
from loader.host_link import socket_address
from loader.manifest import read_manifest
from loader.options import StreamOptions
from loader.uploader_link import spawn_uploader
from runtime.parallel import shared_load
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.prepared import RankWeights
from runtime.parallel.shared_load import start_shared
from runtime.weights import WeightSet
from tests.fakes.driver import FakeDriver
from tests.loader.prepared import write_prepared
from tests.loader.rungs import raw_bytes

LAYOUT = {
    "dit": [
        {"dit/prelude": {"proj": ("F32", (64, 33))}, "dit/blocks.0": {"w": ("F32", (500, 7))}},
        {"dit/rank-0-of-2/blocks.0": {"rank-0-of-2/q": ("F32", (130, 7))}},
        {"dit/rank-1-of-2/blocks.0": {"rank-1-of-2/q": ("F32", (130, 7))}},
    ]
}
ORDERS = {
    f"t/s/rank-{rank}-of-2": ["dit/prelude", "dit/blocks.0", f"dit/rank-{rank}-of-2/blocks.0"]
    for rank in range(2)
}


def test_ranks_share_a_reader_and_see_whole_groups(tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path, LAYOUT, ORDERS)
    manifest = read_manifest(tmp_path)
    run, drivers = uuid.uuid4().hex, [FakeDriver(seed=rank) for rank in range(2)]
    found: dict[int, dict[str, bytes]] = {}

    def start(rank: int) -> None:
        environment = RankEnvironment(rank, 2, rank, 2, run_id=run)
        options = StreamOptions(driver=drivers[rank], threads=2)
        stream = start_shared(environment, manifest, "t/s", tmp_path, "cuda", options)
        weights = WeightSet(lambda groups: stream)
        weights.ensure(ORDERS[f"t/s/rank-{rank}-of-2"])
        block = RankWeights(weights, manifest.groups, rank, 2).tensors("dit/blocks.0")
        drivers[rank].caller.synchronize()
        found[rank] = {name: raw_bytes(tensor) for name, tensor in block.items()}
        stream.wait_all()
        del block
        stream.close()

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        assert found[rank]["w"] == prepared.content["dit/w"]
        assert found[rank]["q"] == prepared.content[f"dit/rank-{rank}-of-2/q"]
        drivers[rank].finish()


def test_a_host_that_refuses_the_socket_is_told_what_to_do(tmp_path: Path) -> None:
    write_prepared(tmp_path, LAYOUT, ORDERS)
    taken = RankEnvironment(0, 2, 0, 1, run_id=uuid.uuid4().hex)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(socket_address(taken.run_id, 0))
        with pytest.raises(CapabilityError, match=r"cannot share a reader here.*COLDFRAME_HOST_READER=own"):
            start_shared(taken, read_manifest(tmp_path), "t/s", tmp_path, "cuda", StreamOptions())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join_leaves_no_process(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InternalError("it did not come")

    write_prepared(tmp_path, LAYOUT, ORDERS)
    monkeypatch.setattr(shared_load, "join_host", refuse)
    uploader = spawn_uploader("cuda", "tests.fakes.remote_driver:plain")
    environment = RankEnvironment(rank, 2, rank, 2, run_id=uuid.uuid4().hex)
    with pytest.raises(InternalError, match="did not come"):
        start_shared(
            environment, read_manifest(tmp_path), "t/s", tmp_path, "cuda", StreamOptions(), uploader=uploader
        )
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    assert children.read_text().split() == []


@pytest.mark.skipif(not os.path.exists("/proc/net/unix"), reason="Linux")  # noqa: PTH110
def test_no_socket_is_left(tmp_path: Path) -> None:
    run = uuid.uuid4().hex
    write_prepared(tmp_path, LAYOUT, ORDERS)
    manifest = read_manifest(tmp_path)
    environment = RankEnvironment(0, 2, 0, 1, run_id=run)
    driver = FakeDriver()
    stream = start_shared(environment, manifest, "t/s", tmp_path, "cuda", StreamOptions(driver=driver))
    assert run in Path("/proc/net/unix").read_text()
    stream.wait_all()
    stream.close()
    for thread in threading.enumerate():
        if thread.name == "coldframe-host-reader":
            thread.join(30)
    assert run not in Path("/proc/net/unix").read_text()
    driver.finish()
