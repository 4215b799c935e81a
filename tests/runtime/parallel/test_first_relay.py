"""A first request that comes to rank 0 reaches the starts of all ranks, and all of them load by the same."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loader.errors import InternalError
from runtime.first_request import FirstRequest
from runtime.parallel import first_relay
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.first_relay import FirstRelay
from runtime.parallel.meeting import host_meeting
from runtime.parallel.start import RankStart
from runtime.settings import Settings
from runtime.timeline import Timeline

BODY = {
    "prompt": "eine Lampe im Regen – 雨",
    "first_frame": "data:;base64," + "iVBORw0K" * 100_000,
    "seed": 3,
}


class Starts:
    """Ranks of one host, from the first on. follows: a request was announced."""

    def __init__(self, size: int, follows: bool, meet_s: float = 60.0) -> None:
        run = uuid.uuid4().hex
        self.environments = [RankEnvironment(rank, size, rank, size, run_id=run) for rank in range(size)]
        self.firsts = [FirstRequest(follows) for _ in range(size)]
        self.relays: list[FirstRelay] = []
        self.meet_s = meet_s

    def begin(self, *ranks: int) -> None:
        self.relays += [FirstRelay(self.environments[r], self.firsts[r], self.meet_s) for r in ranks]

    def load_bodies(self) -> list[Any]:
        with ThreadPoolExecutor(len(self.relays)) as pool:
            return [done.result(60) for done in [pool.submit(relay.load_body) for relay in self.relays]]

    def close(self) -> None:
        for relay in self.relays:
            relay.close()


@pytest.fixture
def opened() -> Iterator[list[Starts]]:
    made: list[Starts] = []
    yield made
    for starts in made:
        starts.close()


def starts(opened: list[Starts], size: int = 3, follows: bool = True, **options: Any) -> Starts:
    opened.append(Starts(size, follows, **options))
    return opened[-1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_all_ranks_load_by_the_request_that_was_announced(opened: list[Starts], order: Any) -> None:
    team = starts(opened)
    for rank in order:
        team.begin(rank)
        time.sleep(0.05)
    team.firsts[0].offer(BODY)
    assert team.load_bodies() == [BODY] * 3
    assert [first.wait() for first in team.firsts] == [BODY] * 3


def test_one_that_was_announced_and_does_not_come_changes_nothing(
    opened: list[Starts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_relay, "FOLLOWS_S", 0.1)
    team = starts(opened)
    team.begin(0, 1, 2)
    assert team.load_bodies() == [None] * 3
    assert [first.wait(0) for first in team.firsts] == [None] * 3


@pytest.mark.parametrize("follows", [True, False])
def test_one_that_comes_later_is_prepared_by_all_but_not_loaded_by(
    opened: list[Starts], monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    monkeypatch.setattr(first_relay, "FOLLOWS_S", 0.1)
    team = starts(opened, follows=follows)
    team.begin(0, 1, 2)
    assert team.load_bodies() == [None] * 3
    assert team.firsts[0].offer(BODY)
    assert [first.wait(60) for first in team.firsts] == [BODY] * 3


def test_one_that_is_there_unannounced_is_not_loaded_by_either(opened: list[Starts]) -> None:
    """The others might not have heard of it yet."""
    team = starts(opened, follows=False)
    team.firsts[0].offer(BODY)
    team.begin(0, 1, 2)
    assert team.load_bodies() == [None] * 3
    assert [first.wait(60) for first in team.firsts] == [BODY] * 3


def test_the_end_of_rank_0_s_last_call_ends_the_others_waiting(opened: list[Starts]) -> None:
    team = starts(opened, follows=False)
    team.begin(0, 1, 2)
    team.firsts[0].close()
    for relay in team.relays:
        relay._thread.join(60)
        assert not relay._thread.is_alive()
    assert [first.wait(0) for first in team.firsts] == [None] * 3


def test_a_rank_whose_start_takes_none_any_more_leaves_it(opened: list[Starts]) -> None:
    team = starts(opened, size=2, follows=False)
    team.begin(0, 1)
    team.firsts[1].close()
    team.firsts[0].offer(BODY)
    team.relays[1]._thread.join(60)
    assert team.firsts[1].wait(0) is None


def test_a_start_that_fails_on_rank_0_lets_the_others_go(
    opened: list[Starts], monkeypatch: pytest.MonkeyPatch
) -> None:
    team = starts(opened, size=2)
    have_met = threading.Event()

    @contextlib.contextmanager
    def meeting(*arguments: Any) -> Iterator[Any]:
        with host_meeting(*arguments) as guests:
            have_met.set()
            yield guests

    monkeypatch.setattr(first_relay, "host_meeting", meeting)
    team.begin(0, 1)
    assert have_met.wait(60)
    team.relays[0].close()
    assert team.relays[1].load_body() is None


def test_a_rank_0_that_never_came_is_an_error_of_the_others(opened: list[Starts]) -> None:
    team = starts(opened, size=2, meet_s=0.3)
    team.begin(1)
    with pytest.raises(InternalError, match=r"rank 0 did not say what to load .*did not come in time"):
        team.relays[0].load_body()


def test_a_rank_that_never_comes_is_not_waited_for_by_rank_0(opened: list[Starts]) -> None:
    team = starts(opened, size=3, meet_s=600)  # longer than this test may take
    team.begin(0)
    team.firsts[0].offer(BODY)
    assert team.relays[0].load_body() == BODY


@pytest.mark.parametrize(("local_size", "is_taken"), [(2, True), (1, False)])
def test_ranks_on_several_hosts_take_none(local_size: int, is_taken: bool) -> None:
    first = FirstRequest()
    environment = RankEnvironment(0, 2, 0, local_size, run_id=uuid.uuid4().hex)
    start = RankStart(environment, Settings(device="cpu"), Timeline(), None, None, None, first)
    assert (start.relay is not None) == is_taken
    assert first.offer(BODY) == is_taken
    if start.relay is not None:
        start.relay.close()


def test_one_that_came_before_is_not_loaded_by_on_several_hosts() -> None:
    """The ranks of the other host know nothing of it."""
    first = FirstRequest()
    assert first.offer(BODY)
    environment = RankEnvironment(0, 2, 0, 1, run_id=uuid.uuid4().hex)
    start = RankStart(environment, Settings(device="cpu"), Timeline(), None, None, None, first)
    assert start.body_to_load_by(first) is None
    assert first.wait() == BODY, "it is prepared all the same"


def test_whatever_goes_wrong_in_a_relay_is_said_and_not_waited_for(
    opened: list[Starts], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RecursionError("too deep")

    monkeypatch.setattr(first_relay, "_hear", fails)
    team = starts(opened, size=2)
    team.begin(0, 1)
    with pytest.raises(InternalError, match=r"did not say what to load \(too deep\)"):
        team.relays[1].load_body()


def test_ranks_with_readers_of_their_own_start_without_a_relay() -> None:
    """They need not load in one order; what is missing later is loaded then."""
    environment = RankEnvironment(1, 2, 1, 2, run_id=uuid.uuid4().hex)
    first = FirstRequest(follows=True)
    start = RankStart(
        environment, Settings(device="cpu", host_reader="own"), Timeline(), None, None, None, first
    )
    assert start.relay is not None
    start.relay._cancelled.set()
    assert start.body_to_load_by(first) is None
    assert "rank 0 did not say what to load" in start.timeline.facts["first_request"]


@pytest.mark.parametrize("host_reader", ["own", "shared"])
def test_ranks_share_the_cpus_out_unless_one_reads_for_all(host_reader: str) -> None:
    environment = RankEnvironment(0, 4, 0, 4, run_id=uuid.uuid4().hex)
    settings = Settings(device="cpu", host_reader=host_reader)
    start = RankStart(environment, settings, Timeline(), None, None, None)
    assert start.stream_options().sharers == 4, "on a CPU every rank reads"
    start.device = "cuda"
    assert start.stream_options().sharers == (4 if host_reader == "own" else 1)
