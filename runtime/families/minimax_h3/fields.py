"""Typed access to the fields of a request body; every refusal names the field, what was found and what is allowed.

Types are strict: a JSON request says 124, not "124", and true is not 1. Form parts are always text, so `form=True`
reads numbers and booleans from it. JSON null means "not given". Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loader.errors import RequestError

_MAX_QUOTE = 60


def quote(value: object) -> str:
    """Short, printable form of any value for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool | int | float | None):
        return repr(value)
    if isinstance(value, str):
        text = ascii(value[: _MAX_QUOTE + 1])
        return text if len(value) <= _MAX_QUOTE else f"{text[:_MAX_QUOTE]}…' ({len(value)} characters)"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Fields:
    """A request body whose field names are already known to be legal."""

    body: Mapping[str, object]
    form: bool = False

    def get(self, name: str) -> object:
        """The raw value; None when absent or null."""
        return self.body.get(name)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value
        raise _wrong_type(name, value, "a string")

    def integer(self, name: str) -> int | None:
        value = self.get(name)
        if self.form and isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,40}", value):
            return int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise _wrong_type(name, value, "an integer")

    def number(self, name: str, *, text_allowed: bool = False) -> float | None:
        """A finite number. `text_allowed`: also as text in JSON ("5", as the OpenAI client sends seconds)."""
        value = self.get(name)
        if value is None:
            return None
        if (
            (self.form or text_allowed)
            and isinstance(value, str)
            and re.fullmatch(r"[+-]?[0-9]{1,12}(\.[0-9]{1,12})?", value)
        ):
            return float(value)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _wrong_type(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise RequestError(
                "the number is not finite", where=name, found=quote(value), expected="a finite number"
            )
        return number

    def numbers(self, name: str) -> list[float] | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) > 2000:
            raise _wrong_type(name, value, "a list of at most 2000 numbers")
        items = [Fields({name: item}).number(name) for item in value]
        if any(item is None for item in items):
            raise _wrong_type(name, None, "a list of numbers")
        return [item for item in items if item is not None]

    def choice(self, name: str, allowed: Sequence[str], *, http_status: int = 400) -> str | None:
        value = self.text(name)
        if value is None or value in allowed:
            return value
        raise RequestError(
            "not available here",
            where=name,
            found=quote(value),
            expected=", ".join(allowed),
            http_status=http_status,
        )

    def is_neutral(self, name: str, neutral: object) -> bool:
        """Whether the field is absent or holds its only supported value (bool and int are told apart)."""
        value = self.get(name)
        if value is None:
            return True
        if self.form and isinstance(value, str) and not isinstance(neutral, str):
            return value.lower() in (str(neutral).lower(), f"{neutral}.0")
        if isinstance(neutral, bool) or isinstance(value, bool):
            return value is neutral
        return value == neutral


def _wrong_type(name: str, value: object, expected: str) -> RequestError:
    return RequestError(f"must be {expected}", where=name, found=quote(value), expected=expected)
