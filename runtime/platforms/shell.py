"""One job from a command line: the payload of a GPU function, and what is said about its answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.errors import RequestError


def local_job(
    prompt: str,
    *,
    seconds: float = 5.0,
    size: str = "",
    seed: int = -1,
    accel: str = "",
    first_frame: str = "",
    last_frame: str = "",
) -> dict[str, Any]:
    """Payload for `GpuRuntime.run`; pictures are files of this machine.

    Raises: RequestError: a picture cannot be read.
    """
    request: dict[str, Any] = {"prompt": prompt, "seconds": seconds}
    request |= {name: value for name, value in (("size", size), ("accel", accel)) if value}
    if seed >= 0:
        request["seed"] = seed
    pictures, kinds = {}, {}
    for name, path in (("first_frame", first_frame), ("last_frame", last_frame)):
        if not path:
            continue
        try:
            pictures[name] = Path(path).read_bytes()
        except OSError as cause:
            raise RequestError("the picture cannot be read", where=name, found=repr(path)) from cause
        kinds[name] = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(Path(path).suffix.lower(), "png")
    return {"id": f"video_{os.urandom(16).hex()}", "request": request, "pictures": pictures, "kinds": kinds}


def report(answer: Mapping[str, Any], out: str) -> int:
    """Say what happened on stderr; returns the exit code."""
    if error := answer.get("error"):
        sys.stderr.write(f"refused: {error.get('message')}\n")
        return RequestError.exit_code
    result = answer.get("result") or {}
    sys.stderr.write(f"{out}: seed {result.get('seed')}\n")
    for name, seconds in ((answer.get("start") or {}).get("headline") or {}).items():
        sys.stderr.write(f"  {name.replace('_', ' ')}: {seconds:.2f} s\n")
    return 0
