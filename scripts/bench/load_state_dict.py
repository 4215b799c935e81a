"""The loader against safetensors, diffusers and transformers on the same files: seconds until the tensors are there.

    python -m scripts.bench.load_state_dict --work /mnt/w/load [--work /tmp/load] [--component transformer] [--runs 3]

A component of the published layout with real tensor sizes and fewer layers (about 20 GB) is written into each folder;
where that is a disk, its page cache is warm from the writing. Every load is a fresh process; the methods take turns, so
that drift of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.common import target, write_result
from scripts.bench.load_methods import METHODS
from scripts.bench.published_size import STEMS, write_component
from scripts.tiny_presets import TinyConfig, preset

GOAL = 2.0  # times safetensors' own rate
_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 120
_LAYERS = {"transformer": 15, "text_encoder": 17}  # 20.6 GB, 21.0 GB at released widths


def main() -> int:
    args = _parser().parse_args()
    figures: dict[str, Any] = {}
    for component in args.component or ["transformer"]:
        for work in args.work:
            figures[f"{component} in {work}"] = _bench(args, component, work)
    print(json.dumps(figures, indent=1))
    if args.preset == "full":
        print(write_result(args.name, figures, _targets(figures)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, action="append", required=True, help="folder for the files")
    parser.add_argument("--component", action="append", choices=sorted(STEMS))
    parser.add_argument("--method", action="append", choices=sorted(METHODS), help="default: all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--preset", default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help=f"default: {_LAYERS}")
    parser.add_argument(
        "--name", default="load_state_dict", help="name of the result file (full preset only)"
    )
    return parser


def _bench(args: argparse.Namespace, component: str, work: Path) -> dict[str, Any]:
    """Medians and runs of every method on one set of files, which is removed afterwards."""
    methods = args.method or list(METHODS)
    layers = args.layers or _LAYERS[component]
    try:
        size = write_component(work, component, _shortened(preset(args.preset), layers))
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for _ in range(args.runs):
            for method in methods:
                runs[method].append(_run(method, work / component, args.device))
                print(f"{method}: {runs[method][-1]}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _require_equal(runs)
    return {"bytes": size, "layers": layers, **{method: _medians(runs[method], size) for method in methods}}


def _shortened(config: TinyConfig, layers: int) -> TinyConfig:
    model = config.model
    return replace(
        config,
        model=replace(
            model,
            transformer=replace(model.transformer, num_layers=layers),
            text=replace(model.text, num_hidden_layers=layers),
        ),
    )


def _run(method: str, folder: Path, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.bench.load_methods", method, str(folder), "--device", device]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _require_equal(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """All methods loaded the same bytes, or the figures mean nothing."""
    found = {
        (run["tensors"], run["bytes"], run["byte_sum"]) for each in runs.values() for run in each
        if "error" not in run
    }  # fmt: skip
    if len(found) > 1:
        raise SystemExit(f"methods disagree about the contents: {sorted(found)}")


def _medians(runs: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    good = [run for run in runs if "error" not in run]
    if not good:
        return {"error": runs[0]["error"]}
    figures: dict[str, Any] = {"runs": [dict(run) for run in runs]}
    for name in ("call_s", "process_s"):
        if name in good[0]:
            figures[name] = statistics.median(run[name] for run in good)
    if "call_s" in figures:
        figures["gbps"] = size / figures["call_s"] / 1e9
    return figures


def _targets(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Load alone against load alone, on the first set of files."""
    first = next(iter(figures.values()))
    if not all("call_s" in first.get(method, {}) for method in ("stream_call", "safetensors")):
        return {}
    ratio = first["safetensors"]["call_s"] / first["stream_call"]["call_s"]
    return {"load_state_dict_vs_safetensors": target(ratio, GOAL, "higher")}


if __name__ == "__main__":
    raise SystemExit(main())
