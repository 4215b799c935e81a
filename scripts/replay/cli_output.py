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
    """One figure a line, names padded to the longest."""
    width = max(map(len, values), default=0)
    for key, value in values.items():
        print(f"{key:{width}}  {shown(value)}")


def shown(value: object) -> str:
    """A value as people read it: four digits of fractions, lists and tables without brackets."""
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(shown, value)) or "none"
    return str(value)


def emit(arguments: argparse.Namespace, data: Mapping[str, Any], show: Callable[[], None]) -> None:
    """JSON instead of what `show` prints, or beside it."""
    if arguments.json == "-":
        print(json.dumps(data))
        return
    show()
    if arguments.json:
        write_text(Path(arguments.json), json.dumps(data) + "\n")
