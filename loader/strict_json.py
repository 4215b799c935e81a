"""JSON that strangers wrote: duplicate keys, NaN, absurd depth and other text are refused as ArtifactError."""

from __future__ import annotations

import json

from loader.errors import ArtifactError


class _DuplicateKey(Exception):
    pass


def load_json(data: bytes, where: str) -> dict[str, object]:
    """Parse `data` as one JSON object in UTF-8 without a byte order mark.

    Args:
        where: how messages name the text, for example a file name.
    Raises: ArtifactError: not UTF-8, not JSON, not an object, a key twice, NaN or Infinity, nested too deeply.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant
        )
    except _DuplicateKey as error:
        raise ArtifactError(f"duplicate key {error.args[0]!r} in the JSON text", where=where) from None
    except RecursionError:
        raise ArtifactError("not sane JSON: nested too deeply", where=where) from None
    except ValueError as error:
        raise ArtifactError(f"not JSON ({error})", where=where) from error
    if not isinstance(value, dict):
        raise ArtifactError(
            "not a JSON object", where=where, found=type(value).__name__, expected="an object"
        )
    return value


def is_path_text(text: str) -> bool:
    """Whether a system can be asked for it: JSON strings may hold NUL and halves of surrogate pairs."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKey(name)
            seen.add(name)
    return table


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not allowed")
