"""Many starts in a row, killed starts and starts at the same time: what is left behind, and does anything grow.

    python -m scripts.bench.stress_starts BUNDLE [--device cpu] [--starts 200] [--fresh 200] [--kills 50] [--pairs 5]

BUNDLE is a small prepared directory. Exit code 1 if anything was left. docs/loader.md says who cleans up what.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.common import target, write_result

SHAPE = ("--size", "64x64", "--num-frames", "22")
_ROOT = Path(__file__).resolve().parents[2]
_TAG = "STRESS_STARTS_TAG"  # in the environment of a start and all its descendants
_TIMEOUT_S = 120.0
_KILLED_WITHIN_S = 10.0  # a process ends some time after its SIGKILL


class LeftBehind(Exception):
    """A start ended and something of it did not."""


@dataclass(frozen=True)
class Holdings:
    """What this process holds that a start could leak."""

    descriptors: int
    threads: int
    children: int
    shared_mappings: int

    @classmethod
    def now(cls) -> Holdings:
        maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
        tasks = Path("/proc/self/task")
        children = [(task / "children").read_text("utf-8").split() for task in tasks.iterdir()]
        return cls(
            descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
            threads=threading.active_count(),
            children=sum(map(len, children)),
            shared_mappings=sum("memfd:coldframe" in line for line in maps),
        )


def stream_starts(bundle: Path, count: int, device: str = "cpu", warm: int = 10) -> dict[str, Any]:
    """`count` loads of the whole directory in this process, after `warm` that let allocators reach their size.

    Raises: LeftBehind: descriptors, threads, children or shared mappings differ afterwards.
    """
    for _ in range(warm):
        _stream_once(bundle, device)
    gc.collect()  # what others in this process have left is not these loads'; they must do without
    before, resident_kib, gpu_mib = Holdings.now(), _resident_kib(), _gpu_used_mib(device)
    started = time.monotonic()
    for _ in range(count):
        _stream_once(bundle, device)
    seconds = time.monotonic() - started
    after = Holdings.now()
    if after != before:
        raise LeftBehind(f"after {count} loads {after}, before {before}")
    return {
        "starts": count,
        "seconds_each": seconds / max(count, 1),
        "resident_growth_kib": _resident_kib() - resident_kib,
        "gpu_growth_mib": _gpu_used_mib(device) - gpu_mib,
    }


def _stream_once(bundle: Path, device: str) -> None:
    from loader.load_plan import plan_load
    from loader.manifest import read_manifest
    from loader.stream import start

    manifest = read_manifest(bundle)
    order = next(iter(manifest.orders.values()))
    with start(plan_load(manifest, order), bundle, device=device) as stream:
        state = stream.state_dict()
        assert len(state) == len(stream.plan.tensors)


def probe(bundle: Path, device: str = "cpu") -> list[str]:
    """Command of a fresh worker that starts up to the first DiT entry."""
    return [sys.executable, "-m", "runtime.cli", "probe", str(bundle), "--device", device, *SHAPE]


def generate(bundle: Path, output: Path, device: str = "cpu") -> list[str]:
    """Command of a fresh worker that makes one video."""
    line = [sys.executable, "-m", "runtime.cli", "generate", str(bundle), "--device", device, *SHAPE]
    return [*line, "--prompt", "rain", "--seed", "1", "--output", str(output)]


class Start:
    """One fresh process that can be held to account for everything that descends from it."""

    def __init__(self, command: Sequence[str], gone_within_s: float = 30.0) -> None:
        self.tag = uuid.uuid4().hex
        self._gone_within_s = gone_within_s
        self._said = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would be held open by whatever is left
        environment = {**os.environ, _TAG: self.tag, "COLDFRAME_CPU_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip

    def finish(self) -> None:
        """Wait for the end. Raises: RuntimeError: it failed; LeftBehind."""
        self._end()
        if self.process.returncode:
            raise RuntimeError(f"exit code {self.process.returncode}: {self._said[-2000:]}")

    def kill_after(self, seconds: float) -> bool:
        """SIGKILL to the parent alone, `seconds` from now; whether it was still running. Raises: LeftBehind."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._end()
        return self.process.returncode == -signal.SIGKILL

    def _end(self) -> None:
        with self._log:
            self.process.wait(_TIMEOUT_S)
            self._require_nothing_left()
            self._log.seek(0)
            self._said = self._log.read().decode(errors="replace")

    def _require_nothing_left(self) -> None:
        """No process of the start's session or with its tag. Children end when they see their parent gone: poll."""
        left = self._left_after(self._gone_within_s)
        if left:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._left_after(_KILLED_WITHIN_S)
            raise LeftBehind(f"processes {left} outlive the start by {self._gone_within_s} s")

    def _left_after(self, seconds: float) -> dict[int, str]:
        """`descendants` as soon as there are none, or those of `seconds` from now."""
        deadline = time.monotonic() + seconds
        while (left := self.descendants()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def descendants(self) -> dict[int, str]:
        """pid → command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                try:
                    stat = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()
                    if stat[0] == "Z" and int(stat[1]) != os.getpid():
                        continue  # dead, and its new parent's to reap
                    is_ours = int(stat[3]) == self.process.pid
                    if is_ours or f"{_TAG}={self.tag}".encode() in (folder / "environ").read_bytes():
                        found[int(folder.name)] = (
                            (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        )
                except (OSError, ValueError):
                    continue
        return found


def shared_memory() -> set[str]:
    """Named shared memory of this host: files in /dev/shm and System V segments. memfds die with their processes."""
    segments = Path("/proc/sysvipc/shm")
    rows = segments.read_text("utf-8").splitlines()[1:] if segments.exists() else []
    folder = Path("/dev/shm")
    files = folder.iterdir() if folder.is_dir() else ()
    return {str(path) for path in files} | {f"shmid {row.split()[1]}" for row in rows}


def fresh_starts(bundle: Path, count: int, device: str = "cpu") -> dict[str, Any]:
    """`count` fresh processes one after the other. Raises: LeftBehind."""
    before = shared_memory()
    started = time.monotonic()
    for _ in range(count):
        Start(probe(bundle, device)).finish()
    seconds = time.monotonic() - started
    _require_same_memory(before)
    return {"starts": count, "seconds_each": seconds / max(count, 1)}


def killed_starts(
    bundle: Path, count: int, device: str = "cpu", seed: int = 0, within_s: float | None = None
) -> dict[str, Any]:
    """SIGKILL the parent at random moments of a `coldframe generate`.

    Args:
        within_s: latest moment; None: as long as one whole run takes, which is then made first.
    Raises: LeftBehind: a process, named shared memory, or a file that looks like a finished video.
    """
    before = shared_memory()
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="stress-"))
    try:
        within_s = within_s or _whole_run_s(bundle, folder / "whole.mp4", device)
        killed, partial = 0, 0
        for number in range(count):
            output = folder / f"{number}.mp4"
            was_running = Start(generate(bundle, output, device)).kill_after(chance.uniform(0, within_s))
            killed += was_running
            if was_running and output.exists() and not _is_whole(output):
                raise LeftBehind(f"{output} is there and is not a whole video")
            partial += sum(path.suffix == ".part" for path in folder.iterdir())
            shutil.rmtree(folder)
            folder.mkdir()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _require_same_memory(before)
    return {"starts": count, "killed": killed, "partial_files": partial, "within_s": within_s}


def _whole_run_s(bundle: Path, output: Path, device: str) -> float:
    started = time.monotonic()
    Start(generate(bundle, output, device)).finish()
    output.unlink()
    return time.monotonic() - started


def _is_whole(output: Path) -> bool:
    from runtime.media.check import Mp4Expectation, check_mp4

    return not check_mp4(output, Mp4Expectation()).problems


def simultaneous_starts(bundle: Path, rounds: int, device: str = "cpu", workers: int = 2) -> dict[str, Any]:
    """`workers` processes at once, `rounds` times; all must make the same file. Raises: LeftBehind, RuntimeError."""
    before = shared_memory()
    started = time.monotonic()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="stress-") as folder:
            outputs = [Path(folder) / f"{number}.mp4" for number in range(workers)]
            with ExitStack() as ends:  # all are started, then each is waited for, also when one fails
                for output in outputs:
                    ends.callback(Start(generate(bundle, output, device)).finish)
            if len({output.read_bytes() for output in outputs}) != 1:
                raise RuntimeError("workers that ran at once made different files")
            if surplus := set(Path(folder).iterdir()) - set(outputs):
                raise LeftBehind(f"beside the videos: {surplus}")
    _require_same_memory(before)
    seconds = (time.monotonic() - started) / max(rounds, 1)
    return {"rounds": rounds, "workers": workers, "seconds_each": seconds}


def _require_same_memory(before: set[str]) -> None:
    """Other programs may come and go; what is new and not theirs has our name in it or no owner at all."""
    new = {name for name in shared_memory() - before if "coldframe" in name or name.startswith("shmid")}
    if new:
        raise LeftBehind(f"shared memory: {sorted(new)}")


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    return pages * resource.getpagesize() // 1024


def _gpu_used_mib(device: str) -> int:
    if device == "cpu":
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--starts", type=int, default=200, help="loads in this process")
    parser.add_argument("--fresh", type=int, default=200, help="fresh processes, one after the other")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=5, help="two workers at once")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--name", default="stress_starts", help="name of the result file; empty: none")
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "stream_starts": lambda: stream_starts(args.bundle, args.starts, args.device),
        "fresh_starts": lambda: fresh_starts(args.bundle, args.fresh, args.device),
        "killed_starts": lambda: killed_starts(args.bundle, args.kills, args.device, args.seed),
        "simultaneous_starts": lambda: simultaneous_starts(args.bundle, args.pairs, args.device),
    }
    figures: dict[str, Any] = {"device": args.device}
    for name, part in parts.items():
        try:
            figures[name] = part()
        except LeftBehind as error:
            figures[name] = {"left_behind": str(error)}
        print(f"{name}: {json.dumps(figures[name])}", flush=True)
    left = sum("left_behind" in figures[name] for name in parts)
    if args.name:
        print(write_result(args.name, figures, _targets(figures, left)))
    return 1 if left else 0


def _targets(figures: Mapping[str, Any], left: int) -> dict[str, Any]:
    targets = {"starts_left_behind": target(left, 0, "lower")}
    growth = figures["stream_starts"].get("resident_growth_kib")
    if growth is not None:
        targets["starts_resident_growth_kib"] = target(growth, 8 * 1024, "lower")
    return targets


if __name__ == "__main__":
    raise SystemExit(main())
