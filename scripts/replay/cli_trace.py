"""From the options to the trace that a command works on, and what is said about it."""

from __future__ import annotations

import argparse
import math
import sys
from fractions import Fraction
from typing import Any

from loader.errors import RequestError
from scripts.replay.cli_options import trace_columns
from scripts.replay.laws import parse_law
from scripts.replay.options import Options
from scripts.replay.reading import read_trace
from scripts.replay.specs import parse_spec
from scripts.replay.traces import (
    Trace,
    durations_by_size,
    merge_pools,
    scale_durations,
    stretch,
    thin,
    with_durations,
)
from scripts.replay.workload import synthetic


def load_trace(arguments: argparse.Namespace) -> Trace:
    """The trace of the options, with its service times; prints what was read and repaired."""
    if (arguments.trace is None) == (arguments.synthetic is None):
        raise RequestError(
            "exactly one trace is needed", where="trace", expected="a file, or --synthetic SPEC"
        )
    law = arguments.duration
    if arguments.synthetic is not None:
        trace = synthetic(arguments.synthetic, arguments.seed)
    else:
        trace = read_trace(arguments.trace, trace_columns(arguments), needs_duration=law is None)
    print_notes(trace)
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


def print_notes(trace: Trace) -> None:
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


def about(trace: Trace) -> dict[str, Any]:
    return {
        "label": trace.label,
        "requests": len(trace),
        "pools": len(trace.pool_names),
        "span_s": float(trace.arrivals[-1]),
        "duration_mean_s": float(trace.durations.mean()),
        "digest": trace.digest(),
        **trace.facts,
    }


def require_requests(trace: Trace, options: Options) -> None:
    """Raises: RequestError: the accounted stretch holds no arrival, so that every figure would be empty."""
    begin, end = options.window or (0.0, math.inf)
    begin = max(begin, options.warmup_s)
    if not ((trace.arrivals >= begin) & (trace.arrivals < end)).any():
        raise RequestError(
            "nothing to account for: every request is outside", where="--window, --warmup",
            found=f"{begin:g} … {end:g} s", expected=f"some of 0 … {trace.arrivals[-1]:g} s",
        )  # fmt: skip
