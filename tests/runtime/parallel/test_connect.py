"""Joining a run: how long a store is waited for, and whose failure a transport's is."""

from __future__ import annotations

import socket
import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch

from loader.errors import InternalError
from runtime.parallel import connect, run_store
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.ranks import OneRank
from runtime.parallel.start import RankStart
from runtime.settings import Settings
from runtime.timeline import Timeline
from tests.runtime.parallel.fake_nccl_ranks import quiet_guard


def test_a_store_is_dialled_as_soon_as_it_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        environment = RankEnvironment(1, 2, 1, 2, port=server.getsockname()[1])
        listens = threading.Event()

        def listen() -> None:
            listens.set()
            server.listen()

        threading.Timer(0.2, listen).start()
        left = run_store.await_server(environment, timedelta(seconds=60))
        assert listens.is_set()
    assert 1 < left.total_seconds() < 60


def test_one_that_never_listens_leaves_the_store_a_second() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # and does not listen
        environment = RankEnvironment(1, 2, 1, 2, port=server.getsockname()[1])
        assert run_store.await_server(environment, timedelta(seconds=0.2)) == timedelta(seconds=1)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), InternalError("out of memory")])
def test_a_transport_that_fails_at_once_is_everybodys_failure(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(connect, "use_once", fails)
    guard = quiet_guard(0, 1)
    with pytest.raises(
        InternalError, match=r"rank 0 of 1 failed: first use of the transport: .*out of memory"
    ):
        connect._use_at_start(OneRank(), None, guard)
    assert "out of memory" in str(guard.failure)


@pytest.mark.parametrize("is_used", [True, False])
def test_the_timeline_says_whose_communicator_is_used(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()

    def joined(environment: RankEnvironment, device: str, times: object, early: object) -> connect.Connection:
        kept = early if is_used else None
        return connect.Connection(environment, OneRank(), None, None, kept, {"store": 0.1})  # type: ignore[arg-type]

    monkeypatch.setattr(connect, "connect", joined)
    start = RankStart(
        RankEnvironment(0, 2, 0, 2), Settings(device="cpu", nccl="early"), Timeline(), None, None, None
    )
    start.timeline.note(communicator="early")
    start.ranks({"communicator": made})
    wanted = "early" if is_used else "left to torch: another rank has none"
    assert start.timeline.facts["communicator"] == wanted
    assert start.timeline.facts["connect_s"] == {"store": 0.1}
