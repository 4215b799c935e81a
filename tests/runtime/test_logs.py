"""Log lines for machines and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from runtime.logs import configure


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(mode: str, message: str, **extra: object) -> str:
    stream = io.StringIO()
    configure(mode, stream=stream)
    logging.getLogger("t").info(message, extra=extra)
    return stream.getvalue()


def test_json_is_one_ascii_object_a_line() -> None:
    line = logged("auto", "job\nended", request_id="r1", text="grün\x1b[31m")
    assert line.isascii()
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert (entry["event"], entry["request_id"], entry["level"], entry["text"]) == (
        "job\nended",
        "r1",
        "info",
        "grün\x1b[31m",
    )


def test_text_cannot_drive_a_terminal() -> None:
    line = logged("text", "seen", prompt="\x1b[2J\x07 \u202e")
    assert "\x1b" not in line
    assert "\u202e" not in line
    assert "prompt=" in line


@pytest.mark.parametrize("mode", ["json", "text"])
def test_secrets_are_replaced(mode: str) -> None:
    line = logged(mode, "call", Authorization="Bearer hunter2", token="hunter2")
    assert "hunter2" not in line
    assert "[redacted]" in line
