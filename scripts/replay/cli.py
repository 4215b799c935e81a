"""`replay run | stats | fit | search | import | generate | report`.

Results on standard output, progress and notes on standard error. Exit codes: 0, 2 usage or refused input, 3 the
objective cannot be met, 4 a library is missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import RequestError, WorkerError
from scripts.replay.cli_options import add_model, add_trace, build_options, plan_suffix, trace_columns
from scripts.replay.findings import findings
from scripts.replay.importers import fleet_check, import_trace, startups_from_timelines
from scripts.replay.laws import Empirical, parse_law
from scripts.replay.measures import compare
from scripts.replay.optional import require
from scripts.replay.platforms import parse_system
from scripts.replay.policies import parse_plan
from scripts.replay.reading import read_trace
from scripts.replay.search import METRICS, Goal, search
from scripts.replay.simulate import RECORD_MAX_ROWS, simulate
from scripts.replay.specs import parse_spec, split_specs
from scripts.replay.stats import burst_stats, fit_reference
from scripts.replay.sweep import Case, cases, run_sweep, version, write_parquet
from scripts.replay.tables import difference_lines, main_table, timeline_csv, to_csv
from scripts.replay.traces import (
    Trace,
    durations_by_size,
    merge_pools,
    scale_durations,
    stretch,
    thin,
    with_durations,
)
from scripts.replay.workload import GENERATORS, from_windows, synthetic

OBJECTIVE_NOT_MET = 3


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns the exit code."""
    try:
        arguments = _parser().parse_args(list(argv))
    except SystemExit as leave:
        return int(leave.code or 0)
    arguments.command_line = shlex.join(["replay", *argv])
    try:
        return int(arguments.run(arguments))
    except WorkerError as error:
        print(f"replay: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="replay", description="How long to keep an idle GPU.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_run(commands.add_parser("run", help="replay a trace under startups × policies"))
    for name, run, text in (
        ("stats", _stats, "burst statistics of a trace"),
        ("fit", _fit, "reference workload with the same statistics"),
    ):
        sub = commands.add_parser(name, help=text)
        add_trace(sub)
        sub.add_argument(
            "--busy", type=float, help="requests that make an hour busy (default: the mean hour)"
        )
        sub.add_argument(
            "--sliding", action="store_true", help="trailing 60 s window instead of disjoint minutes"
        )
        _add_json(sub)
        sub.set_defaults(run=run)
    _add_search(commands.add_parser("search", help="cheapest settings under a waiting limit"))
    sub = commands.add_parser("import", help="platform exports and published traces → trace file")
    sub.add_argument(
        "kind",
        help="modal, fal, fal-fleet, worker-log, timelines, windows, azure-llm, burstgpt, gentd26, azure-functions, huawei",
    )
    sub.add_argument("files", nargs="+")
    sub.add_argument("--out", help=".csv or .parquet (timelines: .json)")
    sub.add_argument("--startups-out", help="measured startup times, for --startup empirical:FILE")
    sub.add_argument(
        "--compare", metavar="SYSTEM", help="model the same requests, e.g. modal:scaledown_window=60"
    )
    sub.add_argument("--rate-scale", type=float, default=1.0, help="windows: factor on the rates")
    sub.add_argument("--mean", type=float, default=54.0, help="windows: mean generation time, s")
    sub.add_argument("--seed", type=int, default=0)
    _add_json(sub)
    sub.set_defaults(run=_import)
    sub = commands.add_parser("generate", help="write a synthetic trace")
    sub.add_argument("spec", help=f"{', '.join(GENERATORS)}; e.g. ref:rate=10,days=7")
    sub.add_argument("--out", required=True, help=".csv or .parquet")
    sub.add_argument("--seed", type=int, default=0)
    _add_json(sub)
    sub.set_defaults(run=_generate)
    sub = commands.add_parser("report", help="HTML page or PNG plots of a result")
    sub.add_argument("result")
    sub.add_argument("--out", help="HTML file")
    sub.add_argument("--plots", help="folder for PNG files")
    sub.set_defaults(run=_report)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE, or to standard output"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    add_model(parser)
    parser.add_argument(
        "--startup", default="70,7.2", help="startup times: numbers or distributions, joined by commas"
    )
    parser.add_argument(
        "--policy", default="multiple:2", help="policies joined by commas, e.g. multiple:2,zero,fixed:60"
    )
    parser.add_argument(
        "--system", action="append", default=[], help="a platform's autoscaler, e.g. fal:keep_alive=60"
    )
    parser.add_argument("--csv", metavar="FILE", help="one row per combination")
    parser.add_argument("--parquet", metavar="FILE", help="one row per combination")
    parser.add_argument("--timeline-csv", metavar="FILE", help="arrivals and worker-seconds per minute")
    parser.add_argument("--plots", metavar="FOLDER", help="PNG plots")
    parser.add_argument("--report", metavar="FILE", help="self-contained HTML page")
    parser.add_argument(
        "--no-pictures", action="store_true", help="leave out what only plots and report need"
    )
    parser.add_argument("--jobs", type=int, default=1, help="local processes")
    parser.add_argument("--ray", action="store_true", help="run the combinations on Ray")
    parser.add_argument("--results", metavar="FILE", help="append each combination to this JSON-lines file")
    parser.add_argument("--resume", action="store_true", help="skip combinations already in --results")
    _add_json(parser)
    parser.set_defaults(run=_run)


def _add_search(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    add_model(parser)
    parser.add_argument("--startup", default="7.2", help="a number, a distribution or empirical:FILE")
    for metric in METRICS:
        text = "largest cold fraction" if metric == "cold" else f"limit on the {metric} wait, s"
        parser.add_argument(f"--{metric}" if metric == "cold" else f"--{metric}-wait", type=float, help=text)
    _add_json(parser)
    parser.set_defaults(run=_search)


def _load(arguments: argparse.Namespace) -> Trace:
    """The trace of the options, with its service times; prints what was read and repaired."""
    if (arguments.trace is None) == (arguments.synthetic is None):
        raise RequestError("one trace", where="replay", expected="a file, or --synthetic SPEC")
    law = arguments.duration
    if arguments.synthetic is not None:
        trace = synthetic(arguments.synthetic, arguments.seed)
    else:
        trace = read_trace(arguments.trace, trace_columns(arguments), needs_duration=law is None)
    _notes(trace)
    trace = stretch(thin(trace, _share(arguments.thin), arguments.seed), arguments.interval_scale)
    if law is not None and law.startswith("by:"):
        spec = parse_spec(law)
        trace = durations_by_size(trace, spec.values[0] if spec.values else "", spec.number("mean"))
    elif law is not None:
        trace = with_durations(trace, parse_law(law, where="--duration"), arguments.seed)
    if arguments.duration_scale != 1:
        trace = scale_durations(trace, arguments.duration_scale)
    return merge_pools(trace) if arguments.one_pool else trace


def _share(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise RequestError("not a share", where="--thin", found=repr(text), expected="e.g. 1/20") from error


def _notes(trace: Trace) -> None:
    facts = trace.facts
    if facts.get("source") == "synthetic":
        text = f"{trace.label}: {len(trace):,} requests drawn with seed {facts['seed']}"
    else:
        text = (
            f"{trace.label}: {facts.get('rows_read', len(trace)):,} rows read, {facts['rows_kept']:,} kept, "
            f"{facts.get('rows_moved', 0):,} moved, {facts.get('rows_dropped', 0):,} dropped"
        )
        if facts.get("dropped"):
            text += f" {facts['dropped']}"
    print(text, file=sys.stderr)
    if facts.get("rows_moved"):
        print(
            f"  out of order: {facts['rows_moved']} rows moved, clock steps back {facts['steps_back']} times",
            file=sys.stderr,
        )
    if facts.get("shifted_by_s"):
        print(f"  the first event, at {facts['shifted_by_s']:g} s, became second 0", file=sys.stderr)
    warnings = facts.get("warnings")
    for warning in warnings if isinstance(warnings, list) else ():
        print(f"  warning: {warning}", file=sys.stderr)


def _about(trace: Trace) -> dict[str, Any]:
    return {
        "label": trace.label,
        "requests": len(trace),
        "pools": len(trace.pool_names),
        "span_s": float(trace.arrivals[-1]),
        "duration_mean_s": float(trace.durations.mean()),
        "digest": trace.digest(),
        **trace.facts,
    }


def _run(arguments: argparse.Namespace) -> int:
    trace = _load(arguments)
    options, prices = build_options(arguments)
    suffix = plan_suffix(arguments)
    startups = split_specs(arguments.startup)
    policies = [policy + suffix for policy in split_specs(arguments.policy)]
    to_file = arguments.json not in (None, "-")
    wants_pictures = (to_file or arguments.plots or arguments.report) and not arguments.no_pictures
    more = {"with_timeline": bool(wants_pictures or arguments.timeline_csv)}
    todo = cases(startups, policies, options, prices, **more)
    for system in arguments.system:
        policy, changed = parse_system(system, options)
        todo += [Case(startup, policy, changed, prices, **more) for startup in startups]
    for startup in startups:
        parse_law(startup, where="--startup")
    for case in todo:
        parse_plan(case.policy)
    results = Path(arguments.results) if arguments.results else None
    rows = run_sweep(
        trace, todo, jobs=arguments.jobs, ray=arguments.ray, results=results, resume=arguments.resume
    )
    result = _result(arguments, trace, rows)
    if wants_pictures and len(trace) <= RECORD_MAX_ROWS:
        from scripts.replay.pictures import gather

        print("gathering pictures", file=sys.stderr)
        result["pictures"] = gather(trace, rows, startups, policies, options, prices)
    _write_outputs(arguments, result)
    return 0


def _result(arguments: argparse.Namespace, trace: Trace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": "coldframe-replay/1",
        "version": version(),
        "command": arguments.command_line,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": arguments.seed,
        "trace": _about(trace),
        "stats": burst_stats(trace).as_dict() if len(trace) <= RECORD_MAX_ROWS else None,
        "combinations": rows,
        "differences": [compare(rows[0], row) for row in rows[1:]],
    }


def _write_outputs(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    rows = result["combinations"]
    if arguments.json == "-":
        print(json.dumps(result))
    else:
        print(main_table(rows))
        lines = difference_lines(result) + findings(result)
        if lines:
            print("\n" + "\n".join(lines))
    if arguments.json and arguments.json != "-":
        _write(Path(arguments.json), json.dumps(result) + "\n")
    if arguments.csv:
        _write(Path(arguments.csv), to_csv(rows))
    if arguments.timeline_csv:
        _write(Path(arguments.timeline_csv), timeline_csv(rows))
    if arguments.parquet:
        write_parquet(rows, Path(arguments.parquet))
        print(f"wrote {arguments.parquet}", file=sys.stderr)
    _draw(result, arguments.report, arguments.plots)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, "utf-8")
    partial.replace(path)
    print(f"wrote {path}", file=sys.stderr)


def _draw(result: Mapping[str, Any], report: str | None, plots: str | None) -> None:
    if report:
        from scripts.replay.report import write_report

        write_report(result, Path(report))
        print(f"wrote {report}", file=sys.stderr)
    if plots:
        from scripts.replay.plots import draw_png

        for path in draw_png(result, Path(plots)):
            print(f"wrote {path}", file=sys.stderr)


def _report(arguments: argparse.Namespace) -> int:
    path = Path(arguments.result)
    if not path.is_file():
        raise RequestError("no such file", where=str(path), expected="a result of replay run --json FILE")
    try:
        result = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RequestError("not JSON", where=str(path), found=str(error)) from error
    if not isinstance(result, dict) or result.get("format") != "coldframe-replay/1":
        raise RequestError("not a replay result", where=str(path), expected='"format": "coldframe-replay/1"')
    if not arguments.out and not arguments.plots:
        raise RequestError("nothing to write", where="replay report", expected="--out FILE or --plots FOLDER")
    _draw(result, arguments.out, arguments.plots)
    return 0


def _print_pairs(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else "undefined" if value is None else value
        print(f"{key:20} {shown}")


def _stats(arguments: argparse.Namespace) -> int:
    trace = _load(arguments)
    found = burst_stats(trace, busy=arguments.busy, sliding=arguments.sliding).as_dict()
    _emit(arguments, {"trace": _about(trace), "stats": found}, lambda: _print_pairs(found))
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    trace = _load(arguments)
    stats = burst_stats(trace, busy=arguments.busy, sliding=arguments.sliding)
    fitted = fit_reference(stats, trace)
    _emit(
        arguments,
        {"trace": _about(trace), "stats": stats.as_dict(), "fit": fitted},
        lambda: _print_pairs(
            {**stats.as_dict(), "reference": fitted["spec"], "does not match": fitted["misfits"] or "nothing"}
        ),
    )
    return 0


def _emit(arguments: argparse.Namespace, data: Mapping[str, Any], show: Any) -> None:
    if arguments.json == "-":
        print(json.dumps(data))
        return
    show()
    if arguments.json:
        _write(Path(arguments.json), json.dumps(data) + "\n")


def _search(arguments: argparse.Namespace) -> int:
    trace = _load(arguments)
    options, prices = build_options(arguments)
    limits = {
        metric: getattr(arguments, metric if metric == "cold" else f"{metric}_wait") for metric in METRICS
    }
    given = {metric: limit for metric, limit in limits.items() if limit is not None}
    if len(given) > 1:
        raise RequestError("several limits", where="replay search", found=", ".join(given), expected="one")
    metric, limit = next(iter(given.items()), ("p95", None))
    goal = Goal(metric, limit, prices.wait_value if prices.wait_value > 0 else 1.0)
    found = search(trace, arguments.startup, goal, options, prices)
    found["trace"] = _about(trace)
    _emit(arguments, found, lambda: _show_search(found))
    return 0 if found["chosen"] is not None else OBJECTIVE_NOT_MET


def _show_search(found: Mapping[str, Any]) -> None:
    if found["chosen"] is None:
        print("No setting meets the goal. Nearest:")
    print(main_table([found["chosen"] or found["nearest"]]))
    print("\nFrontier (GPU-hours, share, cold, mean wait, p95 wait):")
    for point in found["frontier"]:
        cap = f" max {point['max_workers']}" if point["max_workers"] else ""
        print(
            f"  {point['policy'] + cap:32} {point['gpu_hours']:10,.1f} {point['share']:7.1%} {point['cold_fraction']:7.1%}"
            f" {point['wait_mean_s']:8.2f} {point['wait_p95_s']:8.2f}"
        )
    for title in ("estimate", "held_out", "confidence"):
        if found.get(title):
            print(f"\n{title}: " + json.dumps(found[title]))
    for name, lines in found.get("console", {}).items():
        print(f"\n{name}:\n" + "\n".join(f"  {line}" for line in lines))
    for note in found["notes"]:
        print(f"note: {note}")


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
        _emit(
            arguments,
            data,
            lambda: _print_pairs({name: f"{len(values)} starts" for name, values in groups.items()}),
        )
        if arguments.out:
            _write(Path(arguments.out), json.dumps(data) + "\n")
        return 0
    if len(paths) != 1:
        raise RequestError(
            "one file", where="replay import", found=len(paths), expected=f"one {arguments.kind} export"
        )
    if arguments.kind == "fal-fleet":
        fleet = fleet_check(paths[0])
        _emit(arguments, fleet, lambda: _print_pairs(fleet))
        return 0
    trace = (
        _windows(paths[0], arguments)
        if arguments.kind == "windows"
        else import_trace(arguments.kind, str(paths[0]))
    )
    _notes(trace)
    found: dict[str, Any] = {"trace": _about(trace)}
    if arguments.compare:
        found["modelled"] = _modelled(trace, arguments)
    _emit(arguments, found, lambda: _print_pairs({**found["trace"], **found.get("modelled", {})}))
    if arguments.out:
        write_trace(trace, Path(arguments.out))
    if arguments.startups_out:
        _write(Path(arguments.startups_out), json.dumps({"startup_s": list(trace.startups)}) + "\n")
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
    _emit(
        arguments,
        _about(trace),
        lambda: print(f"{len(trace):,} requests in {arguments.out}; next: replay run {arguments.out}"),
    )
    return 0


def write_trace(trace: Trace, path: Path) -> None:
    """`timestamp,duration[,pool]` as CSV or Parquet, seconds, full precision."""
    names = [trace.pool_names[code] for code in trace.pools] if len(trace.pool_names) > 1 else None
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
