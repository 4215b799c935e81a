"""The commands `prepare` and `validate`: arguments in, one summary (or one JSON object) and an exit code out."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from loader.errors import CapabilityError, RequestError, WorkerError
from prepare.adapters import parse_adapter
from prepare.family import DTYPES, VAE_LINEARS, PrepareOptions
from prepare.progress import Progress, format_seconds, terminal_renderer
from prepare.schedules import parse_sigmas, stored_schedules


def prepare_main(argv: Sequence[str]) -> int:
    """`coldframe prepare CHECKPOINT TARGET`. Returns the exit code: 0, or that of the error."""
    parser = _prepare_parser()
    return _guarded(parser, argv, _prepare)


def validate_main(argv: Sequence[str]) -> int:
    """`coldframe validate DIRECTORY`. Returns the exit code: 0, or that of the error."""
    parser = _Parser(prog="coldframe validate", description="Check every byte of a prepared directory.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sha256", help="digest that the manifest must have")
    parser.add_argument("--no-probe", action="store_true", help="leave out the start of a fresh worker")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the probe")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _guarded(parser, argv, _validate)


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments through the project's errors, so that `--json` covers them too."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise RequestError(message, where="arguments", hint=f"see {self.prog} --help")


def _prepare_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="coldframe prepare", description="Turn a published checkpoint into a prepared directory."
    )
    parser.add_argument("checkpoint", type=Path, help="published tree, either layout")
    parser.add_argument(
        "target", type=Path, help="new prepared directory; an interrupted prepare of it is continued"
    )
    parser.add_argument(
        "--task", action="append", default=[], help="t2va or fl2va; repeatable (default: all of the release)"
    )
    parser.add_argument(
        "--schedule",
        action="append",
        default=[],
        help=f"base-<E>, fasth3-8, {', '.join(stored_schedules())}; repeatable (default: the release's own)",
    )
    parser.add_argument(
        "--sigmas",
        action="append",
        default=[],
        metavar="NAME=V,…/A,…",
        help="a step schedule by its video and audio sigmas, or a file that holds them; repeatable",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="merge an adapter into the transformer; repeatable",
    )
    parser.add_argument(
        "--partition", default="", help="which transformer of the release, e.g. ref2va (default: the first)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="bfloat16", help="type of the stored matrices"
    )
    parser.add_argument(
        "--vae-linears",
        choices=tuple(VAE_LINEARS),
        default="float16",
        help="type of the video decoder's block matrices (published: float32; with --dtype float32 always that)",
    )
    parser.add_argument(
        "--adaln", choices=("canonical", "match"), default="canonical", help="how tables are rounded"
    )
    parser.add_argument("--device", default="cpu", help="where `--adaln match` computes them")
    parser.add_argument(
        "--codec",
        choices=("none", "ans"),
        default="none",
        help="ans: store large tensors coded, bit for bit, for NVIDIA GPUs to unpack at the start: two thirds of the bytes"
        " of bfloat16 weights. Needs a GPU and nvCOMP here and there (default: none, for every machine)",
    )
    parser.add_argument(
        "--variant", default="auto", help="what the checkpoint must be (default: what its files say)"
    )
    parser.add_argument("--repository", default="", help="recorded in the manifest")
    parser.add_argument("--revision", default="", help="recorded in the manifest")
    parser.add_argument(
        "--max-file-gib", type=float, default=8.0, help="weight files are cut before this size"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="files written at a time (default: 0, one per CPU)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        action="append",
        default=[],
        help="number of GPUs per request to store shards for; repeatable (default: 1, nothing is cut)",
    )
    parser.add_argument(
        "--kernels",
        action="append",
        default=[],
        metavar="ARCHITECTURE",
        help="compile the fused operators for it, e.g. sm_90a; repeatable (default: none; needs triton)",
    )
    parser.add_argument("--replace", action="store_true", help="replace an existing prepared directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _prepare(args: argparse.Namespace) -> None:
    from prepare.pipeline import prepare_checkpoint

    if not 0 < args.max_file_gib < math.inf:
        raise RequestError("must be a positive number", where="--max-file-gib", found=args.max_file_gib)
    if args.workers < 0:
        raise RequestError("must not be negative", where="--workers", found=args.workers)
    options = PrepareOptions(
        tasks=tuple(args.task),
        schedules=tuple(args.schedule),
        sigmas=tuple(parse_sigmas(text) for text in args.sigmas),
        lora=tuple(parse_adapter(text) for text in args.lora),
        partition=args.partition,
        dtype=args.dtype,
        vae_linears=args.vae_linears,
        adaln=args.adaln,
        device=args.device,
        variant=args.variant,
        repository=args.repository,
        revision=args.revision,
        codec=args.codec,
        ranks=tuple(sorted(set(args.ranks))) or (1,),
        kernels=tuple(sorted(set(args.kernels))),
        max_file_bytes=int(args.max_file_gib * (1 << 30)),
        workers=args.workers,
    )
    result = prepare_checkpoint(
        args.checkpoint,
        args.target,
        options,
        replace_target=args.replace,
        report=terminal_renderer(sys.stderr),
    )
    for warning in (*result.warnings, *_refusals(result.target)):
        _say(f"warning: {warning}", sys.stderr)
    if args.json:
        _say(json.dumps({**asdict(result), "target": str(result.target)}, sort_keys=True), sys.stdout)
        return
    size, seconds = result.num_bytes / 1e9, format_seconds(result.seconds)
    _say(f"{result.target}: {result.num_files} files, {size:.2f} GB in {seconds}", sys.stdout)
    _say(f"manifest SHA-256: {result.manifest_sha256}", sys.stdout)
    if args.codec != "none":
        from prepare.codec_advice import advise_here

        _say(str(advise_here(result.target)), sys.stdout)
    _say(f"next: coldframe validate {result.target}", sys.stdout)


def _validate(args: argparse.Namespace) -> None:
    from prepare.validate import require_valid, validate_directory, validation_bytes

    progress = Progress(validation_bytes(args.directory), terminal_renderer(sys.stderr))
    report = validate_directory(args.directory, args.sha256, progress.advance)
    require_valid(report, args.directory)
    is_refused = args.device == "auto" and _needs_a_gpu(args.directory)
    entry_s = None if args.no_probe or is_refused else _probe(args.directory, args.device)
    if args.json:
        _say(json.dumps({**asdict(report), "first_dit_entry_s": entry_s}, sort_keys=True), sys.stdout)
        return
    size = report.num_bytes / 1e9
    _say(
        f"{args.directory}: {report.num_files} files, {report.num_tensors} tensors, {size:.2f} GB, sound",
        sys.stdout,
    )
    _say(f"manifest SHA-256: {report.manifest_sha256}", sys.stdout)
    if is_refused:
        _say("not started: its weights are coded for a GPU, and there is none here", sys.stdout)
    if entry_s is not None:
        _say(f"a fresh worker reached its first denoiser entry in {entry_s:.2f} s", sys.stdout)


def _refusals(directory: Path) -> list[str]:
    """Why no worker of this version takes the directory, if so; its bytes are right all the same."""
    from loader.manifest import read_manifest
    from runtime.family import family_for
    from runtime.parallel.prepared import some_view

    try:
        family_for(some_view(read_manifest(directory)), directory)
    except CapabilityError as error:
        return [f"workers of this version refuse it: {error}"]
    return []


def _needs_a_gpu(directory: Path) -> bool:
    """Whether the weights are coded and this machine cannot unpack them."""
    from loader.manifest import read_manifest
    from runtime.nodes import choose_device

    return read_manifest(directory).codec is not None and choose_device("auto") == "cpu"


def _probe(directory: Path, device: str) -> float:
    """Seconds from a fresh worker's first instruction to its first denoiser entry.

    Raises: what `prepare.probe.probe_directory` raises: the directory cannot be started here.
    """
    from prepare.probe import probe_directory

    command = [sys.executable, "-m", "runtime.cli", "probe", "--device", device]
    headline = probe_directory(directory, command).report["headline"]
    assert isinstance(headline, dict)
    return float(headline["first_dit_entry"])


def _guarded(
    parser: argparse.ArgumentParser, argv: Sequence[str], command: Callable[[argparse.Namespace], None]
) -> int:
    """Run a command; a WorkerError becomes one line on stderr (or one JSON object on stdout) and its exit code."""
    try:
        command(parser.parse_args(list(argv)))
    except WorkerError as error:
        if "--json" in argv:
            _say(json.dumps({"error": error.as_dict()}, sort_keys=True), sys.stdout)
        else:
            _say(f"error: {error}".encode(errors="backslashreplace").decode(), sys.stderr)
        return error.exit_code
    except SystemExit as leaving:  # --help
        return int(leaving.code or 0)
    return 0


def _say(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()
