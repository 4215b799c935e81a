"""Nothing grows from start to start."""

from __future__ import annotations

import gc
import resource
import threading
from pathlib import Path

import pytest

from loader.load_plan import plan_load
from loader.manifest import Manifest
from tests.loader.prepared import SMALL_ORDER, Prepared
from tests.loader.rungs import Rung


def _state() -> tuple[int, int, int]:
    """(descriptors, threads, bytes of shared memory mapped by this process)."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if "memfd:coldframe" in line]
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(shared)


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def load(name: str, prepared: Prepared, manifest: Manifest) -> None:
    rung = Rung(name)
    with rung.start(plan_load(manifest, SMALL_ORDER, chunk_bytes=4096), prepared.directory) as stream:
        rung.contents(stream)
    rung.finish()


@pytest.mark.parametrize(
    ("name", "starts"), [("U", 5), ("A", 10), ("B", 25), ("C", 25), ("D", 10), ("E", 10), ("E-threads", 25)]
)
def test_starts_leave_no_trace(prepared: Prepared, manifest: Manifest, name: str, starts: int) -> None:
    load(name, prepared, manifest)
    gc.collect()  # what other tests left in cycles would go in the middle
    before = _state()
    for _ in range(starts):
        load(name, prepared, manifest)
    assert _state() == before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["U", "A", "E"])
def test_two_hundred_starts_do_not_grow(prepared: Prepared, manifest: Manifest, name: str) -> None:
    for _ in range(20):  # allocator and caches reach their size
        load(name, prepared, manifest)
    before, resident = _state(), _resident_kib()
    for _ in range(200):
        load(name, prepared, manifest)
    assert _state() == before
    assert (
        _resident_kib() - resident < 8 * 1024
    )  # noise of the allocator; one leaked ring a start would be 1.6 MiB
