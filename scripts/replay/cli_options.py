"""Command-line options shared by the commands: which trace, which model."""

from __future__ import annotations

import argparse

from loader.errors import RequestError
from scripts.replay.measures import Prices
from scripts.replay.options import BINDINGS, DISPATCHES, Options
from scripts.replay.platforms import parse_delay
from scripts.replay.reading import Columns
from scripts.replay.specs import parse_number


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Options that choose and change a trace."""
    group = parser.add_argument_group("trace")
    group.add_argument(
        "trace",
        nargs="?",
        help="CSV, Parquet, JSON lines, JSON array, gzip of these, or - for standard input",
    )
    group.add_argument(
        "--synthetic", metavar="SPEC", help="ref, poisson:rate=5, gamma, mixed, batch, onoff, hawkes, spike"
    )
    group.add_argument("--time", metavar="COLUMN", help="column of the arrival times")
    group.add_argument("--duration-column", metavar="COLUMN", help="column of the generation times")
    group.add_argument(
        "--pool", metavar="COLUMN", help="column that separates pools (default: pool, model, function, app)"
    )
    group.add_argument(
        "--unit", choices=("s", "ms", "us", "ns"), help="unit of numeric times (default: by magnitude)"
    )
    group.add_argument("--delimiter", default=",")
    group.add_argument(
        "--duration",
        metavar="LAW",
        help="generation times: a number, lognormal:mean=54,cv=0.4, by:COLUMN,mean=54",
    )
    group.add_argument("--duration-scale", type=float, default=1.0, help="factor on generation times")
    group.add_argument(
        "--thin", default="1", metavar="1/20", help="keep this share of the requests: keeps bursts"
    )
    group.add_argument(
        "--interval-scale", type=float, default=1.0, help="factor on the gaps, never on generation times"
    )
    group.add_argument("--one-pool", action="store_true", help="merge all pools")
    group.add_argument("--seed", type=int, default=0)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Options of the model; all off by default."""
    group = parser.add_argument_group("model")
    group.add_argument("--binding", choices=BINDINGS, default="bound")
    group.add_argument("--dispatch", choices=DISPATCHES, default="newest-idle")
    group.add_argument(
        "--cancel-surplus", action="store_true", help="shared: drop a pending start that lost its request"
    )
    group.add_argument("--max-workers", type=int, help="cap per pool")
    group.add_argument("--max-gpus", type=int, help="cap over all pools")
    group.add_argument(
        "--evict", action="store_true", help="at the global cap, take idle workers of other pools"
    )
    group.add_argument("--queue-limit", type=int, help="refuse requests beyond this queue")
    group.add_argument("--queue-timeout", type=float, metavar="S", help="requests leave after this wait")
    group.add_argument(
        "--scheduling", metavar="LAW", help="platform delay: modal, fal[:image_pull=p], together, nebius, LAW"
    )
    group.add_argument("--bill-scheduling", action="store_true")
    group.add_argument("--fresh-idle", type=float, metavar="S", help="retention of workers that never served")
    group.add_argument("--scale-delay", type=float, default=0.0, metavar="S")
    group.add_argument("--scale-rate", metavar="N/S", help="at most N new workers per S seconds and pool")
    group.add_argument(
        "--start-failure", metavar="P,S", help="probability and seconds until it shows; then back-off"
    )
    group.add_argument("--gpus-per-worker", type=int, default=1)
    group.add_argument("--efficiency", metavar="K=E,…", help="parallel efficiency by GPUs per worker")
    group.add_argument(
        "--slowdown", metavar="1,1.3,…", help="service factors of 1, 2, … requests in one worker"
    )
    group.add_argument(
        "--preempt", type=float, metavar="S", help="mean time between platform preemptions of a worker"
    )
    group.add_argument(
        "--min-workers", type=int, default=0, help="warm floor per pool, added to every policy"
    )
    group.add_argument("--buffer", type=int, default=0, help="spare workers, added to every policy")
    group.add_argument("--buffer-percent", type=float, default=0.0)
    group.add_argument("--buffer-while-active", action="store_true")
    group.add_argument("--window", metavar="A:B", help="account only these seconds of the trace")
    group.add_argument(
        "--warmup", type=float, default=0.0, metavar="S", help="leave the first seconds out of all figures"
    )
    group.add_argument("--engine", choices=("auto", "python", "numba", "fleet"), default="auto")
    group.add_argument("--gpu-price", type=float, metavar="USD", help="per GPU-second")
    group.add_argument("--request-price", type=float, default=0.0, metavar="USD")
    group.add_argument(
        "--wait-value", type=float, default=0.0, help="price of a waiting second in GPU-seconds"
    )


def trace_columns(arguments: argparse.Namespace) -> Columns:
    """Column choices; `--duration by:COLUMN` reads that column too."""
    law = arguments.duration or ""
    sizes = (law[3:].split(",")[0],) if law.startswith("by:") else ()
    return Columns(
        arguments.time, arguments.duration_column, arguments.pool, arguments.unit, arguments.delimiter, sizes
    )


def plan_suffix(arguments: argparse.Namespace) -> str:
    """Floor and buffer options as policy parts."""
    found = f"+floor:{arguments.min_workers}" if arguments.min_workers else ""
    if arguments.buffer or arguments.buffer_percent:
        found += f"+buffer:{arguments.buffer},percent={arguments.buffer_percent:g},active={int(arguments.buffer_while_active)}"
    return found


def build_options(arguments: argparse.Namespace) -> tuple[Options, Prices]:
    """Options and prices; a namespace without model options gives the base model."""
    if not hasattr(arguments, "binding"):
        return Options(seed=arguments.seed), Prices()
    options = Options(
        binding=arguments.binding,
        dispatch=arguments.dispatch,
        cancel_surplus=arguments.cancel_surplus,
        max_workers=arguments.max_workers,
        max_gpus=arguments.max_gpus,
        evict=arguments.evict,
        queue_limit=arguments.queue_limit,
        queue_timeout_s=arguments.queue_timeout,
        scheduling=parse_delay(arguments.scheduling) if arguments.scheduling else None,
        bill_scheduling=arguments.bill_scheduling,
        fresh_idle_s=arguments.fresh_idle,
        scale_delay_s=arguments.scale_delay,
        scale_rate=_rate(arguments.scale_rate),
        start_failure=_pair(arguments.start_failure, ",", "--start-failure"),
        gpus_per_worker=arguments.gpus_per_worker,
        efficiency=_efficiency(arguments.efficiency),
        slowdown=tuple(_numbers(arguments.slowdown or "1", ",", "--slowdown")),
        preempt_mean_s=arguments.preempt,
        window=_pair(arguments.window, ":", "--window"),
        warmup_s=arguments.warmup,
        engine=arguments.engine,
        seed=arguments.seed,
    )
    return options, Prices(arguments.gpu_price, arguments.request_price, arguments.wait_value)


def _numbers(text: str, separator: str, where: str) -> list[float]:
    return [parse_number(part, where=where) for part in text.split(separator)]


def _pair(text: str | None, separator: str, where: str) -> tuple[float, float] | None:
    if text is None:
        return None
    values = _numbers(text, separator, where)
    if len(values) != 2:
        raise RequestError("two numbers", where=where, found=repr(text), expected=f"a{separator}b")
    return values[0], values[1]


def _rate(text: str | None) -> tuple[int, float] | None:
    pair = _pair(text, "/", "--scale-rate")
    if pair is None:
        return None
    if pair[0] < 1 or pair[1] <= 0:
        raise RequestError(
            "a rate", where="--scale-rate", found=repr(text), expected="workers/seconds, e.g. 10/60"
        )
    return int(pair[0]), pair[1]


def _efficiency(text: str | None) -> dict[int, float]:
    found: dict[int, float] = {}
    for part in (text or "").split(","):
        if part:
            count, _, value = part.partition("=")
            found[int(parse_number(count, where="--efficiency"))] = parse_number(value, where="--efficiency")
    return found
