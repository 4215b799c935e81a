"""`coldframe demo`: a tiny checkpoint, prepared, and a video made from it by a fresh worker process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from loader.errors import InternalError

PROMPT = "Rain on a tin roof at night; a lamp sways. <d>[English] We are home.</d>"


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    args = _parser().parse_args(argv)
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}

    checkpoint, bundle = folder / f"checkpoint-{args.layout}", folder / "bundle"
    _timed(seconds, "write tiny checkpoint", lambda: _write_checkpoint(checkpoint, args.layout))
    prepare = [
        "prepare",
        str(checkpoint),
        str(bundle),
        "--schedule",
        args.schedule,
        "--dtype",
        "float32",
        "--replace",
    ]
    _timed(seconds, "prepare", lambda: _coldframe(prepare))
    video, timeline = folder / "video.mp4", folder / "timeline.json"
    generate = [
        "generate",
        str(bundle),
        "--prompt",
        args.prompt,
        "--seed",
        str(args.seed),
        "--size",
        args.size,
    ]
    generate += ["--schedule", args.schedule, "--output", str(video), "--timeline", str(timeline), "--json"]
    result = json.loads(
        _timed(seconds, "fresh worker: start, generate, encode", lambda: _coldframe(generate))
    )
    width, height = args.size.split("x")
    check = [
        "check-mp4",
        str(video),
        "--width",
        width,
        "--height",
        height,
        "--frames",
        str(result["num_frames"]),
    ]
    _timed(seconds, "check the MP4", lambda: _coldframe(check))
    _report(result, seconds, video, timeline)
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
    parser.add_argument(
        "--schedule", default="base-8", help="step schedule (default: %(default)s, 8 evaluations)"
    )
    parser.add_argument("--seed", type=int, default=7)
    return parser


def _write_checkpoint(checkpoint: Path, layout: str) -> str:
    from scripts.tiny_checkpoint import write_tiny_checkpoint

    write_tiny_checkpoint(checkpoint, preset="demo", layout=layout, seed=0)
    return ""


def _coldframe(command: list[str]) -> str:
    """Run one command of the program in a process of its own; its progress stays visible on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "runtime.cli", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise InternalError(
            f"`coldframe {' '.join(command[:3])} …` failed with exit code {done.returncode}", where="demo"
        )
    return done.stdout


def _timed(seconds: dict[str, float], name: str, work) -> str:  # type: ignore[no-untyped-def]
    print(f"• {name} …", file=sys.stderr, flush=True)
    start = time.monotonic()
    value: str = work()
    seconds[name] = time.monotonic() - start
    return value


def _report(result: dict, seconds: dict[str, float], video: Path, timeline: Path) -> None:  # type: ignore[type-arg]
    print(f"\nvideo      {video.resolve()}")
    print(
        f"           {result['width']}x{result['height']}, {result['num_frames']} frames at 24 fps, stereo 32 kHz"
    )
    print(f"timeline   {timeline.resolve()}  (open in Perfetto)")
    print(f"picture    {timeline.with_suffix('.svg').resolve()}")
    print("\nseconds from the worker's first instruction")
    for name, value in result["headline"].items():
        print(f"  {name.replace('_', ' '):<24}{value:8.3f}")
    print("\nseconds of each part of the demo")
    for name, value in seconds.items():
        print(f"  {name:<40}{value:8.2f}")
