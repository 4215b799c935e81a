"""The place for a first request between the thread that reads commands and the start."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import RequestError
from runtime.first_request import FirstRequest
from runtime.worker import Worker

BODY = {"prompt": "rain"}


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_a_start_that_looks_sees_a_request_only_if_it_is_there() -> None:
    first = FirstRequest()
    assert first.wait(0) is None
    assert first.offer(BODY)
    assert first.wait(0) is first.wait() is BODY


def test_one_request_is_taken_and_none_after_the_last_call() -> None:
    first, late = FirstRequest(), FirstRequest()
    assert [first.offer(BODY), first.offer({})] == [True, False]
    late.close()
    assert not late.offer(BODY)
    assert late.wait() is None


def test_the_last_call_leaves_a_request_that_is_there() -> None:
    first = FirstRequest()
    first.offer(BODY)
    first.close()
    assert first.wait() is BODY


@pytest.mark.parametrize("end", ["offer", "close"])
def test_a_waiting_start_goes_on_with_a_request_and_with_the_last_call(end: str) -> None:
    first = FirstRequest()
    thread, found = in_thread(first.wait)
    first.offer(BODY) if end == "offer" else first.close()
    thread.join(10)
    assert found == [BODY if end == "offer" else None]


def test_what_became_of_the_request_goes_back_to_its_sender() -> None:
    prepared: Any = SimpleNamespace()
    first, wrong = FirstRequest(), FirstRequest()
    thread, found = in_thread(first.result)
    first.settle(prepared)
    first.abandon()  # too late: it is settled
    thread.join(10)
    assert found == [prepared]
    wrong.settle(RequestError("missing", where="prompt"))
    with pytest.raises(RequestError, match="prompt"):
        wrong.result()


def test_a_failed_start_lets_the_sender_go() -> None:
    first = FirstRequest()
    first.offer(BODY)
    thread, found = in_thread(first.result)
    first.abandon()
    thread.join(10)
    assert found == [None]
    assert not first.offer(BODY)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_reads_commands(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The others are told by it; their standard input is nobody's."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    asked, end, first = threading.Event(), threading.Event(), FirstRequest()
    Worker(silent(asked, end), io.StringIO(), first).read_commands_from_now_on()
    assert asked.wait(10 if rank == 0 else 0.2) == (rank == 0)
    assert first.offer(BODY), "it is open to whoever brings a request"
    end.set()


def silent(asked: threading.Event, end: threading.Event) -> Any:
    """Commands of a parent that says nothing."""
    asked.set()
    end.wait(10)
    yield from ()
