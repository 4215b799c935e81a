"""The peer: how long diffusers 0.42.1 takes from its first import to the first entry of the DiT, on this machine.

The published components together are larger than the memory of a one-GPU machine, so they are measured one after the
other, each from fresh files in memory, and added: diffusers loads them in sequence anyway. Every phase is a process of
its own and leaves a JSON file of its own as soon as it ends, so that a run that was cut off is of use. A machine with 256 GB
holds both: the phase `whole` loads both in one process.

    python -m scripts.bench.peer_diffusers --work /mnt/w/peer --out $OUT            # 133 GB in turn, tmpfs
    python -m scripts.bench.peer_diffusers --work /mnt/w/peer --phase whole         # 133 GB at once
    python -m scripts.bench.peer_diffusers --work /tmp/peer --preset test --device cpu --size 64x64 --tokens 20
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.common import write_result
from scripts.bench.published_size import write_component
from scripts.tiny_presets import preset

_ROOT = Path(__file__).resolve().parents[2]
_PHASE_TIMEOUT_S = 150
# Phase -> (component to generate, how the weights get to the device): `from_pretrained(...).to("cuda")`, or
# `from_pretrained(..., device_map="cuda")`. Where both were measured the faster one counts. Both libraries map the
# files, so neither way needs memory for a second copy.
_PHASES: dict[str, tuple[str, str]] = {
    "imports": ("", "to"),
    "text_encoder": ("text_encoder", "device_map"),
    "text_encoder_to": ("text_encoder", "to"),
    "transformer": ("transformer", "to"),
    "transformer_device_map": ("transformer", "device_map"),
    "whole": ("text_encoder transformer", ""),
}
_DEFAULT = ("imports", "text_encoder", "transformer")


def main() -> int:
    args = _parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    generated = ""
    try:
        for name in args.phase or _DEFAULT:
            component = _PHASES[name][0]
            if component and component != generated:
                figures[f"{component}_files"] = _generate(args, component)
                generated = component
            figures[name] = _run_phase(args, name)
            partial = args.out / f"peer_{name}.json"
            partial.write_text(json.dumps(figures[name], indent=1) + "\n", "utf-8")
            print(f"{name}: {json.dumps(figures[name])}", flush=True)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
    summary = _summarise(figures)
    figures["settings"] = _settings(args)
    if args.name and args.preset == "full":
        print(write_result(args.name, {**summary, **figures}, {}))
    print(json.dumps(summary))
    return 1 if any("error" in figure for figure in figures.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the files; removed at the end")
    parser.add_argument(
        "--out", type=Path, default=Path("/tmp/peer_diffusers"), help="folder of the JSON files"
    )
    parser.add_argument("--phase", action="append", choices=sorted(_PHASES), help=f"default: {_DEFAULT}")
    parser.add_argument("--preset", default="full")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--size", default="768x768")
    parser.add_argument("--num-frames", type=int, default=124)
    parser.add_argument(
        "--name", default="peer_diffusers", help="name of the result file (full preset only); empty: none"
    )
    return parser


def _generate(args: argparse.Namespace, component: str) -> dict[str, float]:
    """Fresh files of one component, or of several; those of the one before are gone first, memory holds one set."""
    shutil.rmtree(args.work, ignore_errors=True)
    started = time.monotonic()
    size = sum(write_component(args.work, name, preset(args.preset)) for name in component.split())
    return {"bytes": size, "generate_s": round(time.monotonic() - started, 2)}


def _run_phase(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The figures of one fresh process, or its error."""
    component, placement = _PHASES[name]
    phase = name if name == "whole" else component or "imports"
    command = [sys.executable, "-m", "scripts.bench.peer_phases", phase, "--directory", str(args.work)]
    command += ["--placement", placement] if placement else []
    command += [part for key, value in _settings(args).items() for part in (f"--{key}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True,
            timeout=_PHASE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return {"error": f"more than {_PHASE_TIMEOUT_S} s", "stderr": str(error.stderr or "")[-2000:]}
    if done.returncode:
        return {"error": f"exit code {done.returncode}", "stderr": done.stderr[-4000:]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "placement": placement, "wall_s": time.monotonic() - started}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("preset", "device", "tokens", "size", "num_frames")
    return {name.replace("_", "-"): getattr(args, name) for name in names}


def _summarise(figures: Mapping[str, Any]) -> dict[str, float]:
    """Time to the first DiT entry: of one process, or imports once (median of the processes), both loads, the first encode."""
    if "first_dit_entry_s" in figures.get("whole", {}):
        whole = figures["whole"]
        return {
            "first_dit_entry_s": whole["first_dit_entry_s"],
            "imports_s": whole["imports"]["all_s"],
            "text_encoder_load_s": whole["text_encoder"]["load_s"],
            "first_encode_s": whole["text_encoder"]["first_encode_s"],
            "transformer_load_s": whole["transformer"]["load_s"],
            "warm_step_s": whole["transformer"]["warm_step_s"],
        }
    ran = {name: figures[name] for name in _PHASES if name in figures and "error" not in figures[name]}
    encoders = [figure for name, figure in ran.items() if name.startswith("text_encoder")]
    transformers = [figure for name, figure in ran.items() if name.startswith("transformer")]
    if not encoders or not transformers:
        return {}
    parts = {
        "imports_s": statistics.median(figure["imports"]["all_s"] for figure in ran.values()),
        "text_encoder_load_s": min(figure["load_s"] for figure in encoders),
        "first_encode_s": min(figure["first_encode_s"] for figure in encoders),
        "transformer_load_s": min(figure["load_s"] for figure in transformers),
    }
    warm_step_s = min(figure["warm_step_s"] for figure in transformers)
    return {"first_dit_entry_s": sum(parts.values()), **parts, "warm_step_s": warm_step_s}


if __name__ == "__main__":
    raise SystemExit(main())
