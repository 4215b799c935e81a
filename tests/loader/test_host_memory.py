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

from loader.host_memory import first_touch

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("seed", range(20))
def test_what_other_threads_have_filled_stays(seed: int, tmp_path: Path) -> None:
    """Parts with any bounds, in any order, each touched right before its own read."""
    rng = random.Random(seed)
    data = rng.randbytes(rng.randrange(1, 40 * PAGE))
    path = tmp_path / "data"
    path.write_bytes(data)
    bounds = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randrange(40)))})
    parts = list(itertools.pairwise(bounds))
    rng.shuffle(parts)
    memory = mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touch, view = first_touch(memory, PAGE), memoryview(memory)
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


def test_only_pages_that_begin_in_the_range_are_written() -> None:
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    first_touch(memory, PAGE)(PAGE + 1, 3 * PAGE)
    written = [place for place, byte in enumerate(memory[:]) if byte != ord("x")]
    assert written == [2 * PAGE, 3 * PAGE, 4 * PAGE]


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
