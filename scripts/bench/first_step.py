"""The first step of a fresh process against its third, by what was warmed behind the load.

    python -m scripts.bench.first_step DIRECTORY [--runs 2] [--variant all --variant none …]

Every start is a fresh `coldframe probe` process at 768x768, 124 frames and about 800 prompt tokens on a directory of
`scripts.bench.full_size`; variants take turns. Besides the first step, the entry is reported: a warm-up that delays it costs
more than it saves. Results go to `results/first_step.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import write_result

VARIANTS = ("none", "memory", "products", "memory,step", "all")
_COUNTED = 2  # steps before it are not warm


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    variants = args.variant or list(VARIANTS)
    reports: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for _ in range(args.runs):
        for variant in variants:
            reports[variant].append(_probe(args, variant))
            print(variant, json.dumps(_figures(reports[variant][-1:])), file=sys.stderr, flush=True)
    figures = {variant: _figures(found) for variant, found in reports.items()}
    print(json.dumps(figures, indent=1))
    if args.name:
        print(write_result(args.name, {"variants": figures, "steps": args.steps}, {}))
    return 0


def _probe(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """The report of one fresh process."""
    command = [sys.executable, "-m", "runtime.cli", "probe", str(args.directory), "--device", args.device]
    command += ["--size", args.size, "--num-frames", str(args.num_frames), "--schedule", args.schedule]
    command += ["--prompt", "a lamp sways in the rain ", "--prompt-repeat", str(args.prompt_repeat)]
    command += ["--steps", str(args.steps), "--wait"]
    environment = {**os.environ, "COLDFRAME_WARM_UP": variant}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _figures(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over some starts. extra: the first step less a warm one of the same process."""
    firsts = [report["steps_s"][0] for report in reports]
    warm = [statistics.median(report["steps_s"][_COUNTED:]) for report in reports]
    extra = statistics.median(first - later for first, later in zip(firsts, warm, strict=True))
    return {
        "first_step_s": round(statistics.median(firsts), 4),
        "warm_step_s": round(statistics.median(warm), 4),
        "extra_s": round(extra, 4),
        "share_of_eight_steps": round(extra / (8 * statistics.median(warm)), 5),
        "first_dit_entry_s": round(
            statistics.median(report["headline"]["first_dit_entry"] for report in reports), 4
        ),
        "warmed": [report["facts"].get("warm_up") for report in reports],
        "all_first_steps_s": firsts,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--variant", action="append", help=f"value of warm_up; default: {VARIANTS}")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--schedule", default="base-49")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="768x768")
    parser.add_argument("--num-frames", type=int, default=124)
    parser.add_argument("--prompt-repeat", type=int, default=85)
    parser.add_argument("--name", default="first_step", help="result file; empty for none")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
