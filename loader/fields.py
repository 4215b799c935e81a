"""Typed access to one JSON object, with errors that name the place, what was found and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from loader.errors import ArtifactError

_MAX_COUNT = 2**63 - 1
_HEX = re.compile(r"[0-9a-f]+")


class Fields:
    """Reads the fields of `raw`; `where` is the path to it in messages. Every method raises ArtifactError."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, dict):
            raise ArtifactError("wrong type", where=where, found=_short(raw), expected="an object")
        self.raw: dict[str, object] = raw
        self.where = where

    def error(self, name: str, found: object, expected: object) -> ArtifactError:
        return ArtifactError("wrong value", where=f"{self.where}: {name}", found=found, expected=expected)

    def _get(self, name: str) -> object:
        if name not in self.raw:
            raise ArtifactError("field is missing", where=f"{self.where}: {name}")
        return self.raw[name]

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, _short(value), "text")
        return value

    def count(self, name: str) -> int:
        """An integer in 0 … 2^63-1 (not a bool, not a float)."""
        value = self._get(name)
        if type(value) is not int or not 0 <= value <= _MAX_COUNT:
            raise self.error(name, _short(value), "an integer from 0 to 2^63-1")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        value = self.plain_list(name)
        numbers = tuple(item for item in value if type(item) is int and 0 <= item <= _MAX_COUNT)
        if len(numbers) != len(value):
            raise self.error(name, _short(value), "integers from 0 to 2^63-1")
        return numbers

    def digest(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str) or len(value) != 64 or not _HEX.fullmatch(value):
            raise self.error(name, _short(value), "64 lower-case hex digits")
        return value

    def digests(self, name: str) -> tuple[str, ...]:
        return self.hex_words(name, 64)

    def hex_words(self, name: str, digits: int) -> tuple[str, ...]:
        value = self.plain_list(name)
        words = tuple(item for item in value if isinstance(item, str) and len(item) == digits)
        if not _HEX.fullmatch("".join(words) or "0"):
            raise self.error(name, _short(value), f"words of {digits} lower-case hex digits")
        if len(words) != len(value):
            raise self.error(name, _short(value), f"words of {digits} lower-case hex digits")
        return words

    def plain_list(self, name: str) -> tuple[object, ...]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self.error(name, _short(value), "a list")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, object]:
        value = self._get(name)
        if not isinstance(value, dict):
            raise self.error(name, _short(value), "an object")
        return MappingProxyType(value)

    def items(self, name: str) -> list[Fields]:
        """The objects of a list."""
        return [
            Fields(item, f"{self.where}: {name}[{index}]") for index, item in enumerate(self.plain_list(name))
        ]

    def entries(self, name: str) -> Iterator[tuple[str, Fields]]:
        """The named objects of an object."""
        for key, value in self.mapping(name).items():
            yield key, Fields(value, f"{self.where}: {name}: {key}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
