"""A rank other than 0: the request that it prepared in its start is not prepared again for rank 0's command."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import InternalError
from runtime.parallel.engine import RankEngine
from runtime.parallel.family import RankPrepared
from runtime.pipeline import Cancelled

BODY = {"prompt": "a lamp", "seed": 3}


def engine(waiting: Any) -> RankEngine:
    made = RankEngine.__new__(RankEngine)
    made._waiting = waiting
    made.prepare = lambda body: ("made from", body)  # type: ignore[assignment, method-assign, return-value]
    return made


def prepared(body: Any) -> RankPrepared:
    waiting = RankPrepared.__new__(RankPrepared)
    object.__setattr__(waiting, "body", body)
    return waiting


def test_the_waiting_request_is_taken_once() -> None:
    waiting = prepared(dict(BODY))
    rank = engine(waiting)
    assert rank._prepared(dict(BODY)) is waiting
    assert rank._prepared(dict(BODY)) == ("made from", BODY)


@pytest.mark.parametrize("waiting", [None, prepared({**BODY, "seed": 4})], ids=["none", "another"])
def test_another_request_is_made_from_its_body(waiting: Any) -> None:
    rank = engine(waiting)
    assert rank._prepared(dict(BODY)) == ("made from", BODY)
    assert rank._waiting is None


def test_a_measurement_that_fails_is_everybodys_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would wait inside a section for a rank that has left."""
    reported: list[str] = []

    def report(cause: str, kind: str) -> InternalError:
        reported.append(cause)
        return InternalError(f"rank 0 of 2 failed: {cause}")

    class Request:
        def __enter__(self) -> None:
            return None

        def __exit__(self, *error: object) -> None:
            return None

    guard = SimpleNamespace(failure=None, report=report, job=Request)
    control = SimpleNamespace(exchange=lambda command: None, request=Request, can_stop=False)
    rank = engine(None)
    rank.connection = SimpleNamespace(guard=guard, control=control)  # type: ignore[assignment]
    rank._job = None

    def fails(prepared: object) -> None:
        raise ValueError("out of paint")

    monkeypatch.setattr(rank, "start_job", fails, raising=False)
    with pytest.raises(InternalError, match="rank 0 of 2 failed: out of paint"):
        rank.measure(prepared(dict(BODY)), steps=1)
    assert reported == ["out of paint"]


def test_nobody_is_told_anything_after_a_failure_is_known() -> None:
    """Telling the others would wait for ranks that may be dead."""
    failure = InternalError("rank 1 of 2 failed: stopped answering")
    rank = engine(None)
    rank._job = SimpleNamespace(close=lambda: pytest.fail("brought to a border"))  # type: ignore[assignment]
    control = SimpleNamespace(can_stop=True, stop=lambda: pytest.fail("told to stop"))
    rank.connection = SimpleNamespace(guard=SimpleNamespace(failure=failure), control=control)  # type: ignore[assignment]
    with pytest.raises(InternalError) as raised:
        rank._give_up(Cancelled())
    assert raised.value is failure
