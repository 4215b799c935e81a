"""What the loader's ring is built on: first fill, pinning, context creation, and copies through rings of several sizes.

    python -m scripts.bench.host_memory --work /mnt/w [--also /root ...]       # half a minute on an H200 host

Files are in memory-backed storage, so what is measured is the processor's part of a hot start. Every part runs in a
process of its own; `results/host_memory.json` has all figures.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loader.driver import CudaDriver, address_of
from loader.host_memory import first_touch, page_bytes, private_memory
from scripts.bench.common import storage, write_result

GIB, MIB = 1 << 30, 1 << 20
_BLOCK = 16 * MIB
_DEVICE_BYTES = 4 * GIB
_IN_FLIGHT = 8
# ring bytes, slot bytes, threads, whether the slot that came back last is filled next
RINGS = (
    (2 * GIB, 16 * MIB, 13, False),
    (2 * GIB, 16 * MIB, 13, True),
    (2 * GIB, 4 * MIB, 13, False),
    (2 * GIB, 4 * MIB, 13, True),
    (128 * MIB, 4 * MIB, 13, False),
    (256 * MIB, 4 * MIB, 13, False),
    (2 * GIB, 4 * MIB, 16, True),
    (2 * GIB, 4 * MIB, 8, True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder in memory-backed storage")
    parser.add_argument(
        "--also", type=Path, nargs="*", default=[], help="folders whose cached reads are timed too"
    )
    parser.add_argument("--gib", type=int, default=12, help="size of the file that is read (default 12)")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    file = options.work / "host_memory.bin"
    if options.child:
        print(json.dumps(PARTS[options.child](file)))
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        "huge_pages": _setting("enabled"),
        "huge_pages_shared": _setting("shmem_enabled"),
        "cached_reads": [cached_reads(folder) for folder in (options.work, *options.also)],
    }
    print(figures["cached_reads"], flush=True)
    try:
        figures["file"] = {"gib": options.gib, "write_s": write_file(file, options.gib * GIB)}
        for part in PARTS:
            command = [
                sys.executable,
                "-m",
                "scripts.bench.host_memory",
                "--work",
                str(options.work),
                "--child",
                part,
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures[part] = json.loads(done.stdout)
            print(f"{part}: {figures[part]}", flush=True)
    finally:
        file.unlink(missing_ok=True)
    print(write_result("host_memory", figures, {}))
    return 0


def cached_reads(folder: Path) -> dict[str, Any]:
    """GB/s of reading 2 GiB that are in memory, by threads; the folder's file system decides the size of pages."""
    file = folder / "cached_reads.bin"
    memory = private_memory(2 * GIB)
    try:
        write_file(file, len(memory))
        fill(file, memory)  # the memory's own pages
        rates = {
            threads: round(len(memory) / min(fill(file, memory, threads) for _ in range(2)) / 1e9, 2)
            for threads in (1, 4, 8, 13)
        }
    finally:
        file.unlink(missing_ok=True)
    return {"storage": storage(folder), "gbps_by_threads": rates}


def context(file: Path) -> Any:
    """Seconds of a context, with nothing else going on."""
    return _seconds(_retain)


def context_beside_private_fill(file: Path) -> Any:
    """The same while 13 threads of this process fill 2 GiB of private memory."""
    return _beside_fill(file, private_memory(2 * GIB))


def context_beside_long_fill(file: Path) -> Any:
    """The same beside a fill that outlasts it: pages are made by reads, or touched first as the loader does."""
    return _beside_fill(file, private_memory(8 * GIB))


def context_beside_touched_fill(file: Path) -> Any:
    return _beside_fill(file, private_memory(8 * GIB), is_touched=True)


def context_beside_shared_fill(file: Path) -> Any:
    return _beside_fill(file, _shared(2 * GIB))


def private_ring(file: Path) -> Any:
    return _fill_and_pin(file, private_memory(2 * GIB))


def shared_ring(file: Path) -> Any:
    """As if this process were the one that reads: pages that only another process has filled are slower to pin."""
    return _fill_and_pin(file, _shared(2 * GIB))


def pin_unmapped(file: Path) -> Any:
    """Seconds per GiB of pinning shared pages that were filled through another mapping."""
    there = _shared(2 * GIB)
    fill(file, there)
    driver, _ = _retain()
    here = mmap.mmap(_shared_fds[id(there)], 2 * GIB)
    return {"pin_s_per_gib": _pin(driver, here) / 2}


def copies(file: Path) -> Any:
    """GB/s to the device from pinned memory, without and with reading."""
    driver, _ = _retain()
    memory = private_memory(2 * GIB)
    fill(file, memory)
    _pin(driver, memory)
    alone = Pipeline(driver, file, memory, 16 * MIB, 1, False, is_read=False).run()
    figures: dict[str, Any] = {"without_reading_gbps": alone, "rings": []}
    for ring, slot, threads, is_last_first in RINGS:
        gbps = Pipeline(driver, file, memory, slot, threads, is_last_first, ring=ring).run()
        figures["rings"].append(
            {
                "ring_mib": ring // MIB,
                "slot_mib": slot // MIB,
                "threads": threads,
                "last_first": is_last_first,
                "gbps": gbps,
            }
        )
    return figures


PARTS: dict[str, Callable[[Path], Any]] = {
    "context": context,
    "context_beside_private_fill": context_beside_private_fill,
    "context_beside_long_fill": context_beside_long_fill,
    "context_beside_touched_fill": context_beside_touched_fill,
    "context_beside_shared_fill": context_beside_shared_fill,
    "private_ring": private_ring,
    "shared_ring": shared_ring,
    "pin_unmapped": pin_unmapped,
    "copies": copies,
}


class Pipeline:
    """Threads fill slots from the file, this one copies them to the device and hands them back."""

    def __init__(
        self,
        driver: CudaDriver,
        file: Path,
        memory: mmap.mmap,
        slot: int,
        threads: int,
        is_last_first: bool,
        ring: int = 2 * GIB,
        is_read: bool = True,
    ) -> None:
        self._driver, self._file, self._slot, self._is_read = driver, file, slot, is_read
        self._memory, self._base = memoryview(memory), address_of(memory)
        self._free: queue.Queue[int] = queue.LifoQueue() if is_last_first else queue.Queue()
        for index in range(ring // slot):
            self._free.put(index)
        self._full: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._offsets = iter(range(0, file.stat().st_size // slot * slot, slot))
        self._total = file.stat().st_size // slot * slot
        self._lock = threading.Lock()
        self._threads = threads

    def _fill(self) -> None:
        fd = os.open(self._file, os.O_RDONLY)
        for offset in _shared_steps(self._offsets, self._lock):
            slot = self._free.get()
            if self._is_read:
                os.preadv(fd, [self._memory[slot * self._slot : (slot + 1) * self._slot]], offset)
            self._full.put(slot)
        os.close(fd)

    def run(self) -> float:
        driver, target, at = self._driver, self._driver.alloc(_DEVICE_BYTES), 0
        stream = driver.stream_create()
        threads = [threading.Thread(target=self._fill) for _ in range(self._threads)]
        pending: list[tuple[int, int]] = []
        events = [driver.event_create() for _ in range(_IN_FLIGHT + 2)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for _ in range(self._total // self._slot):
            slot = self._full.get()
            driver.copy_async(target + at, self._base + slot * self._slot, self._slot, stream)
            at = (at + self._slot) % _DEVICE_BYTES
            event = events.pop()
            driver.event_record(event, stream)
            pending.append((event, slot))
            while pending and (driver.event_query(pending[0][0]) or len(pending) > _IN_FLIGHT):
                event, slot = pending[0]
                if driver.event_query(event):
                    events.append(event)
                    self._free.put(slot)
                    del pending[0]
        driver.stream_synchronize(stream)
        seconds = time.monotonic() - start
        driver.free(target)
        return round(self._total / seconds / 1e9, 1)


_shared_fds: dict[int, int] = {}


def _shared(size: int) -> mmap.mmap:
    fd = os.memfd_create("host_memory")
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    _shared_fds[id(memory)] = fd
    return memory


def _shared_steps(steps: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    """One iterator for several threads."""
    while True:
        with lock:
            step = next(steps, None)
        if step is None:
            return
        yield step


def write_file(file: Path, size: int) -> float:
    data = os.urandom(_BLOCK)
    with file.open("wb") as out:
        out.truncate(size)
        fd = out.fileno()
        return _on_threads(size, 15, lambda offset: os.pwrite(fd, data, offset))


def fill(file: Path, memory: mmap.mmap, threads: int = 13, is_touched: bool = False) -> float:
    """Read the file's start into all of `memory`, whose pages may be touched first; seconds."""
    view, fd, touch = memoryview(memory), os.open(file, os.O_RDONLY), first_touch(memory, page_bytes())

    def read(offset: int) -> None:
        if is_touched:
            touch(offset, _BLOCK)
        os.preadv(fd, [view[offset : offset + _BLOCK]], offset)

    seconds = _on_threads(len(memory), threads, read)
    os.close(fd)
    return seconds


def _on_threads(size: int, count: int, work: Callable[[int], object]) -> float:
    steps, lock = iter(range(0, size, _BLOCK)), threading.Lock()

    def run() -> None:
        for step in _shared_steps(steps, lock):
            work(step)

    threads = [threading.Thread(target=run) for _ in range(count)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return round(time.monotonic() - start, 4)


def _retain() -> tuple[CudaDriver, int]:
    driver = CudaDriver()
    context = driver.retain_context(0)
    driver.use_context(context)
    return driver, context


def _seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return round(time.monotonic() - start, 4)


def _beside_fill(file: Path, memory: mmap.mmap, is_touched: bool = False) -> Any:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(fill(file, memory, is_touched=is_touched)))
    thread.start()
    seconds = _seconds(_retain)
    thread.join()
    return {"context_s": seconds, "fill_s": found[0]}


def _fill_and_pin(file: Path, memory: mmap.mmap) -> Any:
    first, again = fill(file, memory), fill(file, memory)
    driver, _ = _retain()
    return {
        "first_fill_s": first,
        "second_fill_s": again,
        "pin_s_per_gib": _pin(driver, memory) * GIB / len(memory),
    }


def _pin(driver: CudaDriver, memory: mmap.mmap) -> float:
    def register() -> None:
        for at in range(0, len(memory), _BLOCK):
            driver.host_register(address_of(memory) + at, _BLOCK)

    return _seconds(register)


def _setting(name: str) -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage") / name
    return path.read_text().strip() if path.is_file() else "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
