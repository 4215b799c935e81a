"""`replay run | stats | fit | search | import | generate | report`.

Results on standard output, progress and notes on standard error. Exit codes: 0, 2 usage or refused input, 3 the
objective cannot be met, 4 a library is missing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loader.errors import CapabilityError, RequestError, WorkerError
from scripts.replay.cli_files import add_generate, add_import
from scripts.replay.cli_options import add_model, add_trace, build_options, plan_suffix
from scripts.replay.cli_output import add_json, check_outputs, emit, print_pairs, write_text
from scripts.replay.cli_search import add_search
from scripts.replay.cli_trace import about, load_trace, require_requests
from scripts.replay.findings import findings
from scripts.replay.laws import parse_law
from scripts.replay.measures import compare
from scripts.replay.platforms import parse_system
from scripts.replay.policies import parse_plan
from scripts.replay.search import SEARCH_FORMAT
from scripts.replay.search_report import write_search_report
from scripts.replay.simulate import RECORD_MAX_ROWS
from scripts.replay.specs import split_specs
from scripts.replay.stats import burst_stats, fit_reference, in_words
from scripts.replay.sweep import Case, cases, run_sweep, version, write_parquet
from scripts.replay.tables import difference_lines, main_table, timeline_csv, to_csv
from scripts.replay.traces import Trace

RUN_FORMAT = "coldframe-replay/1"


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns the exit code."""
    try:
        arguments = _parser().parse_args(list(argv))
    except SystemExit as leave:
        return int(leave.code or 0)
    arguments.command_line = shlex.join(["replay", *argv])
    try:
        check_outputs(arguments)
        return int(arguments.run(arguments))
    except WorkerError as error:
        print(f"replay: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()  # the reader of our output has left
            return 1
        # Disk full, or a file that went away: nothing half-written has the name of a result.
        print(f"replay: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return CapabilityError.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coldframe replay", description="How long to keep an idle GPU.")
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
        add_json(sub)
        sub.set_defaults(run=run)
    add_search(commands.add_parser("search", help="cheapest settings under a waiting limit"))
    add_import(commands.add_parser("import", help="platform exports and published traces → trace file"))
    add_generate(commands.add_parser("generate", help="write a synthetic trace"))
    sub = commands.add_parser("report", help="HTML page or PNG plots of a result")
    sub.add_argument("result")
    sub.add_argument("--out", help="HTML file")
    sub.add_argument("--plots", help="folder for PNG files")
    sub.set_defaults(run=_report)
    return parser


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
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    options, prices = build_options(arguments)
    suffix = plan_suffix(arguments)
    startups = split_specs(arguments.startup)
    policies = [policy + suffix for policy in split_specs(arguments.policy)]
    for startup in startups:
        parse_law(startup, where="--startup")
    for policy in policies:
        parse_plan(policy)
    if arguments.jobs < 1:
        raise RequestError("too few processes", where="--jobs", found=arguments.jobs, expected="≥ 1")
    trace = load_trace(arguments)
    require_requests(trace, options)
    to_file = arguments.json not in (None, "-")
    wants_pictures = (to_file or arguments.plots or arguments.report) and not arguments.no_pictures
    more = {"with_timeline": bool(wants_pictures or arguments.timeline_csv)}
    todo = cases(startups, policies, options, prices, **more)
    for system in arguments.system:
        policy, changed = parse_system(system, options)
        todo += [Case(startup, policy, changed, prices, **more) for startup in startups]
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
        "format": RUN_FORMAT,
        "version": version(),
        "command": arguments.command_line,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": arguments.seed,
        "trace": about(trace),
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
        write_text(Path(arguments.json), json.dumps(result) + "\n")
    if arguments.csv:
        write_text(Path(arguments.csv), to_csv(rows))
    if arguments.timeline_csv:
        write_text(Path(arguments.timeline_csv), timeline_csv(rows))
    if arguments.parquet:
        write_parquet(rows, Path(arguments.parquet))
        print(f"wrote {arguments.parquet}", file=sys.stderr)
    _draw(result, arguments.report, arguments.plots)


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
        raise RequestError(
            "no such file",
            where=str(path),
            expected="a result of `replay run --json FILE` or `replay search --json FILE`",
        )
    try:
        result = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RequestError("not JSON", where=str(path), found=str(error)) from error
    known = (RUN_FORMAT, SEARCH_FORMAT)
    if not isinstance(result, dict) or result.get("format") not in known:
        raise RequestError("not a replay result", where=str(path), expected=f'"format": {" or ".join(known)}')
    if not arguments.out and not arguments.plots:
        raise RequestError("nothing to write", where="replay report", expected="--out FILE or --plots FOLDER")
    if result["format"] == SEARCH_FORMAT:
        if arguments.plots:
            raise RequestError("a search has a page only", where="--plots", expected="--out FILE")
        write_search_report(result, Path(arguments.out))
        print(f"wrote {arguments.out}", file=sys.stderr)
        return 0
    _draw(result, arguments.out, arguments.plots)
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    trace = load_trace(arguments)
    found = burst_stats(trace, busy=arguments.busy, sliding=arguments.sliding).as_dict()
    emit(arguments, {"trace": about(trace), "stats": found}, lambda: print_pairs(in_words(found)))
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    trace = load_trace(arguments)
    stats = burst_stats(trace, busy=arguments.busy, sliding=arguments.sliding)
    fitted = fit_reference(stats, trace)
    emit(
        arguments,
        {"trace": about(trace), "stats": stats.as_dict(), "fit": fitted},
        lambda: print_pairs(
            {
                **in_words(stats.as_dict()),
                "reference workload with these statistics": fitted["spec"],
                "what it does not match": fitted["misfits"] or "nothing",
            }
        ),
    )
    return 0
