"""What each trim of `import torch` is worth, in fresh processes, variants interleaved.

Also measured, in processes of their own: where the time of a plain import goes (`-X importtime`, largest own times),
what its files cost (finding and reading, unmarshalling), and for how long another thread of the process stands still.
Rounds stop early when the next one would not fit into `--budget-s`; the result says how many were made.
"""

from __future__ import annotations

import argparse
import importlib
import json
import marshal
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from runtime.torch_import import DEFAULT_TRIMS, DEFERRED, TRIMS, import_torch
from scripts.bench.common import target, write_result

ROOT = Path(__file__).parents[2]
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "gc": ("gc",),
    "realpath": ("realpath",),
    "frames": ("frames",),
    "preload": ("preload",),
    "preload+bytecode": ("preload", "bytecode"),
    "meta": ("meta",),
    "gc+meta": ("gc", "meta"),
    "gc+frames+deferred": ("gc", "frames", *DEFERRED),
    "all but preload": tuple(name for name in TRIMS if name not in {"preload", "bytecode"}),
    "all": TRIMS,
    "default": tuple(DEFAULT_TRIMS),
}
_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| \s*(\S+)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="processes per variant (default 5)")
    parser.add_argument("--budget-s", type=float, default=140.0, help="start no round that would end later")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: cuda if a driver is there"
    )
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=None)
    parser.add_argument("--names", action="store_true", help="print the modules of a trimmed import and stop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if Path("/dev/nvidiactl").exists() else "cpu")
    if options.child:
        print(json.dumps(CHILDREN[options.child.partition(":")[0]](options.child.partition(":")[2], device)))
        return 0
    if options.names:
        print("\n".join(run_child("names:all", device)))
        return 0
    start_s = time.monotonic()
    variants = options.variants or _distinct_variants()
    extras = measure_once(device)
    samples = measure(variants, options.runs, device, options.budget_s - (time.monotonic() - start_s))
    table = {name: summary(rows) for name, rows in samples.items()}
    print_table(table, extras)
    targets = {}
    if {"plain", "default"} <= set(table):
        ratio = table["default"]["wall_s"]["median"] / table["plain"]["wall_s"]["median"]
        targets["import_trimmed_vs_plain"] = target(round(ratio, 3), 0.6, "lower")
    load = os.getloadavg()[0]  # of the last minute: on a busy machine only `cpu_s` can be compared
    figures = {
        "device": device,
        "load_average": round(load, 2),
        "variants": table,
        "samples": samples,
        **extras,
    }
    print(write_result(f"import_torch_{device}", figures, targets))
    return 0


def _distinct_variants() -> list[str]:
    """All variants, `all` left out where it is the default."""
    return [name for name in VARIANTS if name != "all" or set(VARIANTS["all"]) != set(VARIANTS["default"])]


# ---- children: each runs in a fresh interpreter and returns something JSON-ready


def child_import(variant: str, device: str) -> dict[str, Any]:
    """Import with one variant's trims, then the first calls that a worker makes."""
    wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    done = import_torch(device, trims=VARIANTS[variant])
    row: dict[str, Any] = {
        "wall_s": (time.monotonic_ns() - wall_ns) / 1e9,
        "cpu_s": (time.process_time_ns() - cpu_ns) / 1e9,
        "modules": len(sys.modules),
        "record": done.facts(),
    }
    if variant in {"plain", "default"}:
        row["first_calls_s"] = first_calls(device)
    return row


def first_calls(device: str) -> dict[str, float]:
    """Seconds of the first calls in the process, each with a device synchronisation: must not grow by a trim."""
    import torch
    import torch.nn.functional as F

    heads = torch.ones(1, 4, 128, 64)

    calls: dict[str, Callable[[], object]] = {
        "context": lambda: torch.zeros(1, device=device),
        "linear": lambda: F.linear(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)),
        "attention": lambda: F.scaled_dot_product_attention(
            heads.to(device), heads.to(device), heads.to(device)
        ),
        "conv3d": lambda: F.conv3d(
            torch.ones(1, 4, 4, 8, 8, device=device), torch.ones(4, 4, 3, 3, 3, device=device)
        ),
        "distributed": lambda: importlib.import_module("torch.distributed").is_available(),
    }
    seconds = {}
    for name, call in calls.items():
        start_ns = time.monotonic_ns()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[name] = round((time.monotonic_ns() - start_ns) / 1e9, 5)
    return seconds


def child_names(variant: str, device: str) -> list[str]:
    """Modules whose bytecode an import reads, in order: the source of `runtime/torch_module_names.py`."""
    import_torch(device, trims=[trim for trim in VARIANTS[variant] if trim not in {"preload", "bytecode"}])
    tops = {"torch", "torchgen", "numpy", "typing_extensions", "tqdm"}
    return [name for name, _ in _loaded_sources() if name.partition(".")[0] in tops]


def child_files(variant: str, device: str) -> dict[str, float]:
    """Seconds that the files of an import cost, done once more: stat and read, then unmarshal."""
    import_torch(device, trims=VARIANTS[variant])
    sources = _loaded_sources()
    start_ns = time.monotonic_ns()
    contents = []
    for _, spec in sources:
        Path(spec.origin).stat()
        contents.append(Path(spec.cached).read_bytes() if Path(spec.cached).exists() else b"")
    read_ns = time.monotonic_ns()
    for content in contents:
        if content:
            marshal.loads(memoryview(content)[16:])
    return {
        "files": len(contents),
        "megabytes": round(sum(map(len, contents)) / 1e6, 2),
        "read_s": round((read_ns - start_ns) / 1e9, 4),
        "unmarshal_s": round((time.monotonic_ns() - read_ns) / 1e9, 4),
    }


def _loaded_sources() -> list[tuple[str, Any]]:
    specs = [(name, getattr(module, "__spec__", None)) for name, module in list(sys.modules.items())]
    return [(n, s) for n, s in specs if s is not None and isinstance(s.loader, SourceFileLoader) and s.cached]


def child_stall(variant: str, device: str) -> dict[str, float]:
    """How long a thread that wants to run every millisecond (an uploader, say) had to wait during the import."""
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.wait(0.001):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    record = import_torch(device, trims=VARIANTS[variant])
    done.set()
    thread.join()
    late = [gap for gap in gaps if gap > 0.02]
    return {
        "seconds": round(record.seconds, 3),
        "longest_s": round(max(gaps, default=0.0), 4),
        "late_sum_s": round(sum(late), 3),
        "late_count": len(late),
    }


CHILDREN: dict[str, Callable[[str, str], Any]] = {
    "import": child_import,
    "names": child_names,
    "files": child_files,
    "stall": child_stall,
}


def run_child(what: str, device: str) -> Any:
    """Run `--child what` in a fresh interpreter and return what it printed."""
    command = [sys.executable, "-m", "scripts.bench.import_torch", "--child", what, "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- the parent


def measure(
    variants: Sequence[str], runs: int, device: str, budget_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Rounds over all variants, each in a fresh process; at least one round."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    start_s = time.monotonic()
    for index in range(runs):
        elapsed_s = time.monotonic() - start_s
        if index and elapsed_s * (index + 1) / index > budget_s:
            print(f"{index} of {runs} rounds: the next would end after the budget", file=sys.stderr)
            break
        for name in variants:
            samples[name].append(run_child(f"import:{name}", device))
    return samples


def measure_once(device: str) -> dict[str, Any]:
    """Figures that need one process each. The first process also brings files into the page cache."""
    run_child("import:plain", device)
    return {
        "importtime_plain": import_times(),
        "files_plain": run_child("files:plain", device),
        "files_default": run_child("files:default", device),
        "stall_plain": run_child("stall:plain", device),
        "stall_default": run_child("stall:default", device),
    }


def import_times(largest: int = 20) -> dict[str, Any]:
    """Own times of modules in one plain import, as `-X importtime` sees them (it slows the import itself)."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import torch"], capture_output=True, text=True, check=True
    )
    rows = [(int(m[1]), m[3]) for m in map(_LINE.match, done.stderr.splitlines()) if m]
    rows.sort(reverse=True)
    return {
        "modules": len(rows),
        "sum_s": round(sum(own for own, _ in rows) / 1e6, 3),
        "largest_own_ms": {name: round(own / 1e3, 1) for own, name in rows[:largest]},
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, least and greatest of wall and processor time; the last run's record."""
    result: dict[str, Any] = {"runs": len(rows), "modules": rows[-1]["modules"], "record": rows[-1]["record"]}
    for key in ("wall_s", "cpu_s"):
        values = [row[key] for row in rows]
        result[key] = {
            "median": round(statistics.median(values), 3),
            "min": round(min(values), 3),
            "max": round(max(values), 3),
        }
    if "first_calls_s" in rows[0]:
        names = rows[0]["first_calls_s"]
        result["first_calls_s"] = {
            n: statistics.median(row["first_calls_s"][n] for row in rows) for n in names
        }
    return result


def print_table(table: Mapping[str, Mapping[str, Any]], extras: Mapping[str, Any]) -> None:
    print(
        f"{'variant':20} {'wall s: median':>15} {'min':>7} {'max':>7} {'cpu s':>7} {'modules':>8}  not taken"
    )
    for name, row in table.items():
        wall, record = row["wall_s"], row["record"]
        asked = {trim: why for trim, why in record["skipped"].items() if why != "not asked for"}
        print(
            f"{name:20} {wall['median']:15.3f} {wall['min']:7.3f} {wall['max']:7.3f} "
            f"{row['cpu_s']['median']:7.3f} {row['modules']:8d}  {asked or ''}"
        )
        if "first_calls_s" in row:
            print(f"{'':20} first calls, s: {row['first_calls_s']}")
    for name, value in extras.items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    sys.exit(main())
