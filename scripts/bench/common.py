"""Results of benches: one JSON file each, with the command, the machine, the versions, the figures and the targets."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "pyarrow",
    "simpy",
    "diffusers",
    "transformers",
    "cuda-bindings",
    "nvidia-libnvcomp-cu13",
    "triton",
    "av",
)


def target(value: float, goal: float, better: str, **more: object) -> dict[str, object]:
    """One target: `met` follows from value, goal and `better` ("lower" or "higher")."""
    if better not in {"lower", "higher"}:
        raise ValueError(f"better = {better!r}; allowed: 'lower', 'higher'")
    met = value <= goal if better == "lower" else value >= goal
    return {"value": value, "goal": goal, "better": better, "met": bool(met), **more}


def write_result(
    name: str,
    figures: Mapping[str, object],
    targets: Mapping[str, Mapping[str, object]],
    command: Sequence[str] | str | None = None,
) -> Path:
    """Writes `results/<name>.json` beside its name and renames it.

    Args:
        figures: free form, JSON-ready.
        targets: stable target name → `target(...)`.
        command: how to run the bench again; default: this process's arguments.
    Returns: the path written.
    """
    if command is None:
        command = ["python", "-m", _module_name(), *sys.argv[1:]]
    result = {
        "name": name,
        "command": command if isinstance(command, str) else " ".join(command),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "figures": figures,
        "targets": targets,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
    partial.replace(path)
    return path


def bundle_kernels(bundle: Path | None) -> Sequence[Mapping[str, Any]]:
    """Compiled operators of a prepared directory; none without one."""
    if bundle is None:
        return ()
    from loader.manifest import read_manifest

    return read_manifest(bundle).kernels


def ranks_command(size: int) -> list[str]:
    """How to run this process's script again on `size` ranks."""
    return ["python", "-m", "runtime.server.ranks", str(size), "python", "-m", _module_name(), *sys.argv[1:]]


def _module_name() -> str:
    """Dotted name of the script that runs, for `python -m`."""
    script = Path(sys.argv[0]).resolve()
    root = Path(__file__).resolve().parents[2]
    if script.is_relative_to(root):
        return ".".join(script.relative_to(root).with_suffix("").parts)
    return script.stem


def commit() -> str:
    """What the variable BENCH_COMMIT says, for machines that get a copy of the files; else the current commit, with `+changes`
    if tracked files differ from it, or "unknown" outside a repository.
    """
    named = os.environ.get("BENCH_COMMIT")
    if named:
        return named
    root = Path(__file__).parents[2]
    found = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not found:
        return "unknown"
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return found + ("+changes" if changed else "")


def machine() -> dict[str, object]:
    """Processor, cores this process may use, memory, and GPUs by name."""
    gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": gpus,
        "system": platform.platform(),
    }


def storage(path: Path) -> dict[str, str]:
    """File system that holds `path`, and its mount options; copies out of a tmpfs are faster with huge pages."""
    real = path.resolve()
    best = ("", "unknown", "")
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text("utf-8").splitlines() if mounts.is_file() else []:
        _, place, kind, options, *_ = line.split(" ")
        if real.is_relative_to(place) and len(place) > len(best[0]):
            best = (place, kind, options)
    return {"type": best[1], "options": best[2]}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Python and the installed packages that figures may depend on; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(command: Sequence[str]) -> str:
    """Standard output of a short command; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
