"""First DiT entry with P GPUs against one: shared reader, a reader per rank, and diffusers on the same machine.

    python -m scripts.bench.parallel_start DIRECTORY [--ranks 2] [--runs 3] [--peer-work /dev/shm/peer --consume]
    python -m scripts.bench.parallel_start DIRECTORY --device cpu --size 64x64 --num-frames 22 --runs 1   # dry run

DIRECTORY holds shards: `python -m scripts.bench.full_size DIRECTORY --ranks 1 --ranks 2` (161 GB, memory-backed). Every
start is fresh processes with the variables that torchrun sets. diffusers loads the whole published form, 133 GB, in one
process. `results/parallel_start.json`.
"""

from __future__ import annotations

from runtime import bootstrap  # isort: skip  # t = 0

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import target, write_result

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "a lamp sways in the rain " * 111  # 1,000 tokens, as the peer


def main() -> int:
    args = _arguments()
    if args.rank_process:
        return run_rank(args)
    figures: dict[str, Any] = {"ranks": args.ranks, "size": args.size, "num_frames": args.num_frames}
    settings = {"one": (1, "shared"), "shared": (args.ranks, "shared"), "own": (args.ranks, "own")}
    for name, (ranks, reader) in settings.items():
        runs = [start_ranks(args, ranks, reader) for _ in range(args.runs)]
        figures[name] = {
            mark: _spread([run["headline"][mark] for run in runs]) for mark in runs[0]["headline"]
        }
        figures[name]["steps_s"] = [run["steps_s"] for run in runs]
        figures[name]["facts"] = runs[0]["facts"]
    one, shared = (figures[name]["first_dit_entry"]["median"] for name in ("one", "shared"))
    size = args.ranks
    targets = {f"sp{size}_first_dit_entry_vs_sp1": target(round(shared / one, 4), 1.1, "lower")}
    if args.peer_work:
        if args.consume:
            shutil.rmtree(args.directory)
        figures["diffusers"] = run_peer(args)
        ratio = figures["diffusers"]["first_dit_entry_s"] / shared
        targets[f"first_dit_entry_vs_diffusers_x{size}"] = target(round(ratio, 3), 14.0, "higher")
    print(json.dumps({"figures": figures, "targets": targets}, indent=1))
    if args.name:
        print(write_result(args.name, figures, targets))
    return 0


def run_rank(args: argparse.Namespace) -> int:
    """One rank of one start; rank 0 prints what it measured."""
    from runtime.settings import settings_from_environment

    settings = settings_from_environment(bundle=str(args.directory), device=args.device)
    body: dict[str, object] = {
        "prompt": PROMPT, "seed": 0, "size": args.size, "num_frames": args.num_frames
    }  # fmt: skip
    engine, prepared = bootstrap.start(settings, body)
    assert prepared is not None
    with engine:
        steps = _measure(engine, prepared, args.steps)
        engine.wait_resident(lambda done, total: None, every_s=0.01)
        engine.write_timeline()
        report = {"steps_s": steps, "headline": engine.timeline.headline(), "facts": engine.timeline.facts}
    sys.stdout.write(json.dumps(report, default=str) + "\n")
    return 0


def _measure(engine: Any, prepared: Any, steps: int) -> list[float]:
    from runtime.parallel.engine import RankEngine, take_steps

    if isinstance(engine, RankEngine):
        return engine.measure(prepared, steps)
    return take_steps(engine, engine.start_job(prepared), steps)


def start_ranks(args: argparse.Namespace, ranks: int, reader: str) -> dict[str, Any]:
    """Fresh processes of all ranks; rank 0's report."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "scripts.bench.parallel_start", *sys.argv[1:], "--rank-process"]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "COLDFRAME_HOST_READER": reader}
        if ranks > 1:
            environment |= {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, results, strict=True):
        if process.returncode:
            raise SystemExit(errors[-4000:])
    report: dict[str, Any] = json.loads(results[0][0].splitlines()[-1])
    return report


def run_peer(args: argparse.Namespace) -> dict[str, Any]:
    """diffusers' first DiT entry on this machine, by `scripts.bench.peer_diffusers`."""
    command = [
        sys.executable, "-m", "scripts.bench.peer_diffusers", "--work", str(args.peer_work), "--out",
        str(args.peer_work.parent), "--phase", "whole", "--device", args.device, "--size", args.size, "--num-frames",
        str(args.num_frames), "--preset", args.peer_preset, "--name", "",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(values), 4), "runs": [round(value, 4) for value in values]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="768x768")
    parser.add_argument("--num-frames", type=int, default=124)
    parser.add_argument(
        "--peer-work", type=Path, help="folder for the published form; measures diffusers too"
    )
    parser.add_argument(
        "--consume", action="store_true", help="remove DIRECTORY before the peer's files are written"
    )
    parser.add_argument("--peer-preset", default="full", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help="result file under scripts/bench/results/; none without")
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
