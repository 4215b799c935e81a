"""Settings of the HTTP service: defaults, `COLDFRAME_SERVE_*` variables, then command-line flags. Read once, frozen.

The worker's own settings (`COLDFRAME_*` without `SERVE`) pass through to the worker process; keys and `SERVE`
variables do not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.errors import RequestError

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "COLDFRAME_SERVE_"
WORKER_COMMAND = (sys.executable, "-m", "runtime.worker")
INTERRUPTED_POLICIES = ("fail", "rerun")
LOG_MODES = ("auto", "json", "text")


@dataclass(frozen=True)
class ServerConfig:
    """One replica of the service. Times in seconds, sizes in bytes.

    Attributes:
        bundle: prepared directory that the worker serves.
        state: directory of the job database, inputs and results; one service at a time.
        api_key_hashes: SHA-256 (hex) of the accepted bearer keys; empty only with `allow_unauthenticated`.
        interrupted: what happens to a job that was running when the worker or the service died: `fail` reports it
            failed with the reason, `rerun` queues it again (`max_attempts` times at most).
        max_queued, max_active_per_key: jobs waiting in total; jobs waiting or running of one key.
        requests_per_minute: creations of one key, as a token bucket that holds one minute; 0 = no limit.
        body_budget_bytes: bytes of all request bodies that may be in memory or spooled at the same time.
        allow_url_inputs: whether pictures may be given as http(s) addresses (guarded fetch).
        job_timeout_s: wall clock of one running job; stall_timeout_s: silence of the worker while one runs.
        cancel_grace_s: a cancelled job that has not stopped by then costs the worker its life.
        drain_timeout_s: how long a SIGTERM waits for the running job.
        result_ttl_s: how long results stay; 0 = for ever.
    """

    bundle: Path
    state: Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str = ""
    api_key_hashes: tuple[str, ...] = ()
    allow_unauthenticated: bool = False
    worker_command: tuple[str, ...] = WORKER_COMMAND
    worker_args: tuple[str, ...] = ()
    interrupted: str = "fail"
    max_attempts: int = 2
    max_queued: int = 32
    max_active_per_key: int = 16
    requests_per_minute: int = 120
    max_body_bytes: int = 64 * MIB
    max_picture_bytes: int = 30 * MIB
    body_budget_bytes: int = 256 * MIB
    body_timeout_s: float = 60.0
    allow_url_inputs: bool = False
    job_timeout_s: float = 1800.0
    stall_timeout_s: float = 600.0
    cancel_grace_s: float = 60.0
    drain_timeout_s: float = 120.0
    sync_timeout_s: float = 1800.0
    result_ttl_s: float = 7 * 24 * 3600.0
    restart_backoff_s: float = 0.5
    restart_backoff_max_s: float = 30.0
    poll_after_ms: int = 1000
    log: str = "auto"

    def __post_init__(self) -> None:
        _require(
            self.interrupted in INTERRUPTED_POLICIES, "interrupted", self.interrupted, INTERRUPTED_POLICIES
        )
        _require(self.log in LOG_MODES, "log", self.log, LOG_MODES)
        _require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        for name in (
            "max_queued",
            "max_active_per_key",
            "max_attempts",
            "max_body_bytes",
            "max_picture_bytes",
        ):
            _require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        for digest in self.api_key_hashes:
            is_sha256 = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
            _require(
                is_sha256, "api_keys_sha256", f"{len(digest)} characters", "64 lower-case hex digits per key"
            )
        if not self.api_key_hashes and not self.allow_unauthenticated:
            raise RequestError(
                "the service refuses to start without API keys",
                where="COLDFRAME_API_KEYS",
                hint="set COLDFRAME_API_KEYS or COLDFRAME_API_KEYS_SHA256, or COLDFRAME_SERVE_ALLOW_UNAUTHENTICATED=1",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **overrides: object) -> ServerConfig:
        """Defaults, then variables, then the overrides that are not None.

        Variables are `COLDFRAME_SERVE_` + the attribute's name in capitals (`COLDFRAME_SERVE_MAX_QUEUED=8`), and
        `COLDFRAME_BUNDLE`; keys come from `COLDFRAME_API_KEYS` (comma separated, hashed here and not kept) or
        `COLDFRAME_API_KEYS_SHA256`.
        Raises: RequestError: a variable is unknown, does not parse, or is out of range; names it.
        """
        kinds = {
            field.name: str(field.type) for field in dataclasses.fields(cls) if field.name != "api_key_hashes"
        }
        values: dict[str, object] = {}
        if environ.get("COLDFRAME_BUNDLE"):
            values["bundle"] = Path(environ["COLDFRAME_BUNDLE"])
        for variable, text in environ.items():
            if variable.startswith(PREFIX):
                name = variable.removeprefix(PREFIX).lower()
                _require(name in kinds, variable, "an unknown setting", ", ".join(sorted(kinds)))
                values[name] = _parse(variable, kinds[name], text)
        values["api_key_hashes"] = _key_hashes(environ)
        values.update({name: value for name, value in overrides.items() if value is not None})
        if "bundle" not in values:
            raise RequestError(
                "no prepared directory given", where="bundle", hint="pass --bundle or COLDFRAME_BUNDLE"
            )
        values.setdefault("state", Path("coldframe-state"))
        return cls(**values)  # type: ignore[arg-type]


def _key_hashes(environ: Mapping[str, str]) -> tuple[str, ...]:
    plain = [key.strip() for key in environ.get("COLDFRAME_API_KEYS", "").split(",") if key.strip()]
    hashed = [
        key.strip().lower() for key in environ.get("COLDFRAME_API_KEYS_SHA256", "").split(",") if key.strip()
    ]
    return tuple(hashlib.sha256(key.encode()).hexdigest() for key in plain) + tuple(hashed)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the worker process may see: everything but the service's settings and keys."""
    hidden = (PREFIX, "COLDFRAME_API_KEYS", "COLDFRAME_MODAL_", "COLDFRAME_FAL_")
    return {name: value for name, value in environ.items() if not name.startswith(hidden)}


def _parse(variable: str, kind: str, text: str) -> object:
    if kind == "Path":
        return Path(text)
    if kind == "bool":
        _require(text.lower() in ("0", "1", "true", "false"), variable, repr(text), "0, 1, true or false")
        return text.lower() in ("1", "true")
    if kind.startswith("tuple"):
        return tuple(shlex.split(text))
    if kind in ("int", "float"):
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            raise RequestError("is not a number", where=variable, found=repr(text), expected=kind) from None
    return text


def _require(holds: bool, where: str, found: object, expected: object) -> None:
    if not holds:
        raise RequestError("is not allowed", where=where, found=found, expected=expected)
