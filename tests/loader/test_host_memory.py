"""Touching pages of a private ring before reads into them."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loader.driver import address_of
from loader.host_memory import first_touch, page_bytes

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("page", [PAGE, 2 * PAGE], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(20))
def test_what_other_threads_have_filled_stays(seed: int, page: int, tmp_path: Path) -> None:
    """Parts with any bounds, in any order, each touched right before its own read."""
    rng = random.Random(seed)
    data = rng.randbytes(rng.randrange(1, 40 * PAGE))
    path = tmp_path / "data"
    path.write_bytes(data)
    bounds = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randrange(40)))})
    parts = list(itertools.pairwise(bounds))
    rng.shuffle(parts)
    memory = mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touch, view = first_touch(memory, page), memoryview(memory)
    fd = os.open(path, os.O_RDONLY)

    def work(mine: list[tuple[int, int]]) -> None:
        for first, end in mine:
            touch(first, end - first)
            assert os.preadv(fd, [view[first:end]], first) == end - first

    threads = [threading.Thread(target=work, args=(parts[place::4],)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert bytes(view) == data


def written(memory: mmap.mmap) -> list[int]:
    """Places that are no `x` any more."""
    return [place for place, byte in enumerate(memory[:]) if byte != ord("x")]


def test_one_byte_is_written_of_large_pages_that_begin_in_the_range() -> None:
    memory = mmap.mmap(-1, 12 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    first, count, base = PAGE + 1, 7 * PAGE, address_of(memory)
    first_touch(memory, 2 * PAGE)(first, count)
    assert written(memory) == [
        place for place in range(first, first + count) if (base + place) % (2 * PAGE) == 0
    ]
    assert len(written(memory)) >= 3


def test_the_whole_range_is_written_of_small_pages() -> None:
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    first_touch(memory, PAGE)(PAGE + 1, 3 * PAGE)
    assert written(memory) == list(range(PAGE + 1, 4 * PAGE + 1))


@pytest.mark.parametrize(
    ("says", "is_large"),
    [("[always] madvise never", True), ("always [madvise] never", True), ("always madvise [never]", False)],
)
def test_pages_are_as_large_as_the_kernel_grants_them(says: str, is_large: bool, tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(says)
    assert page_bytes(str(setting)) == (2 << 20 if is_large else PAGE)


def test_pages_are_small_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert page_bytes(str(tmp_path / "enabled")) == PAGE


_FAULTS_OF_A_READ = """
import mmap, os, resource, sys
from loader.host_memory import first_touch
memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
fd = os.open(sys.argv[1], os.O_RDONLY)
if sys.argv[2] == "touched":
    first_touch(memory, mmap.PAGESIZE)(0, len(memory))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
assert os.preadv(fd, [memoryview(memory)], 0) == len(memory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_read_into_touched_pages_takes_no_faults(tmp_path: Path) -> None:
    """Counted by the kernel, in processes of their own, in pages that every machine grants."""
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * PAGE))
    faults = {}
    for how in ("untouched", "touched"):
        command = [sys.executable, "-c", _FAULTS_OF_A_READ, str(path), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["touched"] <= faults["untouched"] - 60, faults
