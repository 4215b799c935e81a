"""Cold starts of a full-size prepared directory: N fresh processes, floors, throttled storage, warm steps.

    python -m scripts.bench.cold_start DIRECTORY [--runs 5] [--throttle 11 --throttle 5.5 ...] [--part floors ...]

Write the directory first with `scripts.bench.full_size` into memory-backed storage. Every start is a fresh
`coldframe probe` process at 768x768, 124 frames and a prompt of about 1,000 tokens. Results go to
`results/cold_start.json`; the diffusers figures of `peer_diffusers` are joined by `scripts.bench.compare_cold_start`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import storage, target, write_result

SHAPE = ("--size", "768x768", "--num-frames", "124")
PROMPT = ("--prompt", "a lamp sways in the rain ", "--prompt-repeat", "111")  # 1,000 tokens, as the peer
PARTS = ("floors", "starts", "steps", "throttle")
THROTTLES_GBPS = (40.0, 20.0, 11.0, 5.5, 2.0, 1.0)


def main() -> int:
    args = _arguments()
    figures: dict[str, Any] = {
        "shape": [*SHAPE, *PROMPT],
        "schedule": args.schedule,
        "storage": storage(args.directory),
    }
    targets: dict[str, Any] = {}
    if "floors" in args.parts:
        figures["import_torch_s"] = _spread([_import_torch() for _ in range(args.runs)])
        figures["ring_alone"] = [_ring_alone(args.directory) for _ in range(args.ring_runs)]
    if "starts" in args.parts:
        runs = [_probe(args, "--wait", timeline=f"start-{i}" if i < 2 else "") for i in range(args.runs)]
        figures["starts"] = _marks(runs)
        figures["facts"] = runs[0]["facts"]
        figures["rows"] = runs[0]["rows"]
        targets["first_dit_entry_s"] = target(figures["starts"]["first_dit_entry"]["median"], 7.2, "lower")
    if "floors" in args.parts and "starts" in args.parts:
        floor = _floor(figures)
        figures["floor_s"] = floor
        entry = figures["starts"]["first_dit_entry"]["median"]
        targets["first_dit_entry_vs_floor"] = target(round(entry / floor, 4), 1.15, "lower")
    if "steps" in args.parts:
        _steps(args, figures, targets)
    if "throttle" in args.parts:
        _throttle(args, figures, targets)
    path = write_result(args.name, figures, targets)
    print(json.dumps({"figures": _short(figures), "targets": targets}, indent=1))
    print(path)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--name", default="cold_start", help="name of the result file")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ring-runs", type=int, default=2)
    parser.add_argument("--schedule", default="base-49")
    parser.add_argument("--part", dest="parts", action="append", choices=PARTS)
    parser.add_argument("--throttle", type=float, action="append", metavar="GBPS")
    parser.add_argument("--step-schedule", default="base-8", help="schedule of the step measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timelines", type=Path, help="folder for the timelines of the first starts")
    args = parser.parse_args()
    args.parts = args.parts or [part for part in PARTS if part != "throttle" or args.throttle]
    args.throttle = args.throttle or list(THROTTLES_GBPS)
    return args


def probe_command(directory: Path, device: str, schedule: str) -> list[str]:
    """A start with the request that all of these benches use."""
    command = [sys.executable, "-m", "runtime.cli", "probe", str(directory), *SHAPE, *PROMPT]
    return [*command, "--device", device, "--schedule", schedule]


def _probe(args: argparse.Namespace, *options: str, schedule: str = "", timeline: str = "") -> dict[str, Any]:
    """One fresh process; its report, with the wall time from before the process existed."""
    command = [*probe_command(args.directory, args.device, schedule or args.schedule), *options]
    if timeline and args.timelines:
        args.timelines.mkdir(parents=True, exist_ok=True)
        command += ["--timeline", str(args.timelines / f"{timeline}.json")]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**report, "process_s": round(time.monotonic() - started, 3)}


def _import_torch() -> float:
    code = "import time; t = time.monotonic(); import torch; print(time.monotonic() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


_RING_ALONE = """
import json, sys, time
t = time.monotonic()
from pathlib import Path
from loader.manifest import read_manifest
from loader.load_plan import plan_load
from loader.stream import start
directory = Path(sys.argv[1])
manifest = read_manifest(directory)
groups = manifest.orders[sys.argv[2]]
with start(plan_load(manifest, groups), directory, device=sys.argv[3]) as stream:
    while stream.failure is None and not all(stream.is_ready(group) for group in groups):
        time.sleep(0.002)
    if stream.failure is not None:
        raise stream.failure
    seconds = time.monotonic() - t
    marks = [mark.name for mark in stream.marks() if not mark.name.startswith("group ")]
print(json.dumps({"seconds": seconds, "bytes": stream.plan.total_bytes, "marks": marks, "torch": "torch" in sys.modules}))
"""


def _ring_alone(directory: Path, order: str = "t2va/base-49", device: str = "cuda") -> dict[str, Any]:
    """The loader without torch in the process: seconds from the first instruction until all weights are enqueued."""
    done = subprocess.run(
        [sys.executable, "-c", _RING_ALONE, str(directory), order, device],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**report, "gbps": round(report["bytes"] / report["seconds"] / 1e9, 2)}


def _floor(figures: dict[str, Any]) -> float:
    """max(bytes needed for entry over the ring's rate alone, import torch alone)."""
    rate = statistics.median(run["gbps"] for run in figures["ring_alone"])
    figures["entry_gb"] = _entry_bytes_gb(figures)
    return float(max(figures["entry_gb"] / rate, figures["import_torch_s"]["median"]))


def _entry_bytes_gb(figures: dict[str, Any]) -> float:
    """Encoder layers, prelude and the first table: what the conditioner and the first forward's entry wait for."""
    return float(figures["facts"]["entry_bytes"]) / 1e9


def _steps(args: argparse.Namespace, figures: dict[str, Any], targets: dict[str, Any]) -> None:
    """First step behind the upload against (all resident + one warm step), and cold against warm denoising."""
    runs = [_probe(args, "--steps", "3", "--wait") for _ in range(min(args.runs, 3))]
    figures["first_step"] = _marks(runs)
    resident, done = (
        figures["first_step"][name]["median"] for name in ("all_weights_resident", "first_step_done")
    )
    warm_step = statistics.median(run["steps_s"][-1] for run in runs)
    figures["warm_step_s"] = warm_step
    targets["first_step_done_ratio"] = target(round(done / (resident + warm_step), 4), 0.6, "lower")
    request = _probe(args, "--steps", "8", "--repeat", "3", schedule=args.step_schedule)
    cold, warm = sum(request["steps_s"]), sum(request["warm_steps_s"][-1])
    figures["denoise"] = {"cold_s": request["steps_s"], "warm_s": request["warm_steps_s"]}
    targets["cold_vs_warm_denoise"] = target(round(abs(cold / warm - 1), 5), 0.005, "lower")


def _throttle(args: argparse.Namespace, figures: dict[str, Any], targets: dict[str, Any]) -> None:
    rows = []
    for gbps in args.throttle:
        runs = [
            _probe(args, "--storage-gbps", str(gbps), timeline="" if index else f"throttle-{gbps:g}")
            for index in range(3 if gbps > 10 else 1)  # what differs from start to start is 0.1 s
        ]
        entries = [run["headline"]["first_dit_entry"] for run in runs]
        entry, ideal = statistics.median(entries), runs[0]["facts"]["entry_bytes"] / 1e9 / gbps
        rows.append(
            {"gbps": gbps, "entry_s": entry, "ideal_s": round(ideal, 3), "ratio": round(entry / ideal, 4), "runs": entries}
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    figures["throttle"] = rows
    slow = [row["ratio"] for row in rows if row["gbps"] <= 11]
    if slow:
        targets["throttle_11_vs_line"] = target(max(slow), 1.05, "lower")


def _marks(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for run in runs for name in run["headline"])
    return {
        name: _spread([run["headline"][name] for run in runs if name in run["headline"]]) for name in names
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "runs": [round(value, 4) for value in values],
    }


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in ("facts", "shape")}


if __name__ == "__main__":
    raise SystemExit(main())
