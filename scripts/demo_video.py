"""`coldframe demo`: a tiny checkpoint, prepared, and a video made from it by a fresh worker process."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.timeline_views import spoken
from scripts.tiny_checkpoint import write_tiny_checkpoint

PROMPT = "Rain on a tin roof at night; a lamp sways. <d>[English] We are home.</d>"


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    args = _parser().parse_args(argv)
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, bundle = folder / f"checkpoint-{args.layout}", folder / "bundle"
    video, timeline = folder / "video.mp4", folder / "timeline.json"
    clock = _Clock()

    with clock.part("write a tiny checkpoint"):
        write_tiny_checkpoint(checkpoint, "demo", args.layout, seed=0)
    with clock.part("prepare it"):
        options = ["--schedule", args.schedule, "--dtype", "float32", "--replace"]
        _coldframe("prepare", str(checkpoint), str(bundle), *options)
    with clock.part("fresh worker: start, generate, encode"):
        request = ["--prompt", args.prompt, "--seed", str(args.seed), "--size", args.size]
        request += ["--num-frames", str(args.num_frames), "--schedule", args.schedule]
        files = ["--output", str(video), "--timeline", str(timeline), "--json"]
        result = json.loads(_coldframe("generate", str(bundle), *request, *files))
    with clock.part("check the MP4"):
        _coldframe("check-mp4", str(video), "--size", args.size, "--frames", str(result["num_frames"]))
    _report(result, clock.seconds, video, timeline)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coldframe demo",
        description="Write a tiny random MiniMax-H3 checkpoint, prepare it, and make a video in a fresh worker process. "
        "The weights are random, so the picture is abstract and the sound is noise; every step is the real one.",
    )
    parser.add_argument("--folder", default="out/demo", help="where everything goes (default: %(default)s)")
    parser.add_argument(
        "--layout", choices=("native", "diffusers"), default="native", help="published layout to write"
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--size", default="320x192", metavar="WxH")
    parser.add_argument("--num-frames", type=int, default=124, help="17n+5 (default: %(default)s, 5.2 s)")
    parser.add_argument(
        "--schedule", default="base-8", help="step schedule (default: %(default)s, 8 evaluations)"
    )
    parser.add_argument("--seed", type=int, default=7)
    return parser


def _coldframe(*command: str) -> str:
    """Run one command of the program in a process of its own; its progress stays visible on stderr."""
    line = [sys.executable, "-m", "runtime.cli", *command]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:  # it has said why
        print(f"coldframe demo: stopped, because `coldframe {command[0]}` failed", file=sys.stderr)
        sys.exit(done.returncode)
    return done.stdout


class _Clock:
    """Seconds of each part of the demo, announced as it starts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        print(f"• {name} …", file=sys.stderr, flush=True)
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


def _report(result: Mapping[str, Any], seconds: Mapping[str, float], video: Path, timeline: Path) -> None:
    print(f"\nvideo      {video.resolve()}")
    print(
        f"           {result['width']}x{result['height']}, {result['num_frames']} frames at 24 fps, stereo 32 kHz"
    )
    print(f"timeline   {timeline.resolve()}  (open in Perfetto)")
    print(f"picture    {timeline.with_suffix('.svg').resolve()}")
    print("\nseconds from the worker's first instruction (DiT: the denoising transformer)")
    for name, value in sorted(result["headline"].items(), key=lambda item: float(item[1])):
        print(f"  {spoken(name):<24}{value:8.3f}")
    print("\nseconds of each part of the demo")
    for name, value in seconds.items():
        print(f"  {name:<40}{value:8.2f}")
    program, bundle = _program(), video.parent / "bundle"
    print(f'\nnext       {program} generate {bundle} --prompt "…" --output mine.mp4')
    print(f"           COLDFRAME_API_KEYS=my-key {program} serve --bundle {bundle}")


def _program() -> str:
    """How the user can call this program: by name where the shell finds it, else by its place in the environment."""
    beside = Path(sys.executable).with_name("coldframe")
    if shutil.which("coldframe") == str(beside) or not beside.exists():
        return "coldframe"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
