"""What a first fill of private memory costs others in the same process that map memory, as a driver that makes a context does.

    python -m scripts.bench.map_lock --work /dev/shm [--threads 10] [--gib 2] [--rounds 3]       # no GPU

Threads read a file that is in memory into a new mapping with huge pages, `plain` or after `first_touch`; another thread maps, touches
and unmaps 64 KiB all the time. Rounds take turns. Results go to `results/map_lock.json`: median GB/s and mappings a second.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader.host_memory import private_memory
from scripts.bench.common import storage, write_result
from scripts.bench.host_memory import fill, write_file

_SMALL = 1 << 16
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder in memory-backed storage")
    parser.add_argument("--threads", type=int, default=10)
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="map_lock", help="name of the result file; empty: none")
    options = parser.parse_args(arguments)
    size, file = options.gib << 30, options.work / "map_lock.bin"
    found: dict[str, list[dict[str, float]]] = {"plain": [], "touched": []}
    try:
        write_file(file, size)
        fill(file, private_memory(size), options.threads)  # a guest's memory may be made on its first use
        for _ in range(options.rounds):
            for how, rounds in found.items():
                rounds.append(_beside_mapper(file, size, options.threads, how == "touched"))
                print(how, rounds[-1], flush=True)
    finally:
        file.unlink(missing_ok=True)
    medians = {
        how: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for how, rounds in found.items()
    }
    figures: dict[str, Any] = {"threads": options.threads, "gib": options.gib, **medians}
    if options.name:
        print(write_result(options.name, {**figures, "storage": storage(options.work), "rounds": found}, {}))
    return 0


def _beside_mapper(file: Path, size: int, threads: int, is_touched: bool) -> dict[str, float]:
    stop, count = threading.Event(), [0]
    mapper = threading.Thread(target=_map_until, args=(stop, count))
    mapper.start()
    start = time.monotonic()
    seconds = fill(file, private_memory(size), threads, is_touched)
    mapped = count[0] / (time.monotonic() - start)
    stop.set()
    mapper.join()
    return {"gbps": round(size / seconds / 1e9, 2), "mappings_per_s": round(mapped)}


def _map_until(stop: threading.Event, count: list[int]) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    while not stop.is_set():
        address = library.mmap(None, _SMALL, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0)
        ctypes.memset(address, 1, 1)
        library.munmap(address, _SMALL)
        count[0] += 1


if __name__ == "__main__":
    raise SystemExit(main())
