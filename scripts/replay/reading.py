"""Trace files → `Trace`: CSV (plain or gzip), Parquet, JSON lines, JSON arrays, standard input.

Two readers of one format: a fast one for clean numeric files, and a careful one that knows line numbers. The fast
one never decides that a file is bad: at the first doubt the careful one reads it again.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import RequestError
from scripts.replay.clocks import Clock, Floats, clock_from_dates, clock_from_numbers, parse_float
from scripts.replay.optional import is_installed, require
from scripts.replay.traces import Trace

TIME_NAMES = ("timestamp", "time", "arrival", "enqueued_at", "received_at", "gmt_create")
DURATION_NAMES = ("duration", "generation", "execution_time_seconds", "exec_time_seconds")
POOL_NAMES = ("pool", "model", "function", "app")
MAX_UNZIPPED_BYTES = 8 << 30  # a gzip bomb ends here rather than in swap
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Columns:
    """Which columns to read; None means: by the known names."""

    time: str | None = None
    duration: str | None = None
    pool: str | None = None
    unit: str | None = None
    delimiter: str = ","
    sizes: tuple[str, ...] = ()


BY_NAME = Columns()


@dataclass(frozen=True)
class Table:
    """Text cells with the line each row began on, and what was skipped."""

    header: Sequence[str]
    rows: list[Sequence[str]]
    lines: list[int]
    blank: int = 0


def read_trace(path: str, columns: Columns = BY_NAME, *, needs_duration: bool = True) -> Trace:
    """Reads, checks, repairs and normalises a trace.

    Args:
        path: a file, or "-" for standard input; gzip is recognised by content, Parquet by magic bytes.
        needs_duration: False if service times come from an option; a missing column is then legal.
    Returns: Trace with `facts`: rows read, kept, moved, dropped, digest, unit, warnings.
    Raises: RequestError: the first problem of the file, with its line number.
    """
    data, label = _read_bytes(path)
    try:
        return _read(data, label, columns, needs_duration)
    except RequestError as error:
        if error.where is not None and not error.where.startswith("column "):
            raise
        raise RequestError(
            error.message, where=label, found=error.found, expected=error.expected, hint=error.hint
        ) from error


def _read(data: bytes, label: str, columns: Columns, needs_duration: bool) -> Trace:
    """By the form that the first bytes tell. Raises: RequestError, naming the file at least by its line."""
    if not data.strip():
        raise RequestError(
            "the file is empty: no rows", where=label, found=f"{len(data)} bytes", expected="rows"
        )
    facts: dict[str, object] = {"source": label, "sha256": hashlib.sha256(data).hexdigest()}
    if data[:4] == b"PAR1":
        return _from_table(_parquet_table(data), columns, label, facts, needs_duration)
    if data.lstrip()[:1] in (b"{", b"["):
        return _from_table(_json_table(data, label), columns, label, facts, needs_duration)
    quick = _read_fast(data, columns, label, facts)
    if quick is not None:
        return quick
    return _from_table(_csv_table(data, columns, label), columns, label, facts, needs_duration)


def _read_bytes(path: str) -> tuple[bytes, str]:
    if path == "-":
        data, label = sys.stdin.buffer.read(), "standard input"
    else:
        file = Path(path)
        if not file.is_file():
            found = "a folder" if file.is_dir() else None
            raise RequestError("no such file", where=path, found=found, expected="a trace file or -")
        data, label = file.read_bytes(), file.name
    if data[:2] == b"\x1f\x8b":
        data = _unzip(data, label)
    return data.removeprefix(b"\xef\xbb\xbf"), label


def _unzip(data: bytes, label: str) -> bytes:
    found = bytearray()
    try:
        with gzip.open(io.BytesIO(data)) as file:
            while piece := file.read(PIECE_BYTES):
                found += piece
                if len(found) > MAX_UNZIPPED_BYTES:
                    raise RequestError(
                        "too large unpacked", where=label, expected=f"≤ {MAX_UNZIPPED_BYTES} bytes"
                    )
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(
            "damaged gzip data", where=label, found=str(error), expected="a whole gzip file"
        ) from error
    return bytes(found)


# --- fast reader ---------------------------------------------------------------------------------------------------


def _read_fast(data: bytes, columns: Columns, label: str, facts: dict[str, object]) -> Trace | None:
    """Clean numeric CSV of two columns or with a pool column; None sends the file to the careful reader."""
    head, _, body = data[:65536].partition(b"\n")
    if b"\0" in data or b'"' in head or not body.strip():
        return None
    header = [cell.strip() for cell in head.decode("utf-8", "replace").strip("\r\n").split(columns.delimiter)]
    chosen = _choose(header, columns)
    if chosen.time is None or chosen.duration is None or columns.sizes:
        return None
    names = [chosen.time, chosen.duration] + ([chosen.pool] if chosen.pool else [])
    if len(set(header)) != len(header):
        return None
    read = _arrow_columns if is_installed("pyarrow") else _numpy_columns
    values = read(data, header, names, columns.delimiter)
    if values is None or len(values[0]) == 0:
        return None
    times, durations = values[0], values[1]
    if not (np.isfinite(times).all() and np.isfinite(durations).all() and (durations >= 0).all()):
        return None
    clock = clock_from_numbers(times, None, columns.unit, chosen.time)
    codes, pool_names = values[2] if chosen.pool else (np.zeros(len(times), np.int32), ("all",))
    return _finish(clock, durations, codes, pool_names, label, {**facts, "rows_read": len(times)}, {})


def _arrow_columns(data: bytes, header: list[str], names: list[str], delimiter: str) -> list[Any] | None:
    arrow_csv = require("pyarrow.csv", "fast CSV")
    arrow = require("pyarrow", "fast CSV")
    kinds = {name: arrow.float64() for name in names[:2]}
    kinds.update({name: arrow.dictionary(arrow.int32(), arrow.string()) for name in names[2:]})
    try:
        table = arrow_csv.read_csv(
            arrow.BufferReader(data),
            read_options=arrow_csv.ReadOptions(use_threads=False, skip_rows=1, column_names=header),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, ignore_empty_lines=False),
            convert_options=arrow_csv.ConvertOptions(
                column_types=kinds, include_columns=names, null_values=[]
            ),
        )
    except arrow.ArrowInvalid:
        return None
    found: list[Any] = [np.asarray(table[name].to_numpy()) for name in names[:2]]
    for name in names[2:]:
        coded = table[name].unify_dictionaries().combine_chunks()
        labels = [str(text) for text in coded.dictionary.to_pylist()]
        if any(text != text.strip() for text in labels):
            return None
        found.append((np.asarray(coded.indices), tuple(labels)))
    return found


def _numpy_columns(data: bytes, header: list[str], names: list[str], delimiter: str) -> list[Any] | None:
    if len(names) > 2:
        return None
    try:
        table = np.loadtxt(
            io.BytesIO(data),
            delimiter=delimiter,
            skiprows=1,
            usecols=[header.index(name) for name in names],
            ndmin=2,
            comments=None,
        )
    except (ValueError, IndexError):
        return None
    return [np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])]


# --- careful reader ------------------------------------------------------------------------------------------------


def _csv_table(data: bytes, columns: Columns, label: str) -> Table:
    nul = data.find(b"\0")
    if nul >= 0:
        line = data.count(b"\n", 0, nul) + 1
        raise RequestError(f"line {line}: a NUL character", where=label, expected="text without NUL bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RequestError(f"line {line}: not UTF-8 text", where=label, expected="UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=columns.delimiter, strict=True)
    header: Sequence[str] | None = None
    rows: list[Sequence[str]] = []
    lines: list[int] = []
    blank, previous = 0, 0
    try:
        for cells in reader:
            line, previous = previous + 1, reader.line_num
            if not any(cell.strip() for cell in cells):
                blank += 1
            elif header is None:
                header = [cell.strip() for cell in cells]
            else:
                if len(cells) != len(header):
                    raise RequestError(
                        f"line {line}: wrong number of columns",
                        where=label,
                        found=len(cells),
                        expected=len(header),
                    )
                rows.append(cells)
                lines.append(line)
    except csv.Error as error:
        raise RequestError(
            f"line {reader.line_num}: not CSV ({error})", where=label, expected="CSV"
        ) from error
    assert header is not None
    _check_delimiter(header, columns.delimiter, label)
    return Table(header, rows, lines, blank)


def _check_delimiter(header: Sequence[str], delimiter: str, label: str) -> None:
    if len(header) != 1:
        return
    for other, flag in ((";", "';'"), ("\t", "$'\\t'"), ("|", "'|'")):
        if other != delimiter and other in header[0]:
            raise RequestError(
                "line 1: the header has one column; another delimiter separates timestamp and duration",
                where=label,
                found=repr(header[0]),
                expected=f"columns separated by {delimiter!r}",
                hint=f"--delimiter {flag}",
            )


def _json_table(data: bytes, label: str) -> Table:
    """A JSON array of objects, or one object per line."""
    whole = data.lstrip()[:1] == b"["
    try:
        if whole:
            items = [(number, item) for number, item in enumerate(json.loads(data), 1)]
        else:
            texts = [(number, line) for number, line in enumerate(data.decode("utf-8").splitlines(), 1)]
            items = [(number, json.loads(line)) for number, line in texts if line.strip()]
    except (ValueError, RecursionError) as error:
        raise RequestError(
            "not JSON", where=label, found=str(error)[:120], expected="objects of plain values"
        ) from error
    header: dict[str, None] = {}
    for number, item in items:
        if not isinstance(item, dict):
            raise RequestError(
                f"line {number}: not an object", where=label, found=repr(item)[:40], expected="an object"
            )
        header.update(dict.fromkeys(item))
    names = list(header)
    rows = [["" if item.get(name) is None else str(item[name]) for name in names] for _, item in items]
    return Table(names, list(rows), [number for number, _ in items])


def _parquet_table(data: bytes) -> Table:
    parquet = require("pyarrow.parquet", "reading Parquet")
    arrow = require("pyarrow", "reading Parquet")
    table = parquet.read_table(arrow.BufferReader(data))
    cells = [
        ["" if value is None else _cell(value) for value in table[name].to_pylist()]
        for name in table.column_names
    ]
    rows: list[Sequence[str]] = list(zip(*cells, strict=True))
    return Table(list(table.column_names), rows, list(range(1, len(rows) + 1)))


def _cell(value: object) -> str:
    return (
        value.isoformat()
        if hasattr(value, "isoformat")
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )


def _choose(header: Sequence[str], columns: Columns) -> Columns:
    """The columns by name, case-insensitively by their synonyms; None where absent."""
    lowered = {name.lower(): name for name in reversed(list(header))}

    def pick(given: str | None, names: Iterable[str]) -> str | None:
        if given is not None:
            return given if given in header else None
        return next((lowered[name] for name in names if name in lowered), None)

    return Columns(
        pick(columns.time, TIME_NAMES), pick(columns.duration, DURATION_NAMES), pick(columns.pool, POOL_NAMES)
    )


def _from_table(
    table: Table, columns: Columns, label: str, facts: dict[str, object], needs_duration: bool
) -> Trace:
    chosen = _choose(table.header, columns)
    for kind, name, given, synonyms in (
        ("timestamp", chosen.time, columns.time, TIME_NAMES),
        ("duration", chosen.duration, columns.duration, DURATION_NAMES),
    ):
        if name is None and (kind == "timestamp" or needs_duration or given is not None):
            raise RequestError(
                f"line 1: no {kind} column",
                where=label,
                found=", ".join(table.header)[:200],
                expected=given or " | ".join(synonyms),
                hint=f"name it with {'--time' if kind == 'timestamp' else '--duration-column'}",
            )
    if not table.rows:
        raise RequestError(
            "no rows below the header: the trace is empty", where=label, expected="at least one row"
        )
    assert chosen.time is not None
    clock = _clock(table, chosen.time, columns.unit)
    durations = (
        np.zeros(len(table.rows)) if chosen.duration is None else _numbers(table, chosen.duration, "duration")
    )
    pools = _cells(table, chosen.pool) if chosen.pool else []
    pool_names = tuple(dict.fromkeys(pools)) or ("all",)
    index = {name: code for code, name in enumerate(pool_names)}
    codes = np.array([index[name] for name in pools] or [0] * len(table.rows), dtype=np.int32)
    facts = {**facts, "rows_read": len(table.rows), "blank_lines": table.blank}
    sizes = {name: _numbers(table, name, name) for name in columns.sizes if name in table.header}
    return _finish(clock, durations, codes, pool_names, label, facts, sizes)


def _cells(table: Table, name: str) -> list[str]:
    at = list(table.header).index(name)
    return [row[at].strip() for row in table.rows]


def _clock(table: Table, name: str, unit: str | None) -> Clock:
    texts = _cells(table, name)
    first = parse_float(texts[0])
    if first is None and any(character in texts[0] for character in "-:T") and len(texts[0]) >= 8:
        return clock_from_dates(texts, table.lines, name)
    return clock_from_numbers(_parse_numbers(texts, table.lines, "timestamp"), table.lines, unit, name)


def _numbers(table: Table, name: str, kind: str) -> Floats:
    values = _parse_numbers(_cells(table, name), table.lines, kind)
    negative = np.flatnonzero(values < 0)
    if len(negative):
        raise RequestError(
            f"line {table.lines[negative[0]]}: the {kind} is negative",
            found=f"{values[negative[0]]:g} ({len(negative)} such rows)",
            expected="seconds ≥ 0",
        )
    return values


def _parse_numbers(texts: list[str], lines: list[int], kind: str) -> Floats:
    values = np.empty(len(texts))
    for index, text in enumerate(texts):
        value = parse_float(text)
        if value is None:
            raise RequestError(
                f"line {lines[index]}: the {kind} is not a finite number",
                found=repr(text[:60]),
                expected="a decimal number with a point",
            )
        values[index] = value
    return values


# --- repair --------------------------------------------------------------------------------------------------------


def _finish(
    clock: Clock,
    durations: Floats,
    codes: Any,
    pool_names: tuple[str, ...],
    label: str,
    facts: dict[str, object],
    sizes: dict[str, Floats],
) -> Trace:
    """Sorts, counts repairs and warns; the result is the trace that is replayed."""
    seconds = clock.seconds
    behind = seconds < np.maximum.accumulate(seconds)
    if behind.any():
        order = np.argsort(seconds, kind="stable")
        seconds, durations, codes = seconds[order], durations[order], codes[order]
        sizes = {name: column[order] for name, column in sizes.items()}
    facts.update(
        rows_kept=len(seconds),
        rows_moved=int(behind.sum()),
        steps_back=int((np.diff(clock.seconds) < 0).sum()),
        equal_stamps=int((np.diff(seconds) == 0).sum()),
        rows_dropped=0,
        time_unit=clock.unit,
        shifted_by_s=clock.shift_s,
        warnings=_warnings(durations),
    )
    clock_s = 0.0 if clock.origin_s is None else clock.origin_s % 3600.0
    return Trace(
        np.ascontiguousarray(seconds),
        np.ascontiguousarray(durations, dtype=np.float64),
        np.ascontiguousarray(codes, dtype=np.int32),
        pool_names,
        label,
        facts,
        clock_s,
        sizes,
    )


def _warnings(durations: Floats) -> list[str]:
    """Two clusters of durations about a thousand apart look like milliseconds mixed with seconds."""
    found: list[str] = []
    positive = np.sort(durations[durations > 0])
    if len(positive) >= 4:
        ratios = positive[1:] / positive[:-1]
        gap = int(np.argmax(ratios))
        low, high = float(np.median(positive[: gap + 1])), float(np.median(positive[gap + 1 :]))
        if ratios[gap] > 30 and 300 < high / low < 3000:
            found.append(
                f"durations form two clusters about 1000 apart (medians {low:g} and {high:g}): "
                f"milliseconds mixed with seconds? {len(positive) - gap - 1} rows in the upper one"
            )
    if not positive.size:
        found.append("every duration is zero: shares of generating time are zero")
    return found
