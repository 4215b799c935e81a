"""Ranks of a host that meet on a socket: who is counted, how long is waited, what ends it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loader.errors import CapabilityError, InternalError
from loader.host_link import socket_address
from runtime.parallel import meeting
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.meeting import Limit, host_meeting, receive, visit_meeting


def ranks(size: int) -> list[RankEnvironment]:
    run = uuid.uuid4().hex
    return [RankEnvironment(rank, size, rank, size, run_id=run) for rank in range(size)]


def limit(seconds: float = 60.0, cancelled: threading.Event | None = None) -> Limit:
    return Limit(seconds, cancelled or threading.Event())


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result(60) for done in [pool.submit(call) for call in calls]]


def host(environment: RankEnvironment, word: bytes = b"word") -> list[bytes]:
    """Says `word` to all, and returns what they said."""
    with host_meeting(environment, "test", limit()) as guests:
        said = [receive(guest, 1, limit()) for guest in guests]
        for guest in guests:
            guest.sendall(word)
    return sorted(said)


def guest(environment: RankEnvironment, delay_s: float = 0.0, count: int = 4) -> bytes:
    time.sleep(delay_s)
    with visit_meeting(environment, "test", limit()) as connection:
        connection.sendall(bytes([environment.rank]))
        return receive(connection, count, limit())


@pytest.mark.parametrize("late", [0, 1, 3])
def test_all_ranks_are_heard_and_hear(late: int) -> None:
    first, *others = ranks(4)

    def hosting() -> list[bytes]:
        time.sleep(0.2 if late == 0 else 0)
        return host(first)

    calls = [lambda other=other: guest(other, 0.2 if other.rank == late else 0) for other in others]
    assert at_once(hosting, *calls) == [[b"\1", b"\2", b"\3"], b"word", b"word", b"word"]


def test_two_purposes_are_two_meetings() -> None:
    first, second = ranks(2)
    cancelled = threading.Event()

    def elsewhere() -> str:
        with pytest.raises(CapabilityError) as raised, visit_meeting(second, "other", limit(0.3)):
            pass
        cancelled.set()
        return str(raised.value)

    def hosting() -> str:
        with pytest.raises(CapabilityError) as raised, host_meeting(first, "test", limit(60, cancelled)):
            pass
        return str(raised.value)

    waited, given_up = at_once(elsewhere, hosting)
    assert "the first rank did not come in time" in waited
    assert "the start was given up" in given_up


def test_a_rank_that_does_not_come_is_not_waited_for_long() -> None:
    with (
        pytest.raises(CapabilityError, match="a rank did not come in time"),
        host_meeting(ranks(3)[0], "test", limit(0.2)),
    ):
        pass


@pytest.mark.parametrize(
    ("says", "stays_s"), [(bytes(8), 0.0), (b"", 0.0), (b"", 1.0)], ids=["nonsense", "leaves", "is silent"]
)
def test_whoever_else_connects_is_not_counted_as_a_rank(
    says: bytes, stays_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_HELLO_S", 0.2)
    first, second = ranks(2)

    has_come = threading.Event()

    def intrude() -> None:
        for _ in range(6000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end, contextlib.suppress(OSError):
                end.connect(f"{socket_address(first.run_id, 0)}-test")
                end.sendall(says)
                has_come.set()
                time.sleep(stays_s)
                return
            time.sleep(0.01)

    def come() -> bytes:
        assert has_come.wait(60)
        return guest(second)

    said, heard, _ = at_once(lambda: host(first), come, intrude)
    assert (said, heard) == ([b"\1"], b"word")


def test_an_end_that_leaves_early_is_told() -> None:
    first, second = ranks(2)

    def disappointed() -> str:
        with pytest.raises(InternalError) as raised:
            guest(second, count=100)
        return str(raised.value)

    assert at_once(lambda: host(first, b"short"), disappointed) == [[b"\1"], "ranks of a host: a rank left"]


def test_one_rank_meets_nobody() -> None:
    assert host(RankEnvironment(run_id=uuid.uuid4().hex)) == []
