"""What a start pays on first use once torch is imported, and what could make it less, in fresh processes.

    python -m scripts.bench.first_use [DIRECTORY] [--runs 5] [--variant now --variant native …]

`parts` times every first use alone, in order; all other variants run the nodes of a start (`runtime.nodes`) without its load, then the
conditioner with all of its weights there (zeros), then everything a second time. Variants take turns, one process at a
time; no round is begun that would end after `--budget-s`. DIRECTORY is any prepared directory of the released size: only its
manifest, tokenizer and kernels are read; without one, those are made in a temporary folder. Results go to
`results/first_use.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.common import target, write_result
from scripts.bench.weightless import write_weightless

ROOT = Path(__file__).parents[2]
_GOAL_S = 0.45  # from torch ready to the entry, if that is ready at 1.5 s and the entry is to be below 2 s


class Variant(NamedTuple):
    """Arguments of the child and what is added to its environment."""

    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


VARIANTS: Mapping[str, Variant] = {
    "parts": Variant(("--parts",)),
    "now": Variant(),
    "native": Variant(("--native", "libraries,operators")),
    "native libraries": Variant(("--native", "libraries")),
    "native with plan": Variant(("--native", "all")),
    "native, switching": Variant(("--native", "libraries,operators", "--switch-s", "0.0005")),
    "switching": Variant(("--switch-s", "0.0005")),
    "no gc": Variant(("--no-gc",)),
    "serial": Variant(("--serial",)),
    "no early products": Variant(("--without", "library warm-up")),
    "cublaslt": Variant(("--blas", "cublaslt")),
    "early": Variant(("--early",)),
    "eager loading": Variant((), (("CUDA_MODULE_LOADING", "EAGER"),)),
}
DEFAULT = ("parts", "now", "native", "native libraries", "switching")
"""About 2.2 s a process: five rounds fit into a minute. The others are for a second call."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory = args.directory or Path(folder) / "bundle"
        if args.directory is None:
            write_weightless(
                directory, args.preset, "base-8", ("sm_90a",) if args.device == "cuda" else ()
            )  # fmt: skip
        made_s = time.monotonic() - started
        reports = measure(args, directory, args.variant or DEFAULT)
    figures = {name: summary(found) for name, found in reports.items() if found}
    print(json.dumps(figures, indent=1))
    targets = {}
    if "now" in figures and "entry_after_torch_s" in figures["now"]:
        targets["entry_after_torch_s"] = target(figures["now"]["entry_after_torch_s"], _GOAL_S, "lower")
    if args.name:
        print(write_result(args.name, {"variants": figures, "directory_s": round(made_s, 1)}, targets))
    return 0 if all(reports.values()) else 1


def measure(
    args: argparse.Namespace, directory: Path, variants: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Reports of each variant's processes; a variant that fails is left out from then on, and said so."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    failed: set[str] = set()
    begin = time.monotonic()
    for done in range(args.runs):
        if done and (time.monotonic() - begin) * (done + 1) / done > args.budget_s:
            print(f"{done} of {args.runs} rounds: the next would end after the budget", file=sys.stderr)
            break
        for name in variants:
            if name in failed:
                continue
            report = run_child(args, directory, VARIANTS[name])
            if report is None:
                failed.add(name)
                continue
            reports[name].append(report)
            entry = report.get("entry_after_torch_s")
            print(f"{name}: entry {entry} s after torch, {report['process_s']} s in all", file=sys.stderr)
    return reports


def run_child(args: argparse.Namespace, directory: Path, variant: Variant) -> dict[str, Any] | None:
    """One fresh process; None if it failed or hung (its last words go to stderr)."""
    command = [sys.executable, "-m", "scripts.bench.first_use_child", str(directory), *variant.arguments]
    command += ["--device", args.device, "--size", args.size, "--num-frames", str(args.num_frames)]
    environment = {**os.environ, **dict(variant.environment)}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            timeout=args.limit_s,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{' '.join(command)} failed: {error}\n{str(error.stderr)[-3000:]}", file=sys.stderr)
        return None
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the processes of one variant; facts of the last."""
    result: dict[str, Any] = {"runs": len(reports)}
    for key in ("torch_ready_s", "graph_after_torch_s", "entry_after_torch_s", "process_s"):
        values = [report[key] for report in reports if key in report]
        if values:
            result[key] = round(statistics.median(values), 4)
            result[f"all_{key}"] = values
    for table in ("seconds", "spans"):
        result[table] = {
            name: {
                field: round(statistics.median(r[table][name][field] for r in reports), 4) for field in first
            }
            for name, first in reports[-1].get(table, {}).items()
            if all(name in report[table] for report in reports)
        }
    return {**result, "facts": reports[-1]["facts"]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--runs", type=int, default=5, help="processes per variant (default 5)")
    parser.add_argument("--variant", action="append", choices=tuple(VARIANTS), default=[])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--preset", default="full", help="sizes, without DIRECTORY")
    parser.add_argument("--size", default="768x768")
    parser.add_argument("--num-frames", type=int, default=124)
    parser.add_argument("--budget-s", type=float, default=60.0, help="start no round that would end later")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of one process")
    parser.add_argument("--name", default="first_use", help="of the result; empty: none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
