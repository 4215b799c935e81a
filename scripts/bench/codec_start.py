"""First DiT entries of one prepared directory, plain and then coded, at several storage rates, and device memory.

As a program it codes a directory: `python -m scripts.bench.codec_start PLAIN TARGET`; PLAIN is gone afterwards.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loader.manifest import read_manifest
from scripts.bench.cold_start import _probe
from scripts.bench.common import target
from scripts.bench.full_size import code_directory


def measure_starts(
    directory: Path, rates: list[float], runs: int, schedule: str, targets: dict[str, Any]
) -> dict[str, Any]:
    """The directory is coded in place between the two halves; a directory that is coded already is not accepted."""
    figures: dict[str, Any] = {"plain": _half(directory, rates, runs, schedule)}
    plain = directory.with_name(directory.name + ".plain")
    directory.rename(plain)
    started = time.monotonic()
    command = [sys.executable, "-m", "scripts.bench.codec_start", str(plain), str(directory)]
    report = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    figures["coding"] = {
        "seconds": round(time.monotonic() - started, 1),
        "plain_bytes": report["plain"],
        "stored_bytes": report["stored"],
        "coded_tensors": report["coded_tensors"],
        "equal": "every piece was decoded and compared before its file was finished; its CRC-32 is checked at each load",
    }
    figures["coded"] = _half(directory, rates, runs, schedule)
    _compare(figures, rates, targets)
    return figures


def _half(directory: Path, rates: list[float], runs: int, schedule: str) -> dict[str, Any]:
    args = Namespace(directory=directory, device="cuda", schedule=schedule, timelines=None)
    with _Memory() as memory:
        hot = [_probe(args, "--wait") for _ in range(runs)]
    steps = _probe(args, "--steps", "2", "--wait")
    rows = []
    for gbps in rates:
        run = _probe(args, "--storage-gbps", str(gbps))
        ideal = run["facts"]["entry_bytes"] / 1e9 / gbps
        rows.append({"gbps": gbps, "entry_s": run["headline"]["first_dit_entry"], "ideal_s": round(ideal, 3)})
        print(directory.name, rows[-1], file=sys.stderr, flush=True)
    manifest = read_manifest(directory)
    return {
        "entry_bytes": hot[0]["facts"]["entry_bytes"],
        "directory_bytes": sum(file.size for file in manifest.files),
        "hot": {
            name: {
                "median": round(statistics.median(values), 4),
                "runs": [round(value, 4) for value in values],
            }
            for name in ("first_dit_entry", "all_weights_resident")
            if (values := [run["headline"][name] for run in hot])
        },
        "steps_s": steps["steps_s"],
        "throttled": rows,
        "peak_device_mib": memory.peak_mib,
    }


def _compare(figures: dict[str, Any], rates: list[float], targets: dict[str, Any]) -> None:
    plain, coded = figures["plain"], figures["coded"]
    sooner = {
        str(before["gbps"]): round(before["entry_s"] / after["entry_s"], 4)
        for before, after in zip(plain["throttled"], coded["throttled"], strict=True)
    }
    hot = coded["hot"]["first_dit_entry"]["median"] / plain["hot"]["first_dit_entry"]["median"]
    figures["times_sooner"] = sooner
    # Behind the first step the denoiser's blocks are unpacked: what that adds to it.
    figures["first_step_s"] = {"plain": plain["steps_s"][0], "coded": coded["steps_s"][0]}
    figures["peak_device_mib"] = {"plain": plain["peak_device_mib"], "coded": coded["peak_device_mib"]}
    stored, whole = (
        sum(figures["coding"][key][name] for name in ("transformer", "text_encoder"))
        for key in ("stored_bytes", "plain_bytes")
    )
    targets["compressed_bytes_ratio"] = target(round(stored / whole, 4), 0.68, "lower")
    if 11.0 in rates:
        targets["first_dit_entry_11gbps_vs_raw"] = target(sooner["11.0"], 1.4, "higher")
    targets["first_dit_entry_hot_vs_raw"] = target(round(hot, 4), 1.03, "lower")


class _Memory:
    """Samples the device memory in use, all processes together, ten times a second."""

    def __init__(self) -> None:
        self.peak_mib = 0

    def __enter__(self) -> _Memory:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "100"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.peak_mib = max(self.peak_mib, int(line.split()[0]))

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()


if __name__ == "__main__":
    print(json.dumps(asdict(code_directory(Path(sys.argv[1]), Path(sys.argv[2])))))
