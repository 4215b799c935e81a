"""Time columns: numbers in some unit or ISO 8601 dates → seconds from the first event.

Nothing here guesses silently: a column in two units or on two clocks is refused with the line that shows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError

Floats = NDArray[np.float64]
YEAR_S = 365.25 * 86400
OFFSET_LIMIT_S = 3 * YEAR_S  # a number below this may be an offset from the start of a log
EPOCH_2000_S = 946684800.0
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# A date after 2000 in each unit, up to the year 2286; the four ranges do not touch.
DATES = {unit: (EPOCH_2000_S / scale, 1e10 / scale) for unit, scale in UNITS.items()}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Clock:
    """A time column in seconds.

    Args:
        seconds: [N] float64 in file order, 0 at the earliest event.
        unit: "s", "ms", "us", "ns" or "iso".
        origin_s: POSIX time of second 0, or None for offsets.
        shift_s: what was subtracted from offsets to put the earliest event at 0.
    """

    seconds: Floats
    unit: str
    origin_s: float | None
    shift_s: float = 0.0


def parse_float(text: str) -> float | None:
    """A plain decimal number, or None; unlike `float` refuses `nan`, `inf`, `1_000` and other scripts' digits."""
    stripped = text.strip()
    if not NUMBER.fullmatch(stripped) or not stripped.isascii():
        return None
    value = float(stripped)
    return value if math.isfinite(value) else None


def clock_from_numbers(values: Floats, lines: Sequence[int] | None, unit: str | None, column: str) -> Clock:
    """Detects or applies the unit, checks for mixed clocks, moves the first event to 0.

    Args:
        values: [N] finite numbers in file order.
        lines: line number of each value, or None if line = row + 2 (plain file with a header).
    Raises: RequestError: mixed origins or units.
    """
    found = unit or _detect(values, lines, column)
    seconds = values * UNITS[found] if found != "s" else values.astype(np.float64)
    _check_jumps(seconds, lines, column)
    first = float(values.min())
    # Subtract before scaling: microseconds since 1970 keep their last digit.
    relative = (values - first) * UNITS[found]
    first_s = first * UNITS[found]
    is_date = first_s >= EPOCH_2000_S
    return Clock(relative, found, first_s if is_date else None, 0.0 if is_date else first_s)


def clock_from_dates(texts: Sequence[str], lines: Sequence[int], column: str) -> Clock:
    """ISO 8601 with `T` or a space, any offset, `Z`; a date without an offset is UTC."""
    stamps = np.empty(len(texts))
    origin: datetime | None = None
    for index, text in enumerate(texts):
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise RequestError(
                f"line {lines[index]}: the {column} is not a time",
                where=f"column {column}",
                found=repr(text[:60]),
                expected="a finite number or an ISO 8601 date",
            ) from error
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        if origin is None:
            origin = moment
        stamps[index] = (moment - origin).total_seconds()
    assert origin is not None
    _check_jumps(stamps, lines, column)
    first = float(stamps.min())
    return Clock(stamps - first, "iso", origin.timestamp() + first)


def _line(lines: Sequence[int] | None, index: int) -> int:
    return index + 2 if lines is None else int(lines[index])


def _detect(values: Floats, lines: Sequence[int] | None, column: str) -> str:
    """Unit of a numeric column by magnitude."""
    inside = {unit: (values >= low) & (values < high) for unit, (low, high) in DATES.items()}
    dated = [unit for unit in UNITS if inside[unit].any()]
    if len(dated) > 1:
        index = int(np.argmax(inside[dated[1]]))
        raise RequestError(
            f"line {_line(lines, index)}: two units in the {column} column (mixed range of values)",
            found=f"dates in {' and '.join(dated)}",
            expected="one unit in the whole column",
        )
    if not dated:
        return "s"
    offsets = np.abs(values) < OFFSET_LIMIT_S
    if offsets.any():
        few = offsets if offsets.sum() <= len(values) / 2 else inside[dated[0]]
        index = int(np.argmax(few))
        raise RequestError(
            f"line {_line(lines, index)}: mixed clock origins in the {column} (timestamp) column",
            found=f"{int(offsets.sum())} offsets in the range below three years, "
            f"{int(inside[dated[0]].sum())} dates after 2000 in {dated[0]}",
            expected="one clock in the whole column",
        )
    return dated[0]


def _check_jumps(seconds: Floats, lines: Sequence[int] | None, column: str) -> None:
    """Refuses a file order that jumps between ranges more than a year apart more than once."""
    jumps = np.flatnonzero(np.abs(np.diff(seconds)) > YEAR_S)
    if len(jumps) > 1:
        raise RequestError(
            f"line {_line(lines, int(jumps[1]) + 1)}: mixed clock origins in the {column} (timestamp) column",
            found=f"{len(jumps)} jumps of more than a year between neighbouring rows, range {np.ptp(seconds):g} s",
            expected="one clock; a single jump is legal",
        )
