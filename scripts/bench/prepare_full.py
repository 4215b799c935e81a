"""prepare and validate at released widths against the storage's own copy rate, in one run.

    python -m scripts.bench.prepare_full --storage DIR [--storage DIR …] [--gib N]
    python -m scripts.bench.prepare_full --components DIR [--budget-s S]   # all 133 GB, one component after the other

The transformer has its released widths and as many layers as the storage has room for; the other networks are tiny, so
that the whole command runs as a user runs it. Weight files are cut so that there are as many as at the released size:
a file's digest is one chain, so their number decides how much can be done at the same time. Per storage: write the checkpoint, copy its files with as many threads as
prepare uses (flushed to disk), prepare and validate them. Before copy and prepare the files leave the page cache. The
first storage gives the targets; name a folder on the disk first and memory-backed storage after it.

`--components` prepares the transformer and then the text encoder at released size, each beside tiny other networks, in
memory-backed storage of 110 GB (`prepare_parts`), three to four minutes on 16 cores. It is over after `--budget-s` seconds: a
component that does not fit into what is left, or into the storage, is named and left out, and one that runs out of time
leaves the figures it has. Results: `prepare_components.json`, written after every component; `complete` says whether
all of it is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prepare.families.minimax_h3.published import TRANSFORMER, published_tensors
from prepare.families.minimax_h3.recipe import build_recipe
from prepare.file_plan import plan_weight_files
from scripts.bench.common import target, write_result
from scripts.bench.prepare_measured import memory
from scripts.bench.prepare_parts import (
    Part,
    part_figures,
    parts,
    pieces_that_fit,
    prepared_bytes,
    reconcile,
)
from scripts.bench.progress import Progress
from scripts.bench.published_size import write_component
from scripts.tiny_checkpoint import write_tiny_checkpoint
from scripts.tiny_presets import TinyConfig, preset

ROOT = Path(__file__).resolve().parents[2]
_PIECE = 8 << 20
_MAX_THREADS = 16
_FILE_BYTES_PER_LAYER = (8 << 30) / 50
_PROCESS_BYTES = (
    6 << 30
)  # of memory that memory-backed storage must leave: prepare's own, torch, the rest of the machine
_PART_FOLDER = "part"  # of --components; everything in it goes
_OCCUPIED = 2.9  # checkpoint, its copy or what prepare makes of it, and a reserve; in checkpoints


def config_with_layers(num_layers: int) -> TinyConfig:
    """Released transformer widths with `num_layers` layers; every other network tiny."""
    small, full = preset("test"), preset("full")
    transformer = dataclasses.replace(
        full.model.transformer,
        num_layers=num_layers,
        text_dim=small.model.text.hidden_size,
        in_channels=small.model.video_vae.latent_channels,
        audio_in_channels=small.model.audio_vae.latent_channels,
    )
    return TinyConfig(
        dataclasses.replace(small.model, transformer=transformer), small.num_base_tokens, full.shard_bytes
    )


def write_checkpoint(folder: Path, config: TinyConfig) -> int:
    """A tree that prepare takes; returns the bytes of its files."""
    write_tiny_checkpoint(folder, "test", "diffusers", seed=0)
    shutil.rmtree(folder / "transformer")
    write_component(folder, TRANSFORMER, config)
    return sum(path.stat().st_size for path in _files(folder))


def bench_storage(folder: Path, gib: float) -> dict[str, object]:
    """All figures of one storage."""
    folder.mkdir(parents=True, exist_ok=True)
    room = min(gib * 2**30, shutil.disk_usage(folder).free / _OCCUPIED)
    fixed, step = _source_bytes(0), _source_bytes(1) - _source_bytes(0)
    config = config_with_layers(max(1, min(50, int((room - fixed) / step))))
    started = time.monotonic()
    source = folder / "checkpoint"
    num_bytes = write_checkpoint(source, config)
    written = time.monotonic() - started
    _drop_from_cache(_files(source))
    copy_s = _copy(source, folder / "copy")
    shutil.rmtree(folder / "copy")
    _drop_from_cache(_files(source))
    file_bytes = int(_FILE_BYTES_PER_LAYER * config.model.transformer.num_layers)
    measured = measure(source, folder / "prepared", file_bytes)
    if "failed" in measured:
        raise RuntimeError(f"prepare: {measured['failed']}")
    shutil.rmtree(source)
    shutil.rmtree(folder / "prepared")
    total = measured["prepare_s"] + measured["validate_s"]
    return {
        "storage": str(folder),
        "threads": _threads(),
        "layers": config.model.transformer.num_layers,
        "max_file_bytes": file_bytes,
        "bytes_in": num_bytes,
        "bytes_out": measured["bytes_out"],
        "write_s": written,
        "copy_s": copy_s,
        "prepare_s": measured["prepare_s"],
        "validate_s": measured["validate_s"],
        "cpu_s": measured["cpu_s"],
        "copy_gbps": num_bytes / copy_s / 1e9,
        "prepare_gbps": num_bytes / measured["prepare_s"] / 1e9,
        "prepare_and_validate_gbps": num_bytes / total / 1e9,
        "prepare_vs_copy": copy_s / measured["prepare_s"],
        "prepare_and_validate_vs_copy": copy_s / total,
        "prepare_peak_extra_gib": measured["peak"] / 2**30,
        "peak_extra_with_validate_gib": measured["peak_with_validate"] / 2**30,
    }


def measure(source: Path, target: Path, file_bytes: int, limit_s: float | None = None) -> dict[str, Any]:
    """Prepare and validate in a fresh process: seconds of both, processor seconds, bytes written, peak memory.

    Returns: also `failed`, with fewer figures, where the process failed or ran out of time.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "scripts.bench.prepare_measured",
        str(source),
        str(target),
        str(file_bytes),
    ]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    ending = ""
    try:
        text, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        text, _ = child.communicate()
        ending = f"out of time after {limit_s:.0f} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    measured: dict[str, Any] = {"cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}
    for line in text.splitlines():
        measured |= json.loads(line)
    if ending or child.returncode:
        measured["failed"] = ending or f"exit code {child.returncode}"
    return measured


class Components:
    """All parts one after the other, within the storage and the time there is.

    Attributes:
        runs: figures of the parts that were measured. missing: part and reason for the others.
    """

    def __init__(
        self,
        folder: Path,
        sizes: str,
        pieces: int,
        progress: Progress,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self._free_bytes = free_bytes or storage_left
        self._folder, self._sizes, self._progress = folder.absolute() / _PART_FOLDER, sizes, progress
        folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        free = self._free_bytes(folder)
        self.runs: list[dict[str, Any]] = []
        self.missing: list[dict[str, Any]] = []
        self._parts = parts(sizes, pieces or pieces_that_fit(sizes, free))
        progress.say(
            f"{free / 1e9:.1f} GB of room in {folder}, {len(self._parts)} parts, {progress.budget_s:.0f} s"
        )

    def run(self) -> None:
        for part in self._parts:
            try:
                obstacle = self._obstacle(part)
                figures = {"failed": obstacle} if obstacle else self._measure(part)
            except Exception as error:  # noqa: BLE001  a part that fails is named; the others and the results remain
                traceback.print_exc()
                figures = {"failed": f"{type(error).__name__}: {error}"}
            finally:
                self._clear()
            if "failed" in figures:
                self.missing.append({"part": part.name, **figures})
            else:
                self.runs.append(figures)
            print(json.dumps(figures), flush=True)
            self._progress.say(f"{part.name}: {figures.get('failed', 'done')}")
            self.write()

    def write(self) -> None:
        """The results so far."""
        if self._sizes != "full":
            return
        peak = [run["peak_extra_gib"] for run in self.runs]
        targets = {"prepare_peak_extra_gib": target(max(peak), 6.0, "lower")} if peak else {}
        self._progress.say(str(write_result("prepare_components", self.figures(), targets)))

    def figures(self) -> dict[str, Any]:
        return {
            "complete": len(self.runs) == len(self._parts),
            "parts_planned": [part.name for part in self._parts],
            "missing": self.missing,
            "storage": str(self._folder.parent),
            "threads": _threads(),
            "seconds": round(self._progress.seconds, 1),
            "parts": self.runs,
            **reconcile(self.runs, self._sizes),
        }

    def _obstacle(self, part: Part) -> str:
        """Why the part is not even begun."""
        free = self._free_bytes(self._folder.parent)
        if free < part.room_bytes:
            return f"needs {part.room_bytes / 1e9:.1f} GB of storage and memory, {free / 1e9:.1f} are free"
        if self._progress.left_s < part.predicted_s:
            return f"takes about {part.predicted_s:.0f} s, {self._progress.left_s:.0f} are left"
        return ""

    def _measure(self, part: Part) -> dict[str, Any]:
        say, started = self._progress.say, time.monotonic()
        source, prepared = self._folder / "checkpoint", self._folder / "prepared"
        say(
            f"{part.name}: writing {part.stored_bytes / 1e9:.1f} GB; about {part.predicted_s:.0f} s for all of it"
        )
        num_bytes = part.write(source, self._progress.deadline)
        written = time.monotonic() - started
        say(f"{part.name}: written in {written:.1f} s; preparing and validating")
        measured = measure(source, prepared, part.max_file_bytes, max(1.0, self._progress.left_s))
        if "failed" in measured:
            return {"bytes_in": num_bytes, "write_s": round(written, 2), **measured}
        return part_figures(part, num_bytes, prepared_bytes(prepared, part.component), written, measured)

    def _clear(self) -> None:
        """Also of what an interrupted prepare, or an interrupted bench before this one, left beside its target."""
        started = time.monotonic()
        if self._folder.exists():
            shutil.rmtree(self._folder)
            self._progress.say(f"storage cleared in {time.monotonic() - started:.1f} s")


def storage_left(folder: Path) -> int:
    """Bytes that can be written there; in memory-backed storage not more than the machine has memory for, with room left
    for the processes themselves."""
    free = shutil.disk_usage(folder).free
    if _is_memory_backed(folder):
        free = min(free, memory("/proc/meminfo", "MemAvailable") - _PROCESS_BYTES)
    return max(0, free)


def _is_memory_backed(folder: Path) -> bool:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    above = [(len(mount), kind) for mount, kind in mounts if folder.resolve().is_relative_to(mount)]
    return max(above)[1] in {"tmpfs", "ramfs"} if above else False


def planned_bytes() -> dict[str, int]:
    """Bytes of the released checkpoint and of what prepare makes of it, by component; from the plans, nothing written."""
    model = preset("full").model
    result = {
        f"published/{component}": sum(spec.num_bytes for spec in tensors.values())
        for component, tensors in published_tensors(model).items()
    }
    for plan in plan_weight_files(
        build_recipe(model, "diffusers", ("t2va",), "BF16", "F16").groups, "minimax_h3"
    ):
        key = f"prepared/{plan.component}"
        result[key] = result.get(key, 0) + plan.num_bytes
    return result


def _source_bytes(num_layers: int) -> int:
    tensors = published_tensors(config_with_layers(num_layers).model)[TRANSFORMER]
    return sum(spec.num_bytes for spec in tensors.values())


def _threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _drop_from_cache(paths: Iterable[Path]) -> None:
    """Flush files and let the kernel forget them; no effect on memory-backed storage."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _copy(source: Path, destination: Path) -> float:
    """Seconds to copy all files in pieces, from many threads, until they are on disk."""
    pieces: list[tuple[int, int, int, int]] = []
    descriptors: list[int] = []
    started = time.monotonic()
    for path in _files(source):
        copied = destination / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.open(path, os.O_RDONLY), os.open(copied, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        descriptors += [reader, writer]
        size = path.stat().st_size
        pieces += [(reader, writer, begin, min(_PIECE, size - begin)) for begin in range(0, size, _PIECE)]
    with ThreadPoolExecutor(_threads()) as pool:
        list(pool.map(_copy_piece, pieces))
        list(pool.map(os.fsync, descriptors[1::2]))
    seconds = time.monotonic() - started
    for descriptor in descriptors:
        os.close(descriptor)
    return seconds


def _copy_piece(piece: tuple[int, int, int, int]) -> None:
    reader, writer, begin, size = piece
    while size:
        data = os.pread(reader, size, begin)
        count = os.pwrite(writer, data, begin)
        begin, size = begin + count, size - count


def _components(args: argparse.Namespace) -> int:
    bench = Components(args.components, args.preset, args.pieces, Progress(args.budget_s))
    bench.run()
    print(json.dumps(bench.figures()["sums"], indent=1))
    return 0 if not bench.missing else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", type=Path, action="append", default=[])
    parser.add_argument("--gib", type=float, default=16.0, help="largest checkpoint to write on each storage")
    parser.add_argument("--components", type=Path, help="folder in memory-backed storage of 110 GB")
    parser.add_argument("--preset", default="full", help="sizes of --components; results for full only")
    parser.add_argument(
        "--pieces", type=int, default=0, help="cut the transformer's layers; default: as it fits"
    )
    parser.add_argument("--budget-s", type=float, default=300, help="seconds that --components may take")
    args = parser.parse_args(arguments)
    if args.components:
        return _components(args)
    if not args.storage:
        parser.error("name a --storage or --components")
    runs = []
    for storage in args.storage:
        runs.append(bench_storage(storage, args.gib))
        print(json.dumps(runs[-1], indent=1), flush=True)
    first = runs[0]
    targets = {
        "prepare_vs_disk_copy": target(first["prepare_and_validate_vs_copy"], 0.70, "higher"),  # type: ignore[arg-type]
        "prepare_peak_extra_gib": target(
            max(run["prepare_peak_extra_gib"] for run in runs),  # type: ignore[type-var, arg-type]
            6.0,
            "lower",
        ),
    }
    figures = {"runs": runs, "planned_bytes": planned_bytes()}
    print(write_result("prepare_full", figures, targets))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
