"""Who may add a job now: bounded queue, jobs and rate per key. Refusals say when to come back."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.server.config import ServerConfig
from runtime.server.errors import ApiError
from runtime.server.jobs import QUEUED, JobStore

ANONYMOUS = "anonymous"
DEFAULT_JOB_S = 30.0
MAX_RETRY_AFTER_S = 120  # the OpenAI client gives up instead of waiting longer


def authenticate(header: str | None, key_hashes: Sequence[str]) -> str | None:
    """Owner for an `Authorization` header: first 16 hex digits of the key's SHA-256; None if no key fits.

    Compares digests in constant time, and with every key, so that neither content nor position shows in the time.
    """
    if not key_hashes:
        return ANONYMOUS
    scheme, _, key = (header or "").partition(" ")
    digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
    matches = [hmac.compare_digest(digest, known) for known in key_hashes]
    return digest[:16] if any(matches) and scheme.lower() == "bearer" else None


@dataclass
class _Bucket:
    tokens: float
    at: float


class Admission:
    """Limits of one service. `check` before reading a body, `take` when a job is about to be stored."""

    def __init__(
        self, config: ServerConfig, store: JobStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._store = store
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._mean_job_s = DEFAULT_JOB_S

    def note_duration(self, seconds: float) -> None:
        """Learn from a finished job how long a place in the queue takes."""
        self._mean_job_s += 0.2 * (seconds - self._mean_job_s)

    def check(self, owner: str) -> None:
        """Raises: ApiError 429: the queue is full, or this key has too many jobs."""
        active = self._store.active()
        queued = sum(job.status == QUEUED for job in active)
        if queued >= self._config.max_queued:
            raise self._full("the queue is full", "queue_full", queued, self._config.max_queued)
        own = sum(job.owner == owner for job in active)
        if own >= self._config.max_active_per_key:
            raise self._full(
                "this key has too many unfinished jobs", "key_limit", own, self._config.max_active_per_key
            )

    def take(self, owner: str) -> None:
        """`check`, and one token of the key's rate.

        Raises: ApiError 429.
        """
        self.check(owner)
        per_minute = self._config.requests_per_minute
        if per_minute <= 0:
            return
        now = self._clock()
        bucket = self._buckets.setdefault(owner, _Bucket(float(per_minute), now))
        bucket.tokens = min(float(per_minute), bucket.tokens + (now - bucket.at) * per_minute / 60)
        bucket.at = now
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) * 60 / per_minute
            raise _too_many("too many requests", "rate_limited", wait_s, f"{per_minute} a minute")
        bucket.tokens -= 1

    def _full(self, message: str, code: str, found: int, limit: int) -> ApiError:
        error = _too_many(message, code, self._mean_job_s, limit)
        error.found = found
        return error


def _too_many(message: str, code: str, wait_s: float, limit: object) -> ApiError:
    seconds = min(MAX_RETRY_AFTER_S, max(1, round(wait_s + 0.5)))
    return ApiError(message, status=429, code=code, expected=limit, headers={"Retry-After": str(seconds)})
