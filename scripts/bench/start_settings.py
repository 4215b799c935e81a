"""Starts with different settings, taking turns: what a change is worth on a host whose neighbours come and go.

    python -m scripts.bench.start_settings DIRECTORY --rounds 3 --try shipped --try "eight threads:COLDFRAME_READER_THREADS=8"

DIRECTORY as for `scripts.bench.cold_start`, and so is the request. A try is a name and, after a colon, environment variables
(`A=1,B=2`). Written to `results/<name>.json`: for every try the medians of its marks, and each start's marks and spans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.cold_start import probe_command
from scripts.bench.common import storage, write_result

MARKS = ("first_read", "torch_ready", "conditioner_done", "first_dit_entry", "all_weights_resident")
SPANS = (
    "torch", "models", "compute", "library warm-up", "conditioner warm-up", "warm-up", "denoiser warm-up", "conditioner",
    "uploader: cuda context", "uploader: device arenas", "uploader: first slot back", "uploader: every slot pinned",
    "group transformer/prelude", "group transformer/blocks.47",
    *(f"group text_encoder/layers.{layer}" for layer in (0, 1, 2, 3, 4, 49)),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    tries = [parse_try(text) for text in options.tries or ["shipped"]]
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in tries}
    for _ in range(options.rounds):
        for name, settings in tries:
            found = _start(options, settings)
            starts[name].append(found)
            print(name, found.get("error") or found["headline"], flush=True)
    rows: list[dict[str, Any]] = [
        {"name": name, "settings": settings, "medians": _medians(starts[name]), "starts": starts[name]}
        for name, settings in tries
    ]
    print(f"{'':<24}", *(f"{mark:>21}" for mark in MARKS))
    for row in rows:
        print(f"{row['name']:<24}", *(f"{row['medians'].get(mark, float('nan')):>21.3f}" for mark in MARKS))
    print(write_result(options.name, {"storage": storage(options.directory), "tries": rows}, {}))
    return int(any("error" in found for of_one in starts.values() for found in of_one))


def _start(options: argparse.Namespace, settings: Mapping[str, str]) -> dict[str, Any]:
    """One fresh process: its marks and spans in seconds, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline.json"
        command = probe_command(options.directory, options.device, options.schedule)
        command += ["--timeline", str(timeline), *([] if options.entry_only else ["--wait"])]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **settings}, check=False
        )
        if done.returncode:
            return {"error": done.stderr[-1000:]}
        trace = json.loads(timeline.read_text())
    spans: dict[str, list[float]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event["name"] in SPANS:
            begin, length = event["ts"] / 1e6, event.get("dur", 0) / 1e6
            spans.setdefault(event["name"], [round(begin, 3), round(begin + length, 3)])
    facts = {name: trace["facts"].get(name) for name in ("attention", "operators")}
    return {"headline": trace["headline"], "spans": spans, "facts": facts}


def _medians(starts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    good = [start["headline"] for start in starts if "headline" in start]
    return {
        mark: round(statistics.median(headline[mark] for headline in good), 4)
        for mark in MARKS
        if good and all(mark in headline for headline in good)
    }


def parse_try(text: str) -> tuple[str, dict[str, str]]:
    """`NAME` or `NAME:VARIABLE=VALUE[,…]`: the name and its environment variables."""
    name, _, settings = text.partition(":")
    pairs = [item.partition("=") for item in settings.split(",") if item]
    if not name or any(not key or not sign for key, sign, _ in pairs):
        raise SystemExit(f"--try {text!r}: expected NAME or NAME:VARIABLE=VALUE[,…]")
    return name, {key: value for key, _, value in pairs}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--try", dest="tries", action="append", metavar="NAME[:VARIABLE=VALUE,…]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedule", default="base-49")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--entry-only", action="store_true", help="do not wait for the rest of the weights")
    parser.add_argument("--name", default="start_settings")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
