"""What connecting two GPUs costs, part by part, and what NCCL's settings change about it.

    python -m scripts.bench.connect_ranks [--rounds 3] [--try "2 channels:NCCL_MAX_NCHANNELS=2,NCCL_MAX_P2P_NCHANNELS=2"]

Fresh processes per measurement, one for each GPU, which see their own only; no torch is imported and nothing else runs. Tries take
turns, by default NCCL as it comes, with CUDA's older handles (what a worker chooses on one host), and with fewer channels.
Written to `results/<name>.json`: medians of rank 0's parts in seconds, what NCCL says its own initialisation consists of, and how
fast a gather of 32 MiB parts is afterwards.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import write_result
from scripts.bench.start_settings import parse_try

RANKS = 2
TRIES = (
    "NCCL's defaults",
    "older handles:NCCL_CUMEM_ENABLE=0",
    "8 channels:NCCL_MAX_NCHANNELS=8,NCCL_MAX_P2P_NCHANNELS=8",
)
REPEATS = 20
LIMIT_S = 60


def main() -> int:
    options = _arguments()
    if options.rank is not None:
        return _run_rank(options.rank)
    tries = [parse_try(text) for text in options.tries or TRIES]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in tries}
    for _ in range(options.rounds):
        for name, settings in tries:
            runs[name].append(_connect(settings))
            print(name, json.dumps(runs[name][-1]), flush=True)
    rows = [
        {"name": name, "settings": settings, "medians": _medians(runs[name]), "runs": runs[name]}
        for name, settings in tries
    ]
    for row in rows:
        print(row["name"], row["medians"])
    if options.name:
        print(write_result(options.name, {"ranks": RANKS, "tries": rows}, {}))
    return int(any("error" in run for found in runs.values() for run in found))


def _connect(settings: Mapping[str, str]) -> dict[str, Any]:
    """One pair of processes: what rank 0 measured, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "nccl.log")
        processes = []
        for rank in range(RANKS):
            environment = {
                **os.environ, "CUDA_VISIBLE_DEVICES": str(rank), "NCCL_DEBUG": "INFO",
                "NCCL_DEBUG_FILE": str(log) if rank == 0 else os.devnull, **settings,
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "scripts.bench.connect_ranks", "--rank", str(rank)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
                )
            )  # fmt: skip
        try:
            host, guest = processes
            unique_id = host.stdout.readline() if host.stdout else ""
            said = [process.communicate(unique_id, timeout=LIMIT_S) for process in (guest, host)]
        except (subprocess.TimeoutExpired, BrokenPipeError) as error:
            return {"error": str(error)}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            return {"error": " | ".join(errors[-1500:] for _, errors in said)}
        found: dict[str, Any] = json.loads(said[1][0].splitlines()[-1])
        return found | _nccl_says(log.read_text("utf-8", "replace") if log.exists() else "")


def _nccl_says(text: str) -> dict[str, Any]:
    timings = re.search(r"Init timings.*?\((.*?)\)", text)
    channels = re.search(r"(\d+) coll channels.*?(\d+) p2p channels per peer", text)
    return {
        "library_s": {
            name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", timings.group(1) if timings else "")
        },
        "channels": [int(number) for number in channels.groups()] if channels else [],
    }  # fmt: skip


def _run_rank(rank: int) -> int:
    from loader.cuda_library import cuda_library
    from runtime.native_nccl import Communicator, Nccl
    from runtime.parallel.early import first_uses
    from runtime.timeline import Laps
    from runtime.torch_preload import find_torch

    gathered, exchanged = first_uses(RANKS)
    laps = Laps()
    path = Path(find_torch().site, "nvidia", "nccl", "lib", "libnccl.so.2")
    ctypes.CDLL(str(path))
    nccl = Nccl()
    laps.lap("library")
    driver = cuda_library()
    driver.use_context(driver.retain_context(0))
    laps.lap("context")
    if rank == 0:
        unique_id = nccl.new_id()
        print(unique_id.hex(), flush=True)
    else:
        unique_id = bytes.fromhex(sys.stdin.readline())
    laps.lap("id")
    ends = Communicator(nccl, driver, RANKS, rank, unique_id)
    laps.lap("init")
    part = max(*gathered, RANKS * exchanged)
    source, target = driver.alloc(part), driver.alloc(RANKS * part)
    laps.lap("memory")
    for count in gathered:
        ends.all_gather(source, target, count)
        driver.stream_synchronize(ends.stream)
        laps.lap(f"gather of {count >> 10} KiB")
    places = [(peer, source + peer * exchanged, exchanged) for peer in range(RANKS)]
    ends.exchange(places, [(peer, target + peer * exchanged, exchanged) for peer in range(RANKS)])
    driver.stream_synchronize(ends.stream)
    laps.lap("exchange")
    repeats = Laps()
    for count in (gathered[-1], gathered[0]):
        for _ in range(REPEATS):
            ends.all_gather(source, target, count)
        driver.stream_synchronize(ends.stream)
        repeats.lap(str(count))
    large_s, small_s = (seconds / REPEATS for seconds in repeats.seconds.values())
    report = {
        "version": nccl.version(), "seconds": laps.seconds, "total_s": round(sum(laps.seconds.values()), 4),
        "gather_gb_per_s": round(gathered[-1] * (RANKS - 1) / large_s / 1e9, 1),
        "small_gather_us": round(small_s * 1e6, 1),
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    ends.close()
    return 0


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    good = [run for run in runs if "error" not in run]
    if not good:
        return {}
    return {
        **{
            part: round(statistics.median(run["seconds"][part] for run in good), 4) for part in good[0]["seconds"]
        },
        **{
            name: round(statistics.median(run[name] for run in good), 4)
            for name in ("total_s", "gather_gb_per_s", "small_gather_us")
        },
    }  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--try", dest="tries", action="append", metavar="NAME:VARIABLE=VALUE[,…]")
    parser.add_argument("--name", default="connect_ranks", help="result file; '' writes none")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
