"""`replay import` and `replay generate`: what writes trace files."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import RequestError
from scripts.replay.cli_options import build_options
from scripts.replay.cli_output import add_json, emit, print_pairs, write_text
from scripts.replay.cli_trace import about, print_notes
from scripts.replay.importers import fleet_check, import_trace, startups_from_timelines
from scripts.replay.laws import Empirical
from scripts.replay.optional import require
from scripts.replay.platforms import parse_system
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.traces import Trace
from scripts.replay.workload import GENERATORS, from_windows, synthetic

KINDS = (
    "modal", "fal", "fal-fleet", "worker-log", "timelines", "windows", "azure-llm", "burstgpt", "gentd26",
    "azure-functions", "huawei",
)  # fmt: skip


def add_import(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("kind", choices=KINDS, metavar="kind", help=", ".join(KINDS))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", help=".csv or .parquet (timelines: as --startups-out)")
    parser.add_argument("--startups-out", help="measured startup times, for --startup empirical:FILE")
    parser.add_argument(
        "--compare", metavar="SYSTEM", help="model the same requests, e.g. modal:scaledown_window=60"
    )
    parser.add_argument("--rate-scale", type=float, default=1.0, help="windows: factor on the rates")
    parser.add_argument("--mean", type=float, default=54.0, help="windows: mean generation time, s")
    parser.add_argument("--seed", type=int, default=0)
    add_json(parser)
    parser.set_defaults(run=_import)


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("spec", help=f"{', '.join(GENERATORS)}; e.g. ref:rate=10,days=7")
    parser.add_argument("--out", required=True, help=".csv or .parquet")
    parser.add_argument("--seed", type=int, default=0)
    add_json(parser)
    parser.set_defaults(run=_generate)


def _import(arguments: argparse.Namespace) -> int:
    paths = [Path(name) for name in arguments.files]
    for path in paths:
        if not path.is_file():
            raise RequestError("no such file", where=str(path), expected="a downloaded export")
    if arguments.kind == "timelines":
        groups = startups_from_timelines(paths)
        data: dict[str, Any] = {
            "startup_s": [value for values in groups.values() for value in values],
            "groups": groups,
        }
        emit(
            arguments,
            data,
            lambda: print_pairs({name: f"{len(values)} starts" for name, values in groups.items()}),
        )
        for name in {arguments.out, arguments.startups_out} - {None}:
            write_text(Path(name), json.dumps(data) + "\n")
        return 0
    if len(paths) != 1:
        raise RequestError(
            "one file", where="replay import", found=len(paths), expected=f"one {arguments.kind} export"
        )
    if arguments.kind == "fal-fleet":
        fleet = fleet_check(paths[0])
        emit(arguments, fleet, lambda: print_pairs(fleet))
        return 0
    trace = (
        _windows(paths[0], arguments)
        if arguments.kind == "windows"
        else import_trace(arguments.kind, str(paths[0]))
    )
    print_notes(trace)
    found: dict[str, Any] = {"trace": about(trace)}
    if arguments.compare:
        found["modelled"] = _modelled(trace, arguments)
    emit(arguments, found, lambda: print_pairs({**found["trace"], **found.get("modelled", {})}))
    if arguments.out:
        write_trace(trace, Path(arguments.out))
    if arguments.startups_out:
        write_text(Path(arguments.startups_out), json.dumps({"startup_s": list(trace.startups)}) + "\n")
    return 0


def _windows(path: Path, arguments: argparse.Namespace) -> Trace:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return from_windows(
        rows,
        rate_scale=arguments.rate_scale,
        mean_s=arguments.mean,
        cv=0.4,
        seed=arguments.seed,
        label=path.name,
    )


def _modelled(trace: Trace, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same requests under the model, to be put beside what the export observed."""
    if not trace.startups:
        raise RequestError(
            "the export has no startup times", where="--compare", expected="at least one cold start"
        )
    base, _ = build_options(argparse.Namespace(seed=arguments.seed))
    policy, options = parse_system(arguments.compare, base)
    startup = Empirical(trace.startups, "measured")
    outcome = simulate(trace, startup, parse_plan(policy), options)
    waits = np.sort(outcome.waits[outcome.cold == 1])
    return {
        "modelled_policy": policy,
        "modelled_starts": outcome.starts,
        "modelled_cold_wait_mean_s": float(waits.mean()) if len(waits) else 0.0,
    }


def _generate(arguments: argparse.Namespace) -> int:
    trace = synthetic(arguments.spec, arguments.seed)
    write_trace(trace, Path(arguments.out))
    emit(
        arguments,
        about(trace),
        lambda: print(f"{len(trace):,} requests in {arguments.out}; next: replay run {arguments.out}"),
    )
    return 0


def write_trace(trace: Trace, path: Path) -> None:
    """`timestamp,duration[,pool]` as CSV or Parquet, seconds, full precision."""
    names = [trace.pool_names[code] for code in trace.pools] if len(trace.pool_names) > 1 else None
    if path.suffix not in (".csv", ".parquet"):
        raise RequestError(
            "unknown kind of file", where=str(path), found=path.suffix or "none", expected=".csv, .parquet"
        )
    if path.suffix == ".parquet":
        arrow, parquet = require("pyarrow", "writing Parquet"), require("pyarrow.parquet", "writing Parquet")
        columns: dict[str, Any] = {
            "timestamp": trace.arrivals,
            "duration": trace.durations,
            **dict(trace.sizes),
        }
        columns.update({"pool": names} if names else {})
        parquet.write_table(arrow.table(columns), path)
        return
    partial = path.with_name(path.name + ".part")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["timestamp", "duration", *trace.sizes, *(["pool"] if names else [])])
        columns_text = [
            trace.arrivals.tolist(),
            trace.durations.tolist(),
            *(column.tolist() for column in trace.sizes.values()),
        ]
        writer.writerows(zip(*columns_text, *([names] if names else []), strict=True))
    partial.replace(path)
