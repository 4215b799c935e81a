"""All benches of a rented GPU host in one call, in order, each with its own time limit.

    python -m scripts.bench.suite cold peer --work /mnt/w --out /tmp/out --seconds 1200

Parts: `tests`, `ring`, `cold`, `peer`, `loader`, `imports`, `kernels`, `step`, `decode`, `codec`, `prepare` on one GPU, `tests-2`,
`ranks` and `ranks-start` on two. `peer` needs diffusers, `loader` diffusers and PyAV, `decode` and `tests-2` PyAV, `codec` nvCOMP.

`--work` is a folder in memory-backed storage (110 GB for `cold` and `ring`, whose directory `step` and `codec` use too; `codec`
rewrites it and `peer` removes it to have room, so these come last; 160 GB for both parts on two GPUs, of which `ranks-start` is
last): a tmpfs mounted with `huge=always`, whose pages are then copied as fast as those that a disk's file system caches today;
small pages are slower (`host_memory` times both).

Bytecode of this project and of torch is compiled first where it is missing, because a machine image without it would add that
to every start. A bench that fails or runs out of time is reported, and the next one runs. New files of `results/`, and the end of
every log, are in `--out` whenever a bench ends.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.common import RESULTS

ROOT = Path(__file__).resolve().parents[2]
_OURS = ("kernels", "loader", "prepare", "runtime", "scripts")
_THEIRS = (
    "torch", "torchgen", "numpy", "PIL", "tokenizers", "cuda", "nvidia", "safetensors", "sympy", "mpmath", "filelock", "jinja2",
    "networkx", "fsspec", "typing_extensions", "transformers", "diffusers", "accelerate", "huggingface_hub", "tqdm", "regex",
    "packaging", "yaml", "requests", "av", "importlib_metadata",
)  # fmt: skip
_LOG_TAIL = 3000  # characters of a log that are printed


@dataclass(frozen=True)
class Bench:
    """One command: arguments of `python`, with {work} filled in; seconds: its limit."""

    name: str
    arguments: tuple[str, ...]
    seconds: int
    needs: str = ""  # a path that must exist, else it is left out
    makes: str = ""  # a path that says that it was done before


def _module(name: str, *arguments: str, seconds: int, needs: str = "", makes: str = "") -> Bench:
    return Bench(name, ("-m", f"scripts.bench.{name}", *arguments), seconds, needs, makes)


_BUNDLE = "{work}/bundle"
_MANIFEST = "{work}/bundle/manifest.json"
_FULL = _module(
    "full_size", _BUNDLE, "--schedule", "base-49", "--schedule", "base-8", "--architecture", "sm_90a", seconds=200,
    makes=_MANIFEST,
)  # fmt: skip


def gpu_test_files(mark: str, folder: Path = ROOT / "tests") -> list[str]:
    """Paths of the test files that have this mark, `gpu` or `gpu2`, by their text.

    Only these are collected: others import packages that a rented host may lack, and one that cannot be imported ends
    the whole run.
    """
    return sorted(
        str(path)
        for path in folder.rglob("test_*.py")
        if re.search(rf"\bmark\.{mark}\b", path.read_text("utf-8"))
    )


def _gpu_tests(mark: str, seconds: int) -> Bench:
    command = ("-m", "pytest", "-q", "-m", mark, "--durations", "8", "-p", "no:cacheprovider")
    return Bench(f"{mark} tests", (*command, *gpu_test_files(mark)), seconds)


_RANKS = "{work}/ranks"
_RANKS_MANIFEST = "{work}/ranks/manifest.json"
_FULL_OF_RANKS = _module(
    "full_size", _RANKS, "--ranks", "1", "--ranks", "2", "--architecture", "sm_90a", seconds=200, makes=_RANKS_MANIFEST,
)  # fmt: skip


def _on_two_ranks(name: str, *arguments: str, seconds: int) -> Bench:
    """With the launcher of this project: torch is imported by the ranks alone, and they end with it."""
    launch = ("-m", "runtime.server.ranks", "2", sys.executable, "-m", f"scripts.bench.{name}")
    return Bench(name, (*launch, "--bundle", _RANKS, *arguments), seconds, needs=_RANKS_MANIFEST)


PARTS: Mapping[str, tuple[Bench, ...]] = {
    "tests": (_gpu_tests("gpu", seconds=240),),
    "tests-2": (_gpu_tests("gpu2", seconds=150),),
    "ring": (
        _module("host_memory", "--work", "{work}", seconds=60),
        _FULL,
        _module("ring_rates", _BUNDLE, seconds=120, needs=_MANIFEST),
    ),
    "cold": (
        _FULL,
        _module(
            "cold_start", _BUNDLE, "--part", "floors", "--part", "starts", "--part", "steps", "--part", "throttle",
            "--timelines", "{out}/timelines", seconds=400, needs=_MANIFEST,
        ),
    ),
    "peer": (
        Bench("make room", ("-c", "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)", _BUNDLE), 30),
        _module("peer_diffusers", "--work", "{work}/peer", seconds=240),
        _module("compare_cold_start", seconds=30),
    ),
    "loader": (
        _module("load_state_dict", "--work", "{work}/load", seconds=240),
        _module(
            "load_state_dict", "--work", "{work}/load", "--component", "text_encoder", "--runs", "2",
            "--name", "load_state_dict_transformers", seconds=150,
        ),
        Bench("demo bundle", ("-m", "runtime.cli", "demo", "--folder", "{work}/demo"), 120),
        _module(
            "stress_starts", "{work}/demo/bundle", "--device", "cuda", "--starts", "200", "--fresh", "20",
            "--kills", "25", "--pairs", "3", seconds=300, needs="{work}/demo/bundle",
        ),
    ),
    "imports": (_module("import_torch", seconds=160),),
    "kernels": (_module("fused_operators", seconds=120),),
    "step": (
        _module("warm_step", seconds=180),
        _module("first_step", _BUNDLE, seconds=200, needs=_MANIFEST),
    ),
    "decode": (_module("decode", "--work", "{work}", seconds=220),),
    "codec": (
        _module("codec", "--part", "decode", "--part", "ratio", "--part", "repeat", seconds=120),
        _module("codec", "--part", "start", "--directory", _BUNDLE, seconds=400, needs=_MANIFEST),
    ),
    "prepare": (_module("prepare_full", "--components", "{work}/prepare", "--budget-s", "300", seconds=320),),
    "ranks": (
        _module("connect_ranks", seconds=60),
        _FULL_OF_RANKS,
        _on_two_ranks("parallel_denoise", "--steps", "1", "--name", "sp2_denoise", seconds=180),
        _on_two_ranks("parallel_decode", "--repeat", "1", "--name", "vae_decode_2gpu", seconds=90),
    ),
    "ranks-start": (
        _FULL_OF_RANKS,
        _module(
            "parallel_start", _RANKS, "--name", "sp2_start", "--peer-work", "{work}/peer", "--consume", seconds=330,
            needs=_RANKS_MANIFEST,
        ),
    ),
}  # fmt: skip


def main() -> int:
    """Runs the parts that are asked for; 1 if any bench failed."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    _compile_bytecode()
    failed = []
    for part in args.parts:
        for bench in PARTS[part]:
            left = end - time.monotonic()
            if left < 5 or not run(bench, args.work, args.out, min(bench.seconds, left)):
                failed.append(bench.name)
    print(f"failed or left out: {', '.join(failed) or 'nothing'}", flush=True)
    return int(bool(failed))


def run(bench: Bench, work: Path, out: Path, limit_s: float) -> bool:
    """One bench in a process of its own; its log and new results are in `out` afterwards. Whether it succeeded."""
    fill = {"work": str(work), "out": str(out)}
    if bench.needs and not Path(bench.needs.format(**fill)).exists():
        print(f"== {bench.name}: left out, {bench.needs.format(**fill)} is not there", flush=True)
        return False
    if bench.makes and Path(bench.makes.format(**fill)).exists():
        print(f"== {bench.name}: {bench.makes.format(**fill)} is there already", flush=True)
        return True
    command = [sys.executable, *(argument.format(**fill) for argument in bench.arguments)]
    before, started, log = _results(), time.monotonic(), out / f"{bench.name.replace(' ', '_')}.log"
    print(f"== {time.strftime('%H:%M:%S')} {bench.name}", flush=True)
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, 9)
            process.wait()
    ending = "out of time" if code is None else f"exit code {code}"
    print(log.read_text("utf-8", "replace")[-_LOG_TAIL:])
    print(f"== {bench.name}: {ending} after {time.monotonic() - started:.0f} s", flush=True)
    for path, stamp in _results().items():
        if before.get(path) != stamp:
            shutil.copy2(path, out / path.name)
    return code == 0


def _results() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in RESULTS.glob("*.json")}


def _compile_bytecode() -> None:
    """Of this project and of what a start of ours or of a peer imports, where it is missing and can be written."""
    paths = [str(ROOT / name) for name in _OURS]
    for name in _THEIRS:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            paths += list(spec.submodule_search_locations or [str(spec.origin)])
    for path in paths:
        if not os.access(path, os.W_OK):
            continue
        if Path(path).is_dir():
            compileall.compile_dir(path, quiet=2, workers=0)
        else:
            compileall.compile_file(path, quiet=2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--work", type=Path, required=True, help="folder in memory-backed storage")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--seconds", type=float, default=3600, help="stop starting benches after this long")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
