"""Start a prepared directory in a fresh process, as far as the first entry into the denoiser.

Validation proves that bytes are what prepare wrote; only a start proves that a worker can use them. The command is the
caller's: it must end with exit code 0 and print one JSON object as its last line.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError

_ERRORS: dict[int, type[WorkerError]] = {3: ArtifactError, 4: CapabilityError}
_TAIL = 2000  # characters of the child's error output that a message carries


@dataclass(frozen=True)
class ProbeResult:
    """`seconds`: from before the process exists to its end. `report`: the object that it printed."""

    seconds: float
    report: Mapping[str, object]


def probe_directory(directory: Path, command: Sequence[str], timeout_s: float = 600.0) -> ProbeResult:
    """Run `command` with the directory as its last argument.

    Raises: ArtifactError, CapabilityError: the child ended with their exit codes. InternalError: it failed otherwise,
    did not end in time (it is killed), or printed no JSON object.
    """
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, str(directory)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InternalError(
            "probe did not end", where=str(directory), found=f"{timeout_s:g} s", hint="was killed"
        ) from error
    except OSError as error:
        raise InternalError(f"probe cannot start ({error.strerror})", where=command[0]) from error
    seconds = time.monotonic() - started
    if done.returncode:
        kind = _ERRORS.get(done.returncode, InternalError)
        raise kind(
            "probe failed",
            where=str(directory),
            found=f"exit code {done.returncode}: {done.stderr.strip()[-_TAIL:]}",
        )
    return ProbeResult(seconds, _last_object(done.stdout, directory))


def _last_object(output: str, directory: Path) -> Mapping[str, object]:
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InternalError("probe printed no JSON object", where=str(directory), found=repr(output[-200:]))
    return value
