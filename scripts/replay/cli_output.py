"""How commands answer: JSON where asked, else text; files complete or not at all."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loader.errors import RequestError

OUTPUTS = ("json", "csv", "parquet", "timeline_csv", "plots", "report", "results", "out", "startups_out")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Before anything is computed. Raises: RequestError: a file of the options cannot be written; names it."""
    for name in OUTPUTS:
        text = getattr(arguments, name, None)
        if text in (None, "-"):
            continue
        path, option = Path(text), f"--{name.replace('_', '-')} {text}"
        folder = path if name == "plots" and path.exists() else path.parent
        if name == "plots":
            while not folder.exists():  # made where absent
                folder = folder.parent
        problem = (
            "no such folder" if not folder.is_dir()
            else "a folder" if name != "plots" and path.is_dir()
            else "no permission" if not os.access(folder, os.W_OK)
            else None
        )  # fmt: skip
        if problem:
            raise RequestError("cannot be written", where=option, found=problem)


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`: to standard output, or to a file beside the text."""
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE, or to standard output"
    )


def write_text(path: Path, text: str) -> None:
    """Writes beside the name, then renames."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, "utf-8")
    partial.replace(path)
    print(f"wrote {path}", file=sys.stderr)


def print_pairs(values: Mapping[str, Any]) -> None:
    """One figure a line."""
    for key, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else "undefined" if value is None else value
        print(f"{key:20} {shown}")


def emit(arguments: argparse.Namespace, data: Mapping[str, Any], show: Callable[[], None]) -> None:
    """JSON instead of what `show` prints, or beside it."""
    if arguments.json == "-":
        print(json.dumps(data))
        return
    show()
    if arguments.json:
        write_text(Path(arguments.json), json.dumps(data) + "\n")
