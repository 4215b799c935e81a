"""How commands answer: JSON where asked, else text; files complete or not at all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE, or to standard output"
    )


def write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, "utf-8")
    partial.replace(path)
    print(f"wrote {path}", file=sys.stderr)


def print_pairs(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else "undefined" if value is None else value
        print(f"{key:20} {shown}")


def emit(arguments: argparse.Namespace, data: Mapping[str, Any], show: Any) -> None:
    if arguments.json == "-":
        print(json.dumps(data))
        return
    show()
    if arguments.json:
        write_text(Path(arguments.json), json.dumps(data) + "\n")
