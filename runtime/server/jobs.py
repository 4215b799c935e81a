"""Jobs and their files: SQLite in WAL mode, one directory per job beside it. Survives `kill -9` of the service.

One writer: the event loop of one service (the state directory is locked). A row is the job's JSON document plus the
columns that queries need. Reads of unfinished jobs come from memory. When storage fails, a creation is refused
(507), while a change of an existing job is kept in memory and written again with the next change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loader.errors import CapabilityError
from runtime.server.errors import ApiError, job_error

QUEUED, RUNNING, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
ACTIVE = (QUEUED, RUNNING)
ID_PATTERN = re.compile(r"video_[0-9a-f]{32}")
IDEMPOTENCY_TTL_S = 24 * 3600
STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL,
    created_at REAL NOT NULL, expires_at REAL, document TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS jobs_by_owner ON jobs (owner, seq);
CREATE INDEX IF NOT EXISTS jobs_by_status ON jobs (status, seq);
CREATE TABLE IF NOT EXISTS idempotency (
    owner TEXT NOT NULL, key TEXT NOT NULL, body_hash TEXT NOT NULL, job TEXT NOT NULL, created_at REAL NOT NULL,
    PRIMARY KEY (owner, key));
"""


@dataclass(frozen=True)
class Job:
    """One request for a video, from admission to deletion. Times are Unix seconds.

    Attributes:
        owner: first 16 hex digits of the key's hash; `anonymous` without keys.
        request: fields for the worker, without pictures.
        pictures: request field (`first_frame`, `last_frame`) → file name in the job's directory.
        video: what will be made: width, height, num_frames, seconds, seed, task, …
        phase: queued, loading, preprocess, text_encode, denoise, decode, encode, mux; step of steps while denoising.
        result: result of the worker, plus `sha256` and `bytes` of the file.
        timings: phase → seconds spent in it.
        call_id: the platform's name for the running call, where jobs run elsewhere.
        traceparent: of the client's trace (W3C), where it sent one.
        bundle_id: prepared directory that admitted it; it stays what it was when the deployment changes.
    """

    id: str
    owner: str
    model: str
    created_at: float
    request: dict[str, Any]
    video: dict[str, Any]
    pictures: dict[str, str] = field(default_factory=dict)
    status: str = QUEUED
    phase: str = "queued"
    progress: int = 0
    step: int = 0
    steps: int = 0
    started_at: float | None = None
    completed_at: float | None = None
    expires_at: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    attempts: int = 0
    cancel_requested: bool = False
    call_id: str = ""
    expired: bool = False
    request_id: str = ""
    traceparent: str = ""
    bundle_id: str = ""

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE


@dataclass(frozen=True)
class Idempotency:
    """Key of a creation and the hash of its canonical body."""

    key: str
    body_hash: str


def new_job_id() -> str:
    return f"video_{os.urandom(16).hex()}"


def is_storage_error(error: BaseException) -> bool:
    """Whether the disk, not the program, is at fault."""
    if isinstance(error, OSError):
        return error.errno in STORAGE_ERRNOS
    if isinstance(error, sqlite3.OperationalError):
        return any(word in str(error) for word in ("full", "disk I/O", "readonly", "unable to open"))
    return False


def storage_full() -> ApiError:
    return ApiError(
        "the server has no space to store this job",
        status=507,
        code="storage_full",
        headers={"Retry-After": "60"},
    )


def _take_directory(state: Path) -> int:
    """Make the directory and lock it; returns the lock's descriptor. Raises: CapabilityError."""
    try:
        (state / "jobs").mkdir(parents=True, exist_ok=True)
        lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as cause:
        raise CapabilityError(
            "cannot write the state directory", where=str(state), found=cause.strerror,
            hint="choose another --state",
        ) from cause  # fmt: skip
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        os.close(lock)
        raise CapabilityError(
            "another service uses this state directory", where=str(state),
            hint="give each replica a --state of its own",
        ) from cause  # fmt: skip
    return lock


def _open_database(path: Path) -> sqlite3.Connection:
    """Raises: sqlite3.Error: no space, or not a database."""
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        # Survives a killed process; a power cut may lose the last jobs.
        database.execute("PRAGMA synchronous=NORMAL")
        database.executescript(_SCHEMA)
    except sqlite3.Error:
        database.close()
        raise
    return database


class JobStore:
    """Owner of the state directory. Not thread-safe; every method is short and called from the event loop.

    Args:
        state: directory, created where absent.
        clock: Unix seconds.
    Raises: CapabilityError: another service holds the directory, it cannot be written, or its database is damaged.
    """

    def __init__(self, state: Path, clock: Callable[[], float] = time.time) -> None:
        self.state = state
        self.clock = clock
        self.listeners: list[Callable[[Job], None]] = []
        self.on_delete: list[Callable[[str], None]] = []
        self._active: dict[str, Job] = {}
        self._unsaved: dict[str, Job] = {}
        self._is_full = False  # since the last storage error
        self._forgotten: set[str] = set()  # deleted, but their rows may still be there
        self._lock = _take_directory(state)
        try:
            self._db = _open_database(state / "jobs.sqlite3")
            for job in self._select("WHERE status IN (?, ?) ORDER BY seq", *ACTIVE):
                self._active[job.id] = job
        except sqlite3.Error as cause:
            os.close(self._lock)
            raise CapabilityError(
                "the job database cannot be used", where=str(state / "jobs.sqlite3"), found=str(cause),
                hint="make space, or move the file away to begin without jobs",
            ) from cause  # fmt: skip

    def close(self) -> None:
        """Write what is unsaved and release the directory. Works twice."""
        if self._lock < 0:
            return
        self._flush()
        self._db.close()
        os.close(self._lock)
        self._lock = -1

    # ---- reading

    def get(self, job_id: str, owner: str | None = None) -> Job | None:
        """The job, if it exists and belongs to `owner` (None: any)."""
        if ID_PATTERN.fullmatch(job_id) is None or job_id in self._forgotten:
            return None
        job = self._active.get(job_id) or self._unsaved.get(job_id)
        if job is None:
            job = next(self._select("WHERE id = ?", job_id), None)
        return job if job is not None and owner in (None, job.owner) else None

    def page(self, owner: str, after: str | None, limit: int, newest_first: bool) -> tuple[list[Job], bool]:
        """Jobs of one owner in creation order, and whether more follow.

        Raises: ApiError: `after` is not a job of this owner.
        """
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        clause, values = "WHERE owner = ?", [owner]
        if after is not None:
            row = self._db.execute(
                "SELECT seq FROM jobs WHERE id = ? AND owner = ?", (after, owner)
            ).fetchone()
            if row is None:
                raise ApiError("no such video", status=404, where="after", code="video_not_found")
            clause += f" AND seq {beyond} ?"
            values.append(row[0])
        jobs = list(
            self._select(f"{clause} ORDER BY seq {order} LIMIT ?", *values, limit + 1 + len(self._forgotten))
        )
        current = [self._active.get(job.id) or self._unsaved.get(job.id) or job for job in jobs]
        return current[:limit], len(current) > limit

    def active(self, owner: str | None = None) -> list[Job]:
        """Queued and running jobs, oldest first."""
        return [job for job in self._active.values() if owner in (None, job.owner)]

    def next_queued(self) -> Job | None:
        return next((job for job in self._active.values() if job.status == QUEUED), None)

    def idempotent(self, owner: str, idempotency: Idempotency) -> Job | None:
        """The job that this key already made.

        Raises: ApiError 409: the key was used with another body.
        """
        row = self._db.execute(
            "SELECT job, body_hash FROM idempotency WHERE owner = ? AND key = ? AND created_at > ?",
            (owner, idempotency.key, self.clock() - IDEMPOTENCY_TTL_S),
        ).fetchone()
        if row is None:
            return None
        job = self.get(row[0], owner)
        if job is not None and row[1] != idempotency.body_hash:
            raise ApiError(
                "this key was used with another request", status=409, code="idempotency_conflict",
                where="Idempotency-Key", hint="a new request needs a new key",
                headers={"x-should-retry": "false"},  # the OpenAI client repeats a 409 otherwise
            )  # fmt: skip
        return job

    # ---- writing

    def create(self, job: Job, pictures: Mapping[str, bytes], idempotency: Idempotency | None = None) -> None:
        """Store a job with its pictures. On return it survives a crash; on failure nothing is left.

        Raises: ApiError 507: no space.
        """
        directory = self.directory(job.id)
        try:
            directory.mkdir()
            for name, data in pictures.items():
                (directory / job.pictures[name]).write_bytes(data)
            self._insert(job, idempotency)
        except (OSError, sqlite3.Error) as error:
            shutil.rmtree(directory, ignore_errors=True)
            if is_storage_error(error):
                self._is_full = True
                raise storage_full() from error
            raise
        self._active[job.id] = job
        self._notify(job)

    def update(self, job_id: str, **changes: Any) -> Job | None:
        """Apply changes and return the job; None if it was deleted meanwhile. Never fails for lack of space."""
        job = self.get(job_id)
        if job is None:
            return None
        job = dataclasses.replace(job, **changes)
        self._unsaved[job_id] = job
        if job.is_active:
            self._active[job_id] = job
        else:
            self._active.pop(job_id, None)
        self._flush()
        self._notify(job)
        return job

    def finish(
        self, job_id: str, *, ttl_s: float, error: dict[str, Any] | None = None, **changes: Any
    ) -> Job | None:
        """Make a job completed (no `error`) or failed, drop its inputs, and start its time to live."""
        now = self.clock()
        changes |= {"status": FAILED if error else COMPLETED, "error": error, "completed_at": now}
        changes["expires_at"] = now + ttl_s if ttl_s > 0 else None
        job = self.update(job_id, **changes)
        if job is not None:
            self._remove_files(job, keep_video=error is None)
        return job

    def delete(self, job_id: str) -> None:
        """Forget a job and its files. Never fails for lack of space: on a full disk this is what makes some."""
        self._active.pop(job_id, None)
        self._unsaved.pop(job_id, None)
        self._forgotten.add(job_id)
        # First the files: a row cannot go while nothing can be written.
        shutil.rmtree(self.directory(job_id), ignore_errors=True)
        if self._is_full:
            self._shrink_log()
        self._flush()
        for listener in self.on_delete:
            listener(job_id)

    def adopt(self, document: Mapping[str, Any]) -> None:
        """Take over a job that another replica stored (same id: the one already here wins)."""
        job = _from_document(document)
        if self.get(job.id) is None:
            self.directory(job.id).mkdir(exist_ok=True)
            self._insert(job, None)
            if job.is_active:
                self._active[job.id] = job

    # ---- restart and upkeep

    def recover(self, policy: str, max_attempts: int, ttl_s: float) -> list[Job]:
        """Settle jobs that were running when the last service died, and remove leftovers of dead jobs."""
        settled = [
            self.interrupt(job.id, policy, max_attempts, ttl_s, "the service stopped")
            for job in self.running()
        ]
        known = {row[0] for row in self._db.execute("SELECT id FROM jobs")}
        for directory in (self.state / "jobs").iterdir():
            job = self.get(directory.name) if directory.name in known else None
            if job is None:
                shutil.rmtree(directory, ignore_errors=True)
            else:
                self._remove_files(job, keep_video=job.status == COMPLETED, keep_inputs=job.is_active)
        for job in self._active.values():
            self.directory(job.id).mkdir(exist_ok=True)
        return [job for job in settled if job is not None]

    def running(self) -> list[Job]:
        return [job for job in self._active.values() if job.status == RUNNING]

    def interrupt(self, job_id: str, policy: str, max_attempts: int, ttl_s: float, reason: str) -> Job | None:
        """A running job lost its worker: cancelled if that was asked, else queued again or failed by policy."""
        job = self.get(job_id)
        if job is None:
            return None
        if job.cancel_requested:
            return self.finish(
                job_id, ttl_s=ttl_s, error=job_error("cancelled", "cancelled by the client", None, 400)
            )
        if policy == "rerun" and job.attempts < max_attempts:
            return self.update(job_id, status=QUEUED, phase="queued", step=0, started_at=None)
        message = f"{reason} while this job was running (attempt {job.attempts})"
        return self.finish(job_id, ttl_s=ttl_s, error=job_error("interrupted", message, None, 503))

    def sweep(self) -> list[Job]:
        """Remove the files of expired jobs; their records answer 410 for one more time to live, then go.

        On a full disk the records stay for the next sweep; files are removed all the same.
        """
        try:
            return self._sweep(self.clock())
        except sqlite3.OperationalError as error:
            if not is_storage_error(error):
                raise
            return []

    def _sweep(self, now: float) -> list[Job]:
        expired = [job for job in self._select("WHERE expires_at < ?", now) if not job.expired]
        for job in expired:
            shutil.rmtree(self.directory(job.id), ignore_errors=True)
            self.update(job.id, expired=True)
        for job in list(
            self._select("WHERE expires_at IS NOT NULL AND 2 * expires_at - created_at < ?", now)
        ):
            self.delete(job.id)
        self._db.execute("DELETE FROM idempotency WHERE created_at < ?", (now - IDEMPOTENCY_TTL_S,))
        self._flush()
        return expired

    # ---- files

    def directory(self, job_id: str) -> Path:
        """Directory of a job. Raises: ValueError: not an id of ours (never reached from a route)."""
        if ID_PATTERN.fullmatch(job_id) is None:
            raise ValueError("not a job id")
        return self.state / "jobs" / job_id

    def video_path(self, job_id: str) -> Path:
        return (self.directory(job_id) / "video.mp4").absolute()

    def picture(self, job: Job, name: str) -> bytes:
        return (self.directory(job.id) / job.pictures[name]).read_bytes()

    def _remove_files(self, job: Job, *, keep_video: bool, keep_inputs: bool = False) -> None:
        keep = ({"video.mp4"} if keep_video else set()) | (
            set(job.pictures.values()) if keep_inputs else set()
        )
        directory = self.directory(job.id)
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.name not in keep:
                path.unlink(missing_ok=True)
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)

    # ---- rows

    def _insert(self, job: Job, idempotency: Idempotency | None) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute(
                "INSERT INTO jobs (id, owner, status, created_at, expires_at, document) VALUES (?, ?, ?, ?, ?, ?)",
                (job.id, job.owner, job.status, job.created_at, job.expires_at, _to_document(job)),
            )
            if idempotency is not None:
                self._db.execute(
                    "INSERT OR REPLACE INTO idempotency VALUES (?, ?, ?, ?, ?)",
                    (job.owner, idempotency.key, idempotency.body_hash, job.id, self.clock()),
                )
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _flush(self) -> None:
        try:
            for job_id in list(self._forgotten):
                self._db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
                self._db.execute("DELETE FROM idempotency WHERE job = ?", (job_id,))
                self._forgotten.discard(job_id)
            for job in list(self._unsaved.values()):
                self._db.execute(
                    "UPDATE jobs SET status = ?, expires_at = ?, document = ? WHERE id = ?",
                    (job.status, job.expires_at, _to_document(job), job.id),
                )
                del self._unsaved[job.id]
        except sqlite3.OperationalError as error:
            if not is_storage_error(error):
                raise
            self._is_full = True

    def _shrink_log(self) -> None:
        """Move the write-ahead log into the database and empty it: on a small disk it is the largest file."""
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._is_full = False

    def _select(self, clause: str, *values: object) -> Iterator[Job]:
        for row in self._db.execute(f"SELECT document FROM jobs {clause}", values).fetchall():
            job = _from_document(json.loads(row[0]))
            if job.id not in self._forgotten:
                yield job

    def _notify(self, job: Job) -> None:
        for listener in self.listeners:
            listener(job)


def document_of(job: Job) -> dict[str, Any]:
    """JSON-ready form, as stored; `JobStore.adopt` reads it back."""
    return dataclasses.asdict(job)


def _to_document(job: Job) -> str:
    return json.dumps(document_of(job), separators=(",", ":"))


def _from_document(document: Mapping[str, Any]) -> Job:
    known = {field.name for field in dataclasses.fields(Job)}
    return Job(**{name: value for name, value in document.items() if name in known})
