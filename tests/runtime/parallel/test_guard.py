"""The guard of a run over a store in memory: who is blamed, what is called off, when a process is ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError
from runtime.parallel.guard import Guard, GuardTimes

PATIENT = GuardTimes(limit_s=60.0, beat_s=0.1, grace_s=60.0)
HASTY = GuardTimes(limit_s=1.5, beat_s=0.02, grace_s=0.0)


class MemoryStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        self.check()
        with self.lock:
            self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.check()
        with self.lock:
            return [self.values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.check()
        with self.lock:
            if self.values.get(key, b"").decode() == expected:
                self.values[key] = desired.encode()
            return self.values[key]

    def check(self) -> None:
        if self.is_gone:
            raise RuntimeError("connection reset")


class Run:
    """Guards of some ranks over one store; ranks that are not started are silent."""

    def __init__(self, size: int, started: tuple[int, ...], times: GuardTimes = PATIENT) -> None:
        self.store = MemoryStore()
        self.called_off = {rank: threading.Event() for rank in range(size)}
        self.ended: dict[int, InternalError] = {}
        self.has_ended = {rank: threading.Event() for rank in range(size)}
        self.guards = [
            Guard(self.store, rank, size, times, self.called_off[rank].set, self.ending(rank))
            for rank in range(size)
        ]
        for guard in self.guards:
            guard.announce()
        for rank in started:
            self.guards[rank].start()
        self.started = started

    def ending(self, rank: int) -> Callable[[InternalError], None]:
        def end(error: InternalError) -> None:
            self.ended[rank] = error
            self.has_ended[rank].set()

        return end

    def close(self) -> None:
        for rank in self.started:
            self.guards[rank].close()


def test_one_rank_s_report_is_every_rank_s_error_and_calls_their_collectives_off() -> None:
    run = Run(3, (0, 1, 2))
    error = run.guards[2].report("out of memory")
    for rank in range(3):
        assert run.called_off[rank].wait(10)
        assert str(run.guards[rank].failure) == str(error)
    assert "rank 2 of 3 failed: out of memory" in str(error)
    assert not run.ended, "everybody had time to leave"
    run.close()


def test_the_first_cause_wins() -> None:
    run = Run(2, ())
    first = run.guards[1].report("disk full")
    assert str(run.guards[0].report("peer closed the connection")) == str(first)


def test_a_process_that_does_not_leave_is_ended_with_the_cause() -> None:
    run = Run(2, (0,), HASTY)
    run.guards[1].report("killed")
    assert run.has_ended[0].wait(10)
    assert "rank 1 of 2 failed: killed" in str(run.ended[0])
    run.close()


def test_silence_is_a_failure_after_the_limit() -> None:
    run = Run(3, (0, 1), HASTY)
    assert run.has_ended[0].wait(10)
    assert "rank 2 of 3 failed: did not answer for 1.5 s" in str(run.ended[0])
    run.close()


def test_a_lost_connection_is_blamed_on_the_rank_that_went_silent() -> None:
    run = Run(3, (0, 1))
    with (
        pytest.raises(InternalError, match="rank 2 of 3 failed: stopped answering") as caught,
        run.guards[0].waiting("all-gather"),
    ):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    assert isinstance(caught.value.__cause__, RuntimeError)
    run.close()


def test_standing_still_during_a_job_is_a_hang_and_the_rank_behind_is_blamed() -> None:
    run = Run(2, (0, 1), HASTY)
    with run.guards[0].job():
        run.guards[0].progress("evaluation 3")
        run.guards[0].progress("evaluation 4")
        assert run.has_ended[0].wait(10)
    assert "rank 1 of 2 failed: no progress for 1.5 s; here: evaluation 4" in str(run.ended[0])
    run.close()


def test_idle_ranks_may_stand_still() -> None:
    run = Run(2, (0, 1), GuardTimes(limit_s=1.5, beat_s=0.02, grace_s=60.0))
    assert not run.called_off[0].wait(2.0)
    assert run.guards[0].failure is None
    run.close()


def test_a_dead_store_is_the_failure_of_the_rank_that_keeps_it() -> None:
    run = Run(2, (1,))
    run.store.is_gone = True
    assert run.called_off[1].wait(10)
    assert "rank 0 of 2 failed: the rank that keeps the run's store is gone" in str(run.guards[1].failure)
    run.close()


def test_closing_waits_for_a_call_off_under_way() -> None:
    """Else the process could end inside the transport."""
    run = Run(1, ())
    is_inside, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def call_off() -> None:
        is_inside.set()
        may_end.wait(60)
        has_ended.set()

    guard = Guard(run.store, 0, 1, PATIENT, call_off, run.ending(0))
    guard.announce()
    guard.start()
    guard.report("out of paint")
    assert is_inside.wait(60)
    threading.Timer(0.1, may_end.set).start()
    guard.close()
    assert has_ended.is_set()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_call_off_that_fails_or_hangs_does_not_keep_the_process(hangs: bool) -> None:
    run, may_end = Run(1, ()), threading.Event()

    def call_off() -> None:
        if not hangs:
            raise ZeroDivisionError
        may_end.wait(60)

    guard = Guard(run.store, 0, 1, HASTY, call_off, run.ending(0))
    guard.announce()
    guard.start()
    guard.report("out of paint")
    assert run.has_ended[0].wait(10)
    guard.close()
    assert not may_end.is_set()
    may_end.set()
    assert guard._calling_off is not None
    guard._calling_off.join(10)  # nothing of it is left to the next test
    assert not guard._calling_off.is_alive()


def test_a_load_is_known_everywhere_when_every_rank_has_said_so() -> None:
    """Soon, though beats are far apart."""
    run = Run(2, (0, 1), GuardTimes(limit_s=600, beat_s=60, grace_s=5))
    first, second = run.guards
    first.loaded()
    for _ in range(20):
        first.hurry()
        time.sleep(0.01)
    assert not first.is_loaded_everywhere
    second.loaded()
    deadline = time.monotonic() + 10
    while not first.is_loaded_everywhere:
        assert time.monotonic() < deadline
        first.hurry()
        time.sleep(0.01)
    run.close()


@pytest.mark.parametrize(
    ("kind", "expected"), [("bad_artifact", ArtifactError), ("bad_request", InternalError)]
)
def test_a_damaged_directory_is_one_for_all_ranks(kind: str, expected: type[WorkerError]) -> None:
    run = Run(2, (0,))
    assert type(run.guards[1].report("weights.safetensors: damaged", kind)) is expected
    assert run.called_off[0].wait(10)
    assert type(run.guards[0].failure) is expected
    run.close()


def test_nobody_was_silent_before_the_watch_began() -> None:
    """A rank may come long after this one; what fails then is not its silence."""
    run = Run(2, (), GuardTimes(limit_s=60, beat_s=0.1, grace_s=5))
    first, second = run.guards
    first._beats = [(b"", time.monotonic() - 100)] * 2
    first.start()
    second.start()
    failure = first.explain("coming together: no such host", CapabilityError.kind)
    assert "rank 0 of 2 failed: coming together: no such host" in str(failure)
    assert type(failure) is CapabilityError
    first.close()
    second.close()
