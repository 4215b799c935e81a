"""Which threads, parts and ring move a full-size directory to the device fastest, the loader alone.

    python -m scripts.bench.ring_rates DIRECTORY --rounds 2        # about five seconds a variant and round

Every load is a fresh process without torch that takes the groups of one order. Variants take turns, so that a neighbour on the
host troubles all of them. The rate is that of the bytes after the first GiB: context, first fill and pinning are not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import storage, write_result

MIB = 1 << 20
# threads, part bytes, slot bytes, ring bytes
Variant = tuple[int, int, int, int]
VARIANTS: Sequence[Variant] = (
    (13, 4 * MIB, 16 * MIB, 2048 * MIB),
    (13, 16 * MIB, 16 * MIB, 2048 * MIB),
    (13, 8 * MIB, 16 * MIB, 2048 * MIB),
    (13, 2 * MIB, 16 * MIB, 2048 * MIB),
    (10, 4 * MIB, 16 * MIB, 2048 * MIB),
    (16, 4 * MIB, 16 * MIB, 2048 * MIB),
    (13, 4 * MIB, 16 * MIB, 256 * MIB),
    (13, 4 * MIB, 8 * MIB, 2048 * MIB),
    (13, 4 * MIB, 16 * MIB, 4096 * MIB),
)
_CHILD = """
import json, sys, time
began = time.monotonic_ns()
from pathlib import Path
from loader.load_plan import plan_load
from loader.manifest import read_manifest
from loader.options import StreamOptions
from loader.stream import start
directory, order, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
threads, part, slot, ring = map(int, sys.argv[4:])
manifest = read_manifest(directory)
groups = manifest.orders[order]
options = StreamOptions(threads=threads, part_bytes=part, slot_bytes=slot, ring_bytes=ring)
with start(plan_load(manifest, groups), directory, device=device, options=options) as stream:
    while stream.failure is None and not all(stream.is_ready(group) for group in groups):
        time.sleep(0.002)
    if stream.failure is not None:
        raise stream.failure
    done = [(mark.end_ns, mark.bytes) for mark in stream.marks() if mark.name.startswith("group ")]
    path, total = stream.path, stream.plan.total_bytes
done.sort()
moved, first = 0, None
for end, size in done:
    moved += size
    if first is None and moved >= 1 << 30:
        first = (end, moved)
first = first or done[0]
span = max(done[-1][0] - first[0], 1)
print(json.dumps({"seconds": (done[-1][0] - began) / 1e9, "gbps": (moved - first[1]) / span, "bytes": total, "path": path}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--order", default="t2va/base-49")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--name", default="ring_rates")
    options = parser.parse_args(arguments)
    runs: list[list[dict[str, Any]]] = [[] for _ in VARIANTS]
    for _ in range(options.rounds):
        for found, variant in zip(runs, VARIANTS, strict=True):
            found.append(_load(options, variant))
    rows = [_row(variant, found) for variant, found in zip(VARIANTS, runs, strict=True)]
    for row in rows:
        print(json.dumps(row))
    print(write_result(options.name, {"storage": storage(options.directory), "variants": rows}, {}))
    return 0


def _load(options: argparse.Namespace, variant: Variant) -> dict[str, Any]:
    command = [
        sys.executable,
        "-c",
        _CHILD,
        str(options.directory),
        options.order,
        options.device,
        *map(str, variant),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(variant: Variant, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    threads, part, slot, ring = variant
    return {
        "threads": threads,
        "part_mib": part / MIB,
        "slot_mib": slot / MIB,
        "ring_mib": ring / MIB,
        "path": runs[0]["path"],
        "gbps": [round(run["gbps"], 1) for run in runs],
        "seconds": round(statistics.median(run["seconds"] for run in runs), 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
