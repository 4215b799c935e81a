"""The start's node that connects GPUs early: when it does, what it leaves to torch, what the timeline says of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.parallel import early
from runtime.parallel.control import Control
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.ranks import OneRank
from runtime.parallel.start import RankStart
from runtime.settings import Settings
from runtime.timeline import Timeline
from tests.runtime.parallel.fake_nccl_ranks import quiet_guard

TWO = RankEnvironment(0, 2, 0, 2)


class Maker:
    """An `EarlyCommunicator` that makes `made` at once, or waits to be cancelled."""

    def __init__(self, made: Any, problem: str = "", waits: bool = False) -> None:
        self.made, self.problem = made, problem
        self.cancelled, self.begun = threading.Event(), threading.Event()
        self.waits = waits

    def make(self) -> Any:
        self.begun.set()
        if self.waits:
            assert self.cancelled.wait(60)
        return self.made

    def cancel(self) -> None:
        self.cancelled.set()


def rank_start(environment: RankEnvironment = TWO, device: str = "cuda", nccl: str = "early") -> RankStart:
    start = RankStart(environment, Settings(device="cpu", nccl=nccl), Timeline(), None, None, None)
    start.device = device
    start.preload = SimpleNamespace(join=lambda: None)  # type: ignore[assignment]
    return start


def test_it_is_made_where_the_settings_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, start = Maker("a communicator"), rank_start()
    monkeypatch.setattr(early, "early_communicator", lambda *arguments: maker)
    assert start.communicator({}) == "a communicator"
    assert start.timeline.facts["communicator"] == "early"


@pytest.mark.parametrize(
    ("environment", "device", "nccl"),
    [(TWO, "cuda", "torch"), (TWO, "cpu", "early"), (RankEnvironment(), "cuda", "early")],
    ids=["setting", "cpu", "one rank"],
)
def test_otherwise_nothing_is_tried(
    environment: RankEnvironment, device: str, nccl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(early, "early_communicator")
    start = rank_start(environment, device, nccl)
    assert start.communicator({}) is None
    assert "communicator" not in start.timeline.facts


@pytest.mark.parametrize(
    ("environment", "maker", "reason"),
    [
        (TWO, Maker(None, "libnccl.so.2: cannot be used"), "libnccl.so.2: cannot be used"),
        (RankEnvironment(0, 4, 0, 2), None, "ranks on several hosts"),
    ],
    ids=["library", "hosts"],
)
def test_what_is_left_to_torch_says_why(
    environment: RankEnvironment, maker: Maker | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "early_communicator", lambda *arguments: maker)
    start = rank_start(environment)
    assert start.communicator({}) is None
    assert start.timeline.facts["communicator"] == f"left to torch: {reason}"


def test_without_torchs_libraries_mapped_it_is_left_to_torch() -> None:
    start = rank_start()
    start.preload = None
    assert start.communicator({}) is None
    assert start.timeline.facts["communicator"] == "left to torch: its libraries are not mapped early"


def test_a_start_that_fails_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, start = Maker(None, "the start was given up", waits=True), rank_start()
    monkeypatch.setattr(early, "early_communicator", lambda *arguments: maker)
    thread = threading.Thread(target=start.communicator, args=({},))
    thread.start()
    assert maker.begun.wait(60)
    start.no_communicator()
    thread.join(60)
    assert not thread.is_alive()


def test_giving_up_before_it_began_is_nothing() -> None:
    rank_start().no_communicator()


def test_a_failure_that_is_known_ends_every_section() -> None:
    """What was called off has left garbage: neither a section that begins nor one that ends may go on with it."""
    guard = quiet_guard(0, 1)
    control = Control(OneRank(), guard)

    def fails_inside() -> None:
        with control.section("decode round 3"):
            guard.report("out of paint")

    for section in (fails_inside, lambda: control.section("last frames").__enter__()):
        with pytest.raises(Exception, match="rank 0 of 1 failed: out of paint"):
            section()
