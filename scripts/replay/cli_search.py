"""`replay search`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loader.errors import RequestError
from scripts.replay.cli_options import add_model, add_trace, build_options
from scripts.replay.cli_output import add_json, emit
from scripts.replay.cli_trace import about, load_trace, require_requests
from scripts.replay.laws import parse_law
from scripts.replay.search import METRICS, Goal, search
from scripts.replay.search_report import search_text, write_search_report

OBJECTIVE_NOT_MET = 3


def add_search(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_trace(parser)
    add_model(parser)
    parser.add_argument("--startup", default="7.2", help="a number, a distribution or empirical:FILE")
    for metric in METRICS:
        text = "largest cold fraction" if metric == "cold" else f"limit on the {metric} wait, s"
        parser.add_argument(f"--{metric}" if metric == "cold" else f"--{metric}-wait", type=float, help=text)
    parser.add_argument("--report", metavar="FILE", help="self-contained HTML page")
    add_json(parser)
    parser.set_defaults(run=_search)


def _search(arguments: argparse.Namespace) -> int:
    options, prices = build_options(arguments)
    limits = {
        metric: getattr(arguments, metric if metric == "cold" else f"{metric}_wait") for metric in METRICS
    }
    given = {metric: limit for metric, limit in limits.items() if limit is not None}
    if len(given) > 1:
        raise RequestError("several limits", where="replay search", found=", ".join(given), expected="one")
    metric, limit = next(iter(given.items()), ("p95", None))
    goal = Goal(metric, limit, prices.wait_value if prices.wait_value > 0 else 1.0)
    parse_law(arguments.startup, where="--startup")
    trace = load_trace(arguments)
    require_requests(trace, options)
    found = search(trace, arguments.startup, goal, options, prices)
    found["trace"] = about(trace)
    found["command"] = arguments.command_line
    emit(arguments, found, lambda: print(search_text(found)))
    if arguments.report:
        write_search_report(found, Path(arguments.report))
        print(f"wrote {arguments.report}", file=sys.stderr)
    return 0 if found["chosen"] is not None else OBJECTIVE_NOT_MET
