"""Settings of the HTTP service: defaults, `COLDFRAME_SERVE_*` variables, then command-line flags. Read once, frozen.

The worker's own settings (`COLDFRAME_*` without `SERVE`) pass through to the worker process; keys and `SERVE`
variables do not.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.errors import RequestError
from runtime.settings import OTHER_PROGRAMS

MIB = 1 << 20
GIB = 1 << 30
PREFIX = "COLDFRAME_SERVE_"
WORKER_COMMAND = (sys.executable, "-m", "runtime.worker")
RANK_COMMAND = (sys.executable, "-m", "runtime.parallel.launch", "worker")
RANKS_COMMAND = (sys.executable, "-m", "runtime.server.ranks")
MAY_BE_ZERO = frozenset(
    {"port", "requests_per_minute", "result_ttl_s", "restart_backoff_s", "drain_timeout_s", "poll_after_ms"}
)
INTERRUPTED_POLICIES = ("fail", "rerun")
LOG_MODES = ("auto", "json", "text")


@dataclass(frozen=True)
class ServerConfig:
    """One replica of the service. Times in seconds, sizes in bytes.

    Attributes:
        bundle: prepared directory that the worker serves.
        state: directory of the job database, inputs and results; one service at a time.
        api_key_hashes: SHA-256 (hex) of the accepted bearer keys; empty only with `allow_unauthenticated`.
        ranks: GPUs of this host that one worker uses together for each request.
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
    ranks: int = 1
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
        _require(bool(self.worker_command), "worker_command", "nothing", "a program")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float"):
                smallest = 0 if field.name in MAY_BE_ZERO else 1 if field.type == "int" else 1e-3
                is_fit = math.isfinite(value) and smallest <= value < 2**63
                _require(is_fit, field.name, value, f"a number from {smallest} on")
        for digest in self.api_key_hashes:
            is_sha256 = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
            if not is_sha256:  # never shown: it may be the key itself
                raise RequestError(
                    "is not a SHA-256", where="COLDFRAME_API_KEYS_SHA256", found=f"{len(digest)} characters",
                    expected="64 lower-case hex digits per key",
                )  # fmt: skip
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
                if name not in kinds:
                    raise _unknown(variable, [PREFIX + known.upper() for known in kinds])
                values[name] = _parse(variable, kinds[name], text)
        values["api_key_hashes"] = _key_hashes(environ)
        values.update({name: value for name, value in overrides.items() if value is not None})
        if "bundle" not in values:
            raise RequestError(
                "no prepared directory given", where="bundle", hint="pass --bundle or COLDFRAME_BUNDLE"
            )
        values.setdefault("state", Path("coldframe-state"))
        return cls(**values)  # type: ignore[arg-type]

    @property
    def command(self) -> tuple[str, ...]:
        """Program and arguments of one worker, without the bundle; with several ranks the launcher comes first."""
        if self.ranks == 1:
            return self.worker_command
        program = RANK_COMMAND if self.worker_command == WORKER_COMMAND else self.worker_command
        return (*RANKS_COMMAND, str(self.ranks), *program)


def _key_hashes(environ: Mapping[str, str]) -> tuple[str, ...]:
    plain = [key.strip() for key in environ.get("COLDFRAME_API_KEYS", "").split(",") if key.strip()]
    hashed = [
        key.strip().lower() for key in environ.get("COLDFRAME_API_KEYS_SHA256", "").split(",") if key.strip()
    ]
    return tuple(hashlib.sha256(key.encode()).hexdigest() for key in plain) + tuple(hashed)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the worker process may see: everything but the service's settings, keys and headers for traces."""
    return {name: value for name, value in environ.items() if not name.startswith((*OTHER_PROGRAMS, "OTEL_"))}


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


def _unknown(variable: str, known: list[str]) -> RequestError:
    close = difflib.get_close_matches(variable, known, 2, 0.85)
    hint = f"did you mean {' or '.join(close)}?" if close else "docs/deploy.md lists the settings"
    return RequestError("is no setting of the service", where=variable, hint=hint)


def _require(holds: bool, name: str, found: object, expected: object) -> None:
    """`name`: a field, or the variable that it came from."""
    if not holds:
        where = name if name.startswith(PREFIX) else f"{name} ({PREFIX}{name.upper()})"
        raise RequestError("is not allowed", where=where, found=found, expected=expected)
