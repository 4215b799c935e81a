"""`coldframe generate`: a fresh worker, one video, and the timeline of the start. Standard library only at the top."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from runtime import bootstrap  # t = 0
from runtime.pipeline import Cancelled

if TYPE_CHECKING:
    from runtime.media.fragments import Receiver


def main(argv: Sequence[str]) -> int:
    """Entry of the command; returns the exit code."""
    args = _parser().parse_args(argv)
    stdout = _take_stdout() if args.fragmented == "-" else None
    from runtime.settings import settings_from_environment

    settings = settings_from_environment(
        bundle=args.bundle,
        manifest_sha256=args.manifest_sha256,
        device=args.device,
        verify=args.verify,
        storage_gbps=args.storage_gbps,
        cpu_threads=args.cpu_threads,
        timeline=args.timeline,
    )
    output = Path(args.output)
    _require_writable(output)
    cancelled = threading.Event()
    _stop_on_signals(cancelled)
    engine, prepared = bootstrap.start(settings, _body(args))
    assert prepared is not None
    with engine:
        progress = _Progress(quiet=args.json or not sys.stderr.isatty())
        try:
            with _receiver(args.fragmented, stdout) as receiver:
                result = engine.run(
                    prepared,
                    output,
                    cancelled=cancelled,
                    on_phase=progress.phase,
                    on_step=progress.step,
                    receiver=receiver,
                )
        except Cancelled:
            raise KeyboardInterrupt from None
        progress.close()
        result["timeline"] = engine.write_timeline()
        result["output"] = str(output)
        result["headline"] = engine.timeline.headline()
    _print(result, as_json=args.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coldframe generate",
        description="Start a worker on a prepared directory and make one video with sound.",
    )
    parser.add_argument("bundle", help="prepared directory (coldframe prepare)")
    parser.add_argument("--prompt", required=True, help="what to show and what to hear")
    parser.add_argument("--output", "-o", default="video.mp4", help="file to write (default: %(default)s)")
    parser.add_argument(
        "--fragmented",
        metavar="FILE",
        help="also write it while it is decoded, as a fragmented MP4 that plays at once; "
        "- is standard output, and what else would be printed there goes to standard error",
    )
    parser.add_argument("--first-frame", metavar="PICTURE", help="picture that the video starts with")
    parser.add_argument("--last-frame", metavar="PICTURE", help="picture that the video ends with")
    parser.add_argument("--size", metavar="WxH", help="canvas, both multiples of 32 (default: by the task)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", help="duration; snapped up to a legal number of frames")
    length.add_argument("--num-frames", type=int, help="17n+5 at 24 frames a second; snapped up")
    parser.add_argument("--seed", type=int, help="0 to 2^63-1 (default: drawn and reported)")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--schedule", help="name of a prepared step schedule, for example base-49")
    steps.add_argument("--num-evaluations", type=int, help="model evaluations; must be prepared")
    worker = parser.add_argument_group("worker")
    worker.add_argument("--device", choices=("auto", "cpu", "cuda"))
    worker.add_argument("--manifest-sha256", help="refuse a prepared directory with another manifest")
    worker.add_argument("--verify", choices=("edges", "full", "auto"), help="how loaded bytes are checked")
    worker.add_argument("--storage-gbps", type=float, help="throttle the reader, for experiments")
    worker.add_argument("--cpu-threads", type=int)
    worker.add_argument(
        "--timeline", metavar="FILE.json", help="write the start's timeline, and FILE.svg beside it"
    )
    worker.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def _body(args: argparse.Namespace) -> dict[str, object]:
    """The request as the HTTP API would send it; local pictures become bytes here and nowhere else."""
    names = ("prompt", "size", "seconds", "num_frames", "seed", "schedule", "num_evaluations")
    body: dict[str, object] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in ("first_frame", "last_frame"):
        path = getattr(args, name)
        if path is not None:
            body[name] = _read_picture(name, Path(path))
    return body


def _read_picture(field: str, path: Path) -> bytes:
    from loader.errors import RequestError

    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"cannot read the picture: {error.strerror}", where=field, found=str(path)
        ) from error


def _require_writable(output: Path) -> None:
    """Find out before any work whether the file can be written where it is wanted. Of several ranks the first writes it."""
    from loader.errors import RequestError
    from runtime.parallel.environment import rank_environment

    if rank_environment().rank:
        return
    probe = output.with_name(f".{output.name}.{os.getpid()}.probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RequestError(
            f"cannot write here: {error.strerror}", where="output", found=str(output)
        ) from error


def _take_stdout() -> IO[bytes]:
    """Standard output for the video alone; later prints of anybody go to standard error."""
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return stream


def _receiver(target: str | None, stdout: IO[bytes] | None) -> AbstractContextManager[Receiver | None]:
    """Who takes the fragments: nobody, a file, or what reads a pipe."""
    if target is None:
        return nullcontext()
    from runtime.media.receivers import FragmentFile, FragmentPipe

    path = Path(target)
    if stdout is not None:
        return FragmentPipe(stdout)
    if path.exists() and not path.is_file():
        return FragmentPipe(path)
    return FragmentFile(path, replace=True)


def _stop_on_signals(cancelled: threading.Event) -> None:
    """SIGINT and SIGTERM stop at the next border; a second one interrupts at once."""

    def stop(signum: int, frame: object) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt
        cancelled.set()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def _print(result: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result, default=str) + "\n")
        return
    out = sys.stdout.write
    out(f"{result['output']}: {result['width']}x{result['height']}, {result['num_frames']} frames, ")
    out(f"{result['video_s']:.3f} s, seed {result['seed']}, {result['size_bytes']} bytes\n")
    if result["timeline"]:
        out(f"timeline: {result['timeline']}\n")
    headline = result["headline"]
    assert isinstance(headline, dict)
    for name, seconds in headline.items():
        out(f"  {name.replace('_', ' '):<22} {seconds:8.3f} s\n")


class _Progress:
    """One line on stderr that follows phases and steps; silent when nobody watches."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._phase = ""

    def phase(self, name: str) -> None:
        self._phase = name
        self._show(name)

    def step(self, done: int, total: int) -> None:
        filled = round(24 * done / total)
        self._show(f"{self._phase} [{'#' * filled}{'.' * (24 - filled)}] {done}/{total}")

    def close(self) -> None:
        if not self._quiet:
            sys.stderr.write("\r\x1b[K")

    def _show(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
