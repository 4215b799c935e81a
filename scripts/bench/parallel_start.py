"""First DiT entry with P GPUs against one, and against diffusers on the same machine.

    python -m scripts.bench.parallel_start DIRECTORY [--ranks 2] [--runs 3] [--peer-work /mnt/w/peer --consume]
    python -m scripts.bench.parallel_start DIRECTORY --device cpu --size 64x64 --num-frames 22 --runs 1   # dry run

DIRECTORY holds shards: `python -m scripts.bench.full_size DIRECTORY --ranks 1 --ranks 2` (156 GB, memory-backed). Every
start is fresh processes with the variables that torchrun sets. Settings take turns: one rank, P ranks as they come, and P ranks
with each `--try NAME:VARIABLE=VALUE[,…]`. diffusers loads the whole published form, 133 GB, in one process.
`results/<name>.json`, written after every round and after diffusers.
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
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import target, write_result
from scripts.bench.start_settings import parse_try

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "a lamp sways in the rain " * 111  # 1,000 tokens, as the peer
TRIES = (
    "own readers:COLDFRAME_HOST_READER=own",
    "torch connects:COLDFRAME_NCCL=torch",
    "virtual memory handles:NCCL_CUMEM_ENABLE=1",
)
START_S = 120.0
LEAVE_S = 8.0  # for the others, once one rank has failed: their guards need 5


class StartFailed(Exception):
    """What the ranks wrote to their standard errors."""


def main() -> int:
    args = _arguments()
    if args.rank_process:
        return run_rank(args)
    tries: list[tuple[str, Mapping[str, str]]] = [
        ("one rank", {}),
        (f"{args.ranks} ranks", {}),
        *map(parse_try, args.tries or TRIES),
    ]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in tries}
    failures: list[dict[str, str]] = []
    figures: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    for _ in range(args.runs):
        for name, settings in tries:
            try:
                found = start_ranks(args, 1 if name == "one rank" else args.ranks, settings)
                runs[name].append(found)
                print(name, found["headline"], flush=True)
            except StartFailed as error:
                failures.append({"start": name, "error": str(error)[-2000:]})
                print(name, failures[-1]["error"], flush=True)
        figures, targets = _summarise(args, tries, runs, failures)
        _write(args, figures, targets)
    several = figures["tries"][1]["medians"].get("first_dit_entry")
    if args.peer_work:
        if args.consume:
            shutil.rmtree(args.directory)
        try:
            figures["diffusers"] = run_peer(args)
            if several:
                ratio = figures["diffusers"]["first_dit_entry_s"] / several
                targets[f"first_dit_entry_vs_diffusers_x{args.ranks}"] = target(
                    round(ratio, 3), 14.0, "higher"
                )
        except StartFailed as error:
            failures.append({"start": "diffusers", "error": str(error)[-4000:]})
        _write(args, figures, targets)
    print(json.dumps({"figures": figures, "targets": targets}, indent=1), flush=True)
    return int(bool(failures))


def _summarise(
    args: argparse.Namespace,
    tries: Sequence[tuple[str, Mapping[str, str]]],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    failures: Sequence[Mapping[str, str]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and targets of all starts so far. The second try is what ships, the first one rank."""
    rows = [{"name": name, "settings": settings, **summary(runs[name])} for name, settings in tries]
    figures = {
        "ranks": args.ranks, "size": args.size, "num_frames": args.num_frames, "failures": failures, "tries": rows,
    }  # fmt: skip
    one, several = (row["medians"].get("first_dit_entry") for row in rows[:2])
    if not (one and several):
        return figures, {}
    return figures, {f"sp{args.ranks}_first_dit_entry_vs_sp1": target(round(several / one, 4), 1.1, "lower")}


def _write(args: argparse.Namespace, figures: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """After every round: a later one may be cut off."""
    if args.name:
        write_result(args.name, figures, targets)


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the marks that every run has, and the runs."""
    marks = set.intersection(*(set(run["headline"]) for run in runs)) if runs else set()
    return {
        "medians": {
            mark: round(statistics.median(run["headline"][mark] for run in runs), 4) for mark in sorted(marks)
        },
        "runs": list(runs),
    }


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
        report = {
            "steps_s": steps, "headline": engine.timeline.headline(), "facts": engine.timeline.facts,
            **_loading(engine),
        }  # fmt: skip
    sys.stdout.write(json.dumps(report, default=str) + "\n")
    return 0


def _loading(engine: Any) -> dict[str, Any]:
    """How the weights came, and when the nodes of the start ran, in seconds."""
    (stream, *_), timeline = engine.weights.streams, engine.timeline
    return {
        "path": stream.path,
        "loader": [mark.name for mark in stream.marks() if not mark.name.startswith("group ")],
        "spans": {
            span.name: [round((at - timeline.origin_ns) / 1e9, 3) for at in (span.start_ns, span.end_ns)]
            for span in timeline.spans
            if not span.name.startswith("group ")
        },
    }


def _measure(engine: Any, prepared: Any, steps: int) -> list[float]:
    from runtime.parallel.engine import RankEngine, take_steps

    if isinstance(engine, RankEngine):
        return engine.measure(prepared, steps)
    return take_steps(engine, engine.start_job(prepared), steps)


def start_ranks(args: argparse.Namespace, ranks: int, settings: Mapping[str, str]) -> dict[str, Any]:
    """Fresh processes of all ranks; rank 0's report. Raises: StartFailed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "scripts.bench.parallel_start", *sys.argv[1:], "--rank-process"]
    common = {**os.environ, **settings}
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    with tempfile.TemporaryDirectory() as folder:
        processes, logs = [], []
        for rank in range(ranks):
            environment = common if ranks == 1 else common | {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": threads, "COLDFRAME_RANK_LIMIT_S": "60",
            }  # fmt: skip
            logs.append([Path(folder, f"{rank}.{name}") for name in ("out", "err")])
            with logs[-1][0].open("wb") as out, logs[-1][1].open("wb") as err:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err))
        is_done = _wait(processes)
        said, errors = ([path[kind].read_text("utf-8", "replace") for path in logs] for kind in (0, 1))
    if not is_done or any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        raise StartFailed(f"exit codes {codes}: " + " | ".join(text[-1500:] for text in errors))
    return _last_object(said[0])


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Until all have ended. False: one failed or time ran out, and what was left has been killed."""
    deadline = time.monotonic() + START_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + LEAVE_S)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
                process.wait()
            return False
        time.sleep(0.02)
    return True


def _last_object(text: str) -> dict[str, Any]:
    """The last line that is a JSON object: libraries may write to standard output as well."""
    line = next((line for line in reversed(text.splitlines()) if line.startswith("{")), "")
    if not line:
        raise StartFailed(f"no report: {text[-1000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def run_peer(args: argparse.Namespace) -> dict[str, Any]:
    """diffusers' first DiT entry on this machine, by `scripts.bench.peer_diffusers`. Raises: StartFailed."""
    command = [
        sys.executable, "-m", "scripts.bench.peer_diffusers", "--work", str(args.peer_work), "--out",
        str(args.peer_work.parent), "--phase", "whole", "--device", args.device, "--size", args.size, "--num-frames",
        str(args.num_frames), "--preset", args.peer_preset, "--name", "",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartFailed(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return _last_object(done.stdout)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--try", dest="tries", action="append", metavar="NAME:VARIABLE=VALUE[,…]")
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
