"""Small language of the command line: `name:key=value,key=value` for policies, distributions and workloads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from loader.errors import RequestError


@dataclass(frozen=True)
class Spec:
    """A parsed `name:a,b,key=c`; every value is still text."""

    name: str
    values: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    text: str

    def number(self, key: str, default: float | None = None, *, position: int | None = None) -> float:
        """Value of `key`, or of the position-th unnamed value, as a finite float."""
        raw = dict(self.named).get(key)
        if raw is None and position is not None and position < len(self.values):
            raw = self.values[position]
        if raw is None:
            if default is None:
                raise RequestError(
                    "a value is missing", where=f"{self.text}: {key}", expected=f"{key}=<number>"
                )
            return default
        return parse_number(raw, where=f"{self.text}: {key}")

    def integer(self, key: str, default: int | None = None, *, position: int | None = None) -> int:
        """Like `number`, for counts: refuses fractions and negative values."""
        value = self.number(key, None if default is None else float(default), position=position)
        if value != int(value) or value < 0:
            raise RequestError(
                "not a count", where=f"{self.text}: {key}", found=value, expected="a whole number ≥ 0"
            )
        return int(value)

    def only(self, keys: Iterable[str], *, positions: int = 0) -> None:
        """Refuses unknown keys and surplus unnamed values."""
        allowed = sorted(keys)
        unknown = [key for key, _ in self.named if key not in allowed]
        if unknown:
            raise RequestError(
                "unknown option", where=self.text, found=", ".join(unknown), expected=", ".join(allowed)
            )
        if len(self.values) > positions:
            raise RequestError(
                "too many values",
                where=self.text,
                found=len(self.values),
                expected=f"at most {positions} without a name",
            )


def parse_number(text: str, *, where: str) -> float:
    """A finite float; accepts `1/20` and `inf` is refused."""
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / float(denominator) if slash else float(numerator)
    except (ValueError, ZeroDivisionError) as error:
        raise RequestError("not a number", where=where, found=repr(text), expected="a number") from error
    if not math.isfinite(value):
        raise RequestError("not a finite number", where=where, found=repr(text), expected="a finite number")
    return value


def parse_spec(text: str) -> Spec:
    """`"hybrid:range=144,cv=2"` → Spec; the name is lower-cased."""
    name, _, rest = text.strip().partition(":")
    values: list[str] = []
    named: list[tuple[str, str]] = []
    for part in (piece.strip() for piece in rest.split(",") if piece.strip()):
        key, equals, value = part.partition("=")
        if equals:
            named.append((key.strip(), value.strip()))
        else:
            values.append(part)
    if not name:
        raise RequestError("an empty specification", found=repr(text), expected="name:key=value,…")
    return Spec(name.strip().lower(), tuple(values), tuple(named), text.strip())


def split_specs(text: str) -> list[str]:
    """Splits `7.2,70,lognormal:p50=7,p90=20` at the commas between specifications.

    A piece `key=value` without a colon continues the specification before it.
    """
    found: list[str] = []
    for piece in (part.strip() for part in text.split(",")):
        if not piece:
            continue
        if found and "=" in piece and ":" not in piece:
            found[-1] += "," + piece
        else:
            found.append(piece)
    return found
