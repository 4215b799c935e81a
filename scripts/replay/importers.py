"""Platform exports and published traces → `Trace`. Adapters only: no row of theirs is shipped."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import RequestError
from scripts.replay.clocks import clock_from_dates, clock_from_numbers, parse_float
from scripts.replay.stats import nearest_rank
from scripts.replay.traces import Trace


@dataclass
class Log:
    """Rows on their way to a trace: texts, with the line or item each came from."""

    label: str
    times: list[str] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    pools: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    sizes: dict[str, list[float]] = field(default_factory=dict)
    startups: list[float] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def add(self, line: int, time: str, duration: float, pool: str) -> None:
        self.lines.append(line)
        self.times.append(time)
        self.durations.append(duration)
        self.pools.append(pool)

    def trace(self, time_column: str) -> Trace:
        """Sorted and normalised; says what was dropped."""
        if not self.times:
            raise RequestError(
                "no usable rows", where=self.label, found=str(self.dropped), expected="at least one request"
            )
        if parse_float(self.times[0]) is None:
            clock = clock_from_dates(self.times, self.lines, time_column)
        else:
            clock = clock_from_numbers(
                np.array([self._number(i) for i in range(len(self.times))]), self.lines, None, time_column
            )
        order = np.argsort(clock.seconds, kind="stable")
        names = tuple(dict.fromkeys(self.pools))
        code = {name: number for number, name in enumerate(names)}
        moved = int((clock.seconds < np.maximum.accumulate(clock.seconds)).sum())
        facts = {
            "source": self.label,
            "rows_kept": len(self.times),
            "rows_moved": moved,
            "rows_dropped": sum(self.dropped.values()),
            "dropped": dict(self.dropped),
            **self.facts,
        }
        return Trace(
            clock.seconds[order],
            np.array(self.durations)[order],
            np.array([code[name] for name in self.pools], dtype=np.int32)[order],
            names,
            self.label,
            facts,
            0.0 if clock.origin_s is None else clock.origin_s % 3600,
            {name: np.array(values)[order] for name, values in self.sizes.items()},
            tuple(self.startups),
        )

    def _number(self, index: int) -> float:
        value = parse_float(self.times[index])
        if value is None:
            raise RequestError(
                f"line {self.lines[index]}: the timestamp is not a number",
                where=self.label,
                found=repr(self.times[index]),
            )
        return value


def import_trace(kind: str, path: str) -> Trace:
    """Reads one export. Kinds: modal, fal, worker-log, azure-llm, burstgpt, gentd26, azure-functions, huawei."""
    if kind not in IMPORTERS:
        raise RequestError(
            "unknown kind of log", where="replay import", found=kind, expected=", ".join(sorted(IMPORTERS))
        )
    if not Path(path).is_file():
        raise RequestError("no such file", where=path, expected="a downloaded export")
    return IMPORTERS[kind](Path(path))


# --- platforms -----------------------------------------------------------------------------------------------------


def _modal(path: Path) -> Trace:
    """The array printed by `modal function calls APP/FUNC --since 7d --json`.

    Startup times: `startup_time_seconds`; whether that includes the container's own boot is not documented. The first
    `started_at − enqueued_at` of each container is the observed cold wait.
    """
    items = _json_items(path)
    log = Log(path.name)
    waits: list[float] = []
    seen: set[str] = set()
    for number, item in enumerate(items, 1):
        arrival, duration = item.get("enqueued_at"), item.get("execution_time_seconds")
        if arrival is None or duration is None:
            log.drop("no enqueued_at or execution_time_seconds (still queued, cancelled or failed early)")
            continue
        log.add(
            number,
            str(arrival),
            _seconds(duration, path, number, "execution_time_seconds"),
            _modal_pool(item),
        )
        startup = item.get("startup_time_seconds")
        if startup is not None:
            log.startups.append(_seconds(startup, path, number, "startup_time_seconds"))
        container = item.get("container_id")
        if container is not None and container not in seen and item.get("started_at") is not None:
            seen.add(container)
            waits.append(_moment(item["started_at"]) - _moment(arrival))
    statuses: dict[str, int] = {}
    for item in items:
        statuses[str(item.get("status"))] = statuses.get(str(item.get("status")), 0) + 1
    log.facts.update(containers=len(seen), status=statuses, observed=_observed(waits, log.startups))
    return log.trace("enqueued_at")


def _modal_pool(item: Mapping[str, Any]) -> str:
    return str(item.get("service_method_name") or item.get("function_name") or "function")


def _observed(waits: Sequence[float], startups: Sequence[float]) -> dict[str, float]:
    """Measured cold waits, to be put beside the model's; the platform's share is wait minus startup."""
    if not waits:
        return {}
    ordered = np.sort(np.array(waits))
    found = {"cold_starts": float(len(waits)), "cold_wait_mean_s": float(ordered.mean())}
    found.update(
        {f"cold_wait_{name}_s": nearest_rank(ordered, share) for name, share in (("p50", 0.5), ("p90", 0.9))}
    )
    if startups:
        found["startup_mean_s"] = float(np.mean(startups))
        found["platform_mean_s"] = found["cold_wait_mean_s"] - found["startup_mean_s"]
    return found


def _moment(value: object) -> float:
    number = parse_float(str(value))
    if number is not None:
        return number
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError as error:
        raise RequestError("not a time", found=repr(value), expected="ISO 8601 or POSIX seconds") from error


def _worker_log(path: Path) -> Trace:
    """One JSON object per line, as the worker and the gateway write them on every platform.

    Keys: request_id, received_at, started_at, finished_at, pool, startup_s (null when warm).
    """
    log = Log(path.name)
    for number, item in enumerate(_json_items(path), 1):
        if (
            item.get("received_at") is None
            or item.get("started_at") is None
            or item.get("finished_at") is None
        ):
            log.drop("not finished")
            continue
        duration = _moment(item["finished_at"]) - _moment(item["started_at"])
        log.add(
            number,
            str(item["received_at"]),
            _seconds(duration, path, number, "duration"),
            str(item.get("pool") or "all"),
        )
        if item.get("startup_s") is not None:
            log.startups.append(_seconds(item["startup_s"], path, number, "startup_s"))
    return log.trace("received_at")


def fleet_check(path: Path) -> dict[str, object]:
    """Runner counts from `fal runners list --since 24h --json`: fal exports no requests, only its fleet."""
    items = _json_items(path)
    machines: dict[str, int] = {}
    for item in items:
        machine = str(item.get("machine_type"))
        machines[machine] = machines.get(machine, 0) + 1
    uptime = [float(item["uptime_seconds"]) for item in items if item.get("uptime_seconds") is not None]
    return {"runners": len(items), "uptime_s": sum(uptime), "machines": machines}


def startups_from_timelines(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Startup seconds of this project's timelines, by "device region cache" as far as their facts say.

    A startup ends where the waiting request's work on the GPU begins: at the headline mark `first_dit_entry`; without
    it, at the last event. Times count from the first instruction.
    """
    found: dict[str, list[float]] = {}
    for path in paths:
        data = json.loads(path.read_text("utf-8"))
        if not isinstance(data, dict) or not data.get("traceEvents"):
            raise RequestError("not a startup timeline", where=str(path), expected="JSON with traceEvents")
        events = [event for event in data["traceEvents"] if "ts" in event]
        first = min(0.0, *(event["ts"] for event in events))
        last = max(event["ts"] + event.get("dur", 0) for event in events)
        seconds = data.get("headline", {}).get("first_dit_entry", (last - first) / 1e6)
        about = data.get("facts", {})
        key = " ".join(str(about[name]) for name in ("device", "region", "cache") if about.get(name))
        found.setdefault(key or "all", []).append(float(seconds))
    return found


# --- published traces ----------------------------------------------------------------------------------------------


def _azure_llm(path: Path) -> Trace:
    """Azure LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens` (also this repository's excerpts)."""
    log = Log(path.name)
    for line, row in _csv_rows(path):
        log.add(line, _pick(row, "TIMESTAMP", "timestamp"), 0.0, "all")
        for name, keys in (
            ("context_tokens", ("ContextTokens", "context_tokens")),
            ("generated_tokens", ("GeneratedTokens", "generated_tokens")),
        ):
            log.sizes.setdefault(name, []).append(_seconds(_pick(row, *keys), path, line, name))
    log.facts["needs"] = "service times: --duration lognormal:mean=54,cv=0.4 or by:generated_tokens,mean=54"
    return log.trace("TIMESTAMP")


def _burstgpt(path: Path) -> Trace:
    """BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`; some add `Elapsed time`."""
    log = Log(path.name)
    for line, row in _csv_rows(path):
        elapsed = row.get("Elapsed time") or "0"
        log.add(
            line, _pick(row, "Timestamp"), _seconds(elapsed, path, line, "Elapsed time"), _pick(row, "Model")
        )
        tokens = _pick(row, "Response tokens")
        log.sizes.setdefault("response_tokens", []).append(_seconds(tokens, path, line, "Response tokens"))
    log.facts["needs"] = "service times unless the file has Elapsed time: --duration …"
    return log.trace("Timestamp")


def _gentd26(path: Path) -> Trace:
    """Alibaba GenTD26 `lora_request_trace.csv`: Stable Diffusion requests, a pool per base model."""
    log = Log(path.name)
    for line, row in _csv_rows(path):
        if _pick(row, "predict_status") != "SUCCEED":
            log.drop("predict_status is not SUCCEED")
            continue
        seconds = parse_float(_pick(row, "exec_time_seconds"))
        if seconds is None or seconds <= 0:
            log.drop("execution time missing or not positive")
            continue
        log.add(line, _pick(row, "gmt_create"), seconds, _pick(row, "checkpoint_model_version_id"))
    log.facts["licence"] = "for research or study; no grant to redistribute"
    return log.trace("gmt_create")


def _azure_functions(path: Path) -> Trace:
    """Azure Functions 2021: `app,func,end_timestamp,duration`; the arrival is the end minus the duration."""
    log = Log(path.name)
    for line, row in _csv_rows(path):
        seconds = _seconds(_pick(row, "duration"), path, line, "duration")
        end = _seconds(_pick(row, "end_timestamp"), path, line, "end_timestamp")
        log.add(line, repr(end - seconds), seconds, _pick(row, "app"))
    return log.trace("end_timestamp")


def _huawei(path: Path) -> Trace:
    """Huawei public cloud 2025: requests with cold-start components; pool = function.

    Components that are present add up to a measured startup: podAllocationCost, deployCodeCost, deployDependencyCost,
    schedulingCost (seconds).
    """
    log = Log(path.name)
    parts = ("podAllocationCost", "deployCodeCost", "deployDependencyCost", "schedulingCost")
    for line, row in _csv_rows(path):
        given = [_seconds(row[part], path, line, part) for part in parts if row.get(part)]
        if given and sum(given) > 0:
            log.startups.append(sum(given))
        run = _seconds(_pick(row, "runtime", "duration", "executionTime"), path, line, "duration")
        log.add(line, _pick(row, "timestamp", "time", "day"), run, _pick(row, "funcName", "function", "pod"))
    return log.trace("timestamp")


# --- shared --------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """(line, cells by name) of a CSV file; refuses rows of another length."""
    found: list[tuple[int, dict[str, str]]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                raise RequestError(f"line {reader.line_num}: wrong number of columns", where=path.name)
            found.append((reader.line_num, {key.strip(): value.strip() for key, value in row.items()}))
    if not found:
        raise RequestError("no rows: the file is empty", where=path.name, expected="at least one row")
    return found


def _pick(row: Mapping[str, str], *names: str) -> str:
    for name in names:
        if name in row:
            return row[name]
    raise RequestError("a column is missing", found=", ".join(row), expected=" | ".join(names))


def _seconds(value: object, path: Path, line: int, name: str) -> float:
    number = parse_float(str(value))
    if number is None or number < 0:
        raise RequestError(f"line {line}: {name} is not a number ≥ 0", where=path.name, found=repr(value))
    return number


def _json_items(path: Path) -> list[dict[str, Any]]:
    text = path.read_text("utf-8-sig")
    try:
        items = (
            json.loads(text)
            if text.lstrip()[:1] == "["
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except ValueError as error:
        raise RequestError(
            "not JSON", where=path.name, found=str(error), expected="an array or one object a line"
        ) from error
    if not items:
        raise RequestError("no rows: the export is empty", where=path.name, expected="at least one input")
    if not all(isinstance(item, dict) for item in items):
        raise RequestError("not objects", where=path.name, expected="JSON objects")
    return list(items)


IMPORTERS: dict[str, Callable[[Path], Trace]] = {
    "modal": _modal,
    "fal": _worker_log,
    "worker-log": _worker_log,
    "azure-llm": _azure_llm,
    "burstgpt": _burstgpt,
    "gentd26": _gentd26,
    "azure-functions": _azure_functions,
    "huawei": _huawei,
}
