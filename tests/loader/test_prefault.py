"""Pages of a shared ring that are mapped before they are used."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest

from loader import prefault
from loader.driver import address_of
from loader.prefault import Prefault

PAGE = mmap.PAGESIZE


def shared(size: int, name: str = "ring") -> tuple[mmap.mmap, mmap.mmap]:
    """The same memory mapped twice, as in two processes."""
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size), mmap.mmap(fd, size)
    finally:
        os.close(fd)


def resident_kib(memory: mmap.mmap) -> int:
    """KiB of a mapping that this process has mapped, as the kernel counts."""
    start = f"{address_of(memory):x}-"
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{start}.*?^Rss:\s+(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found.group(1))


@pytest.fixture
def has_populate() -> None:
    memory, _ = shared(PAGE)
    probe = Prefault(memory, PAGE)
    probe.wait()
    if probe.problem:
        pytest.skip(f"this kernel does not populate mappings: {probe.problem}")


@pytest.mark.usefixtures("has_populate")
@pytest.mark.parametrize("step", [PAGE, 3 * PAGE, 1 << 20], ids=["page", "three-pages", "more-than-all"])
def test_maps_what_another_mapping_filled(step: int) -> None:
    here, there = shared(64 * PAGE)
    there[:] = bytes(range(256)) * (64 * PAGE // 256)
    assert resident_kib(here) == 0
    work = Prefault(here, step)
    work.wait()
    assert (work.mapped_bytes, work.problem) == (64 * PAGE, "")
    assert resident_kib(here) == 64 * PAGE // 1024
    assert here[:] == there[:]


@pytest.mark.usefixtures("has_populate")
def test_what_is_filled_later_is_seen() -> None:
    here, there = shared(16 * PAGE)
    Prefault(here, PAGE).wait()
    there[5 * PAGE : 6 * PAGE] = b"x" * PAGE
    here[7 * PAGE : 8 * PAGE] = b"y" * PAGE
    assert here[5 * PAGE : 6 * PAGE] == b"x" * PAGE
    assert there[7 * PAGE : 8 * PAGE] == b"y" * PAGE


def test_a_kernel_that_refuses_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_POPULATE_READ", 12345)  # no such advice
    here, _ = shared(4 * PAGE)
    work = Prefault(here, PAGE)
    work.wait()
    assert work.mapped_bytes == 0
    assert work.problem == "errno 22"


def test_stop_ends_it_and_lets_the_memory_go() -> None:
    here, _ = shared(256 * PAGE)
    work = Prefault(here, PAGE)
    work.stop()
    work.stop()
    assert work.mapped_bytes % PAGE == 0
    here.close()  # refused by Python if anything still looked into it
