"""Notices that a rank of the run failed, was killed or hangs, and ends the others with one clear error.

Every rank beats in a small key-value store that is not the collectives' transport. The first cause that anybody writes
there is everybody's. A process that has not left the run soon after is ended by its own guard: it may be stuck in a
collective, and would keep its GPU.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError

_FAILURE = "failure"
_KINDS: dict[str, type[WorkerError]] = {
    kind.kind: kind for kind in (InternalError, ArtifactError, CapabilityError)
}
"""Of everybody's failure: a damaged directory, or ranks that cannot reach each other, are so for the next start too."""

log = logging.getLogger(__name__)


class Store(Protocol):
    """What the guard needs of a key-value store; every call raises when the store is gone."""

    def set(self, key: str, value: str) -> None: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class GuardTimes:
    """Seconds. limit: silence, or a job without progress, that counts as a hang; longer than the longest step.

    beat: between two looks. grace: for the process to leave the run by itself once a failure is known. join: for all
    ranks to come.
    """

    limit_s: float = 300.0
    beat_s: float = 0.5
    grace_s: float = 5.0
    join_s: float = 300.0


class Guard:
    """One rank's watch over all ranks.

    Args:
        store: a connection that nobody else uses; `connect` to it happens before.
        call_off: makes the collectives under way fail, where the transport can.
        end_process: called with the error when the guard was not closed in time; must not return.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        times: GuardTimes,
        call_off: Callable[[], None],
        end_process: Callable[[WorkerError], None],
    ) -> None:
        self.failure: WorkerError | None = None
        self._store, self._rank, self._size, self._times = store, rank, size, times
        self._call_off, self._end_process = call_off, end_process
        self._lock = threading.Lock()
        self._store_lock = threading.Lock()
        self._progress = 0
        self._progress_s = time.monotonic()
        self._is_busy = False
        self._doing = "starting"
        self._is_loaded = False
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._calling_off: threading.Thread | None = None
        self._beats = [(b"", time.monotonic())] * size
        self._thread = threading.Thread(target=self._watch, name="coldframe-guard", daemon=True)

    def announce(self) -> None:
        """Write the first beat. Every rank does before any rank calls `start`: reading waits for missing keys."""
        self._store.compare_set(_FAILURE, "", "")
        self._write_beat(0)

    def start(self) -> None:
        """Begin to watch. No rank has been silent before."""
        self._beats = [(b"", time.monotonic())] * self._size
        self._thread.start()

    def close(self) -> None:
        """Stop watching; works twice."""
        self._closing.set()
        self._hurry.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._calling_off is not None:
            self._calling_off.join(self._times.grace_s)

    @contextmanager
    def job(self) -> Iterator[None]:
        """While a request runs, standing still counts as a hang."""
        self.progress("job")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def progress(self, doing: str) -> None:
        """This rank's main thread has got to `doing`."""
        with self._lock:
            self._progress += 1
            self._progress_s = time.monotonic()
            self._doing = doing

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Around a wait for other ranks. Raises: InternalError: it failed; names the rank that is the cause."""
        try:
            yield
        except RuntimeError as error:  # torch's errors of its collectives
            raise self.explain(f"{name}: {error}") from error

    def loaded(self) -> None:
        """This rank's first load is in place."""
        with self._lock:
            self._is_loaded = True
        self.hurry()

    def hurry(self) -> None:
        """Beat, and look at the others, now."""
        self._hurry.set()

    @property
    def is_loaded_everywhere(self) -> bool:
        """Whether every rank has said so, as far as its last beat was read."""
        return all(beat and json.loads(beat)[3] for beat, _ in self._beats)

    def check(self) -> None:
        """Raises: WorkerError: a failure is known. Collectives that were called off have left garbage, so whoever has
        waited for the device asks before using its results."""
        if self.failure is not None:
            raise self.failure

    def report(self, cause: str, kind: str = InternalError.kind) -> WorkerError:
        """Write this rank's failure down for all ranks, unless another one came first; the error to raise.

        Args: kind: of the error on all ranks, one of `_KINDS`; any other is internal.
        """
        return self._fail(self._rank, cause, kind)

    def explain(self, symptom: str, kind: str = InternalError.kind) -> WorkerError:
        """The cause of a collective's failure, once the beats have shown which rank is missing; of `kind` if none is."""
        deadline = time.monotonic() + 10 * self._times.beat_s
        while self.failure is None and time.monotonic() < deadline:
            silent = self._silent_ranks(3 * self._times.beat_s)
            if silent:
                self._fail(silent[0], "stopped answering")
            self._closing.wait(self._times.beat_s / 4)
        return self.failure or self._fail(self._rank, symptom.partition("\n")[0], kind)

    # --- on the guard's thread ---

    def _watch(self) -> None:
        beat = 0
        while not self._wait_for_beat():
            beat += 1
            try:
                self._write_beat(beat)
                self._read_others()
            except Exception as error:  # noqa: BLE001 - whatever a dead store raises
                if not self._closing.is_set():
                    self._set_failure(
                        0, f"the rank that keeps the run's store is gone ({type(error).__name__})"
                    )
            self._check_progress()
            if self.failure is not None:
                self._end(self.failure)
                return

    def _wait_for_beat(self) -> bool:
        """Until the next beat is due; whether the guard is closing."""
        self._hurry.wait(self._times.beat_s)
        self._hurry.clear()
        return self._closing.is_set()

    def _write_beat(self, beat: int) -> None:
        with self._lock:
            text = json.dumps([beat, self._progress, self._doing, self._is_loaded])
        with self._store_lock:
            self._store.set(f"beat/{self._rank}", text)

    def _read_others(self) -> None:
        keys = [f"beat/{rank}" for rank in range(self._size)]
        with self._store_lock:
            failure, *beats = self._store.multi_get([_FAILURE, *keys])
        now = time.monotonic()
        self._beats = [
            (beat, since if beat == before else now)
            for beat, (before, since) in zip(beats, self._beats, strict=True)
        ]
        if failure:
            self._set_failure(*json.loads(failure))
        elif silent := self._silent_ranks(self._times.limit_s):
            self._fail(silent[0], f"did not answer for {self._times.limit_s:g} s")

    def _silent_ranks(self, seconds: float) -> Sequence[int]:
        now = time.monotonic()
        return [
            rank
            for rank, (_, since) in enumerate(self._beats)
            if rank != self._rank and now - since > seconds
        ]

    def _check_progress(self) -> None:
        with self._lock:
            still_s, doing = time.monotonic() - self._progress_s, self._doing
        if not self._is_busy or still_s <= self._times.limit_s or self.failure is not None:
            return
        cause = f"no progress for {self._times.limit_s:g} s; here: {doing}"
        if silent := self._silent_ranks(3 * self._times.beat_s):
            self._fail(silent[0], f"stopped answering, and {cause}")
        else:
            self._fail(self._furthest_behind(), cause)

    def _furthest_behind(self) -> int:
        """The rank with the least progress: the others wait for it."""
        progress = [json.loads(beat)[1] if beat else 0 for beat, _ in self._beats]
        return progress.index(min(progress))

    def _end(self, error: WorkerError) -> None:
        # On a thread, because a transport may take minutes to call off, or fail to; what ends the process does not wait for it.
        self._calling_off = threading.Thread(
            target=self._call_off_quietly, name="coldframe-call-off", daemon=True
        )
        self._calling_off.start()
        if not self._closing.wait(self._times.grace_s):
            self._end_process(error)

    def _call_off_quietly(self) -> None:
        try:
            self._call_off()
        except Exception:  # the process ends all the same
            log.warning("collectives could not be called off", exc_info=True)

    # --- on either thread ---

    def _fail(self, rank: int, cause: str, kind: str = InternalError.kind) -> WorkerError:
        with (
            suppress(Exception),
            self._store_lock,
        ):  # the store may be gone too; then this rank's view is all there is
            first = self._store.compare_set(_FAILURE, "", json.dumps([rank, cause, kind]))
            rank, cause, kind = json.loads(first)
        return self._set_failure(rank, cause, kind)

    def _set_failure(self, rank: int, cause: str, kind: str = InternalError.kind) -> WorkerError:
        with self._lock:
            if self.failure is None:
                self.failure = _KINDS.get(kind, InternalError)(
                    f"rank {rank} of {self._size} failed: {cause}",
                    where="ranks",
                    hint="all ranks end; start the run again",
                )
            return self.failure
