"""What a reader holds of its ring and its threads: all, until its last chunk was read, and then nothing."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from loader import reader as wire
from loader.load_plan import LoadPlan, plan_load
from loader.manifest import Manifest
from loader.plan_wire import ReadSettings, encode_plan
from loader.reader_link import EmbeddedReader, ReaderLink, ThreadReader, spawn_reader
from loader.upload_post import Refused
from loader.upload_process import OwnReader
from tests.loader.prepared import SMALL_ORDER, Prepared

CHUNK = 4096
SLOTS = 3


class NoProcess:
    """Takes an uploader process's place: what it is sent stays here."""

    def begin_reader(self, fds: Sequence[int]) -> None:
        self.fds = [os.dup(fd) for fd in fds]

    def stop(self) -> str:
        return "stopped"


@pytest.fixture
def plan(manifest: Manifest) -> LoadPlan:
    return plan_load(manifest, SMALL_ORDER, chunk_bytes=CHUNK)


def begin(link: ReaderLink, plan: LoadPlan, directory: Path, slots: int = SLOTS) -> None:
    settings = ReadSettings(wire.RING, 5, wire.EDGES, CHUNK, slots * CHUNK, 2)
    link.begin(encode_plan(plan, directory, settings).data, settings.pool_bytes)
    link.give_slots(range(slots))


def read_all(link: ReaderLink, chunks: int) -> None:
    """Until DONE; as an uploader does, without slots that nothing is left for."""
    left = chunks - SLOTS
    for record in records(link):
        if record[0] == wire.FULL and left > 0:
            link.give_slots([record[2]])
            left -= 1
        if record[0] == wire.DONE:
            return


def records(link: ReaderLink) -> Iterator[tuple[int, ...]]:
    while data := link.read_records():
        yield from wire.RECORD.iter_unpack(data)


def ended(reader: wire.Reader) -> bool:
    """Whether all threads that read come to their end, given time to."""
    deadline = time.monotonic() + 10.0
    while any(thread.ident is None or thread.is_alive() for thread in reader.threads):
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


def test_in_the_uploader(prepared: Prepared, plan: LoadPlan) -> None:
    process = NoProcess()
    link = EmbeddedReader(process)  # type: ignore[arg-type]
    begin(link, plan, prepared.directory)
    own = OwnReader(process.fds)
    ring = weakref.ref(own.memory)
    read_all(link, len(plan.chunks))
    own.memory = None
    assert ring() is None
    assert ended(own._reader)
    link.stop()
    own.wait()
    own._reader.close_files()
    for fd in process.fds:
        os.close(fd)
    link.close()


def test_in_threads(prepared: Prepared, plan: LoadPlan) -> None:
    link = ThreadReader()
    begin(link, plan, prepared.directory)
    ring = weakref.ref(link.map_pool(0, CHUNK).obj)  # type: ignore[union-attr]
    link.drop_pool()
    read_all(link, len(plan.chunks))
    assert ring() is None
    assert ended(link._reader)
    assert link.stop() == "stopped"
    link.close()


def test_in_a_child(prepared: Prepared, plan: LoadPlan) -> None:
    link = spawn_reader()
    begin(link, plan, prepared.directory)
    read_all(link, len(plan.chunks))
    assert "memfd:coldframe-pool" not in Path(f"/proc/{link.pid}/maps").read_text()
    link.stop()
    link.close()


def test_an_uploader_without_memory_for_it_leaves_the_load_to_others(
    prepared: Prepared, plan: LoadPlan
) -> None:
    process = NoProcess()
    link = EmbeddedReader(process)  # type: ignore[arg-type]
    settings = ReadSettings(wire.RING, 5, wire.EDGES, CHUNK, 1 << 47, 2)
    link.begin(encode_plan(plan, prepared.directory, settings).data, settings.pool_bytes)
    with pytest.raises(Refused, match=f"no ring of {1 << 47} bytes"):
        OwnReader(process.fds)
    for fd in process.fds:
        os.close(fd)
    link.stop()
    link.close()
