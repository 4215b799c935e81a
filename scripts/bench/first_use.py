"""What a start pays on first use once torch is imported, and what could make it less, in fresh processes.

    python -m scripts.bench.first_use [DIRECTORY] [--runs 5] [--variant now --variant none …]

All variants but `parts` run the nodes of a start (`runtime.nodes`) without its load, then the conditioner with all of its weights
there (zeros), then everything a second time; `parts` times every first use alone, in order. Variants take turns, one process at a
time; no round is begun that would end after `--budget-s`. `parts` comes last, once, and only with room for it. A variant that fails
is left out from then on and named with its last words. DIRECTORY is any prepared directory of the released size: only its
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
from collections.abc import Callable, Mapping, Sequence
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
    "now": Variant(),
    "native": Variant(("--native", "kernels,operators")),
    "none": Variant(("--native", "none")),
    "early": Variant(("--early",)),
    "early, none": Variant(("--early", "--native", "none")),
    "all native": Variant(("--native", "all")),
    "spinning": Variant((), (("GOMP_SPINCOUNT", "300000"),)),
    "switching": Variant(("--switch-s", "0.0005")),
    "parts": Variant(("--parts",)),
}
"""`now` is a start as it ships. `native`: without the products of a step. `early`: nothing has arrived when torch is ready, so a step is
warmed. `spinning`: threads of OpenMP as they are without `OMP_WAIT_POLICY`."""

DEFAULT = ("now", "native", "none", "early", "parts")
"""About 2.2 s a process: five rounds and the parts in a minute. The others are for a second call."""

_ONCE = ("parts",)


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
        reports, failed = measure(
            args.variant or DEFAULT,
            lambda name: run_child(args, directory, VARIANTS[name]),
            args.runs,
            args.budget_s,
        )
    figures = {name: summary(found) for name, found in reports.items() if found}
    print(json.dumps({"variants": figures, "failed": failed}, indent=1))
    targets = {}
    if "now" in figures and "entry_after_torch_s" in figures["now"]:
        targets["entry_after_torch_s"] = target(figures["now"]["entry_after_torch_s"], _GOAL_S, "lower")
    if args.name:
        result = {"variants": figures, "failed": failed, "directory_s": round(made_s, 1)}
        print(write_result(args.name, result, targets))
    return 1 if failed else 0


Reports = dict[str, list[dict[str, Any]]]


def measure(
    variants: Sequence[str],
    run: Callable[[str], dict[str, Any] | str],
    runs: int,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Reports, dict[str, str]]:
    """Reports of each variant's processes, and the last words of each variant that failed.

    Args:
        run: one process of a variant; its report, or its last words.
    """
    reports: Reports = {name: [] for name in variants}
    failed: dict[str, str] = {}
    begin = clock()

    def one(name: str) -> None:
        report = run(name)
        if isinstance(report, str):
            failed[name] = report
            print(f"{name} failed: {report}", file=sys.stderr)
            return
        reports[name].append(report)
        entry = report.get("entry_after_torch_s")
        print(f"{name}: entry {entry} s after torch, {report['process_s']} s in all", file=sys.stderr)

    def is_time(share: float) -> bool:
        return (clock() - begin) * (1 + share) <= budget_s

    several = [name for name in variants if name not in _ONCE]
    for done in range(runs if several else 0):
        if done and not is_time(1 / done):
            print(f"{done} of {runs} rounds: the next would end after the budget", file=sys.stderr)
            break
        for name in several:
            if name not in failed:
                one(name)
    for name in variants:
        if name in _ONCE and (not several or is_time(0)):
            one(name)
    return reports, failed


def run_child(args: argparse.Namespace, directory: Path, variant: Variant) -> dict[str, Any] | str:
    """One fresh process; its last words if it failed or hung."""
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
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no end within {args.limit_s} s"
    except subprocess.CalledProcessError as error:
        return f"exit status {error.returncode}: {error.stderr[-1500:]}"
    except (ValueError, IndexError) as error:
        return f"no report: {error}"
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
    parser.add_argument("--budget-s", type=float, default=52.0, help="start no round that would end later")
    parser.add_argument("--limit-s", type=float, default=30.0, help="of one process")
    parser.add_argument("--name", default="first_use", help="of the result; empty: none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
