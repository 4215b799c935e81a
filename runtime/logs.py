"""Log output of long-running commands: one JSON object a line, or plain text on a terminal. Standard library only.

Call `configure` once, after the loader has started: the cold path appends marks and writes no log line. Fields passed
through `extra` become keys of the object; prompts, keys and query strings are never passed by callers, and a value
under a key of `SECRET_FIELDS` is replaced here in case one is.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

SECRET_FIELDS = frozenset({"authorization", "api_key", "modal_secret", "token", "cookie"})
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def record_fields(record: logging.LogRecord) -> dict[str, object]:
    """The `extra` fields of a record, secrets replaced."""
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: "[redacted]" if name.lower() in SECRET_FIELDS else value for name, value in extra.items()}


class JsonFormatter(logging.Formatter):
    """`{"ts", "level", "logger", "event", …extra, "error"}` on one line, ASCII only so that any sink can store it."""

    def format(self, record: logging.LogRecord) -> str:
        milliseconds = int(record.created * 1000) % 1000
        entry: dict[str, object] = {
            "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **record_fields(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True, default=str)


class TextFormatter(logging.Formatter):
    """`12:30:01 INFO event key=value …`; control characters are escaped so that a prompt cannot drive a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value!r}" for name, value in record_fields(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname} {record.getMessage()} {fields}".rstrip()
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(mode: str = "auto", level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logging to one stream.

    Args:
        mode: `json`, `text`, or `auto` (text on a terminal, JSON elsewhere).
        stream: stdout where absent.
    """
    target = sys.stdout if stream is None else stream
    as_text = mode == "text" or (mode == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
