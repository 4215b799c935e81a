"""Ranks of a host that meet before torch is there: all of them get a communicator of one id, or none does."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from loader.errors import CapabilityError, InternalError
from runtime.native_nccl import Communicator, Nccl
from runtime.parallel.early import EarlyCommunicator, first_uses
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.run_store import agreed
from tests.fakes.nccl import FakeNccl, FakeStreams

Join = Callable[[Nccl, RankEnvironment, bytes], Communicator]


class Host:
    """Ranks as threads, each with what opens its library and what joins."""

    def __init__(self, size: int) -> None:
        self.streams = FakeStreams()
        self.library = FakeNccl(self.streams)
        self.size = size
        self.run_id = uuid.uuid4().hex
        self.opened: list[Callable[[], Nccl]] = [lambda: Nccl(self.library)] * size
        self.joins: list[Join] = [self.join] * size
        self.meet_s = self.join_s = 60.0

    def environment(self, rank: int) -> RankEnvironment:
        return RankEnvironment(rank, self.size, rank, self.size, run_id=self.run_id)

    def join(self, nccl: Nccl, environment: RankEnvironment, unique_id: bytes) -> Communicator:
        return Communicator(nccl, self.streams, environment.size, environment.rank, unique_id)

    def rank(self, rank: int) -> EarlyCommunicator:
        return EarlyCommunicator(
            self.environment(rank), self.opened[rank], self.joins[rank], self.meet_s, self.join_s
        )

    def meet(self, ranks: list[EarlyCommunicator], delays: dict[int, float] | None = None) -> list[Any]:
        made: list[Any] = ["nothing"] * len(ranks)

        def run(place: int) -> None:
            time.sleep((delays or {}).get(place, 0))
            made[place] = ranks[place].make()

        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert "nothing" not in made, "a rank is stuck"
        return made

    def all(self) -> list[EarlyCommunicator]:
        return [self.rank(rank) for rank in range(self.size)]


@pytest.mark.parametrize("late", [None, 0, 1, 3])
def test_all_ranks_join_one_communicator(late: int | None) -> None:
    host = Host(4)
    ranks = host.all()
    made = host.meet(ranks, {late: 0.2} if late is not None else {})
    assert [communicator.rank for communicator in made] == [0, 1, 2, 3]
    assert len(host.library._worlds) == 1
    assert [rank.problem for rank in ranks] == [""] * 4


def refused() -> Nccl:
    raise CapabilityError("not here", where="libnccl.so.2")


@pytest.mark.parametrize("lacking", [0, 2])
def test_without_the_library_on_one_rank_nobody_has_a_communicator(lacking: int) -> None:
    host = Host(3)
    host.opened[lacking] = refused
    ranks = host.all()
    assert host.meet(ranks) == [None] * 3
    assert "not here" in ranks[lacking].problem
    assert "a rank cannot take part" in ranks[1].problem
    assert not host.library._ranks


def test_another_version_on_one_rank_is_left_to_torch() -> None:
    host = Host(3)
    host.opened[1] = lambda: Nccl(FakeNccl(host.streams, version=22605))
    ranks = host.all()
    assert host.meet(ranks) == [None] * 3
    assert "NCCL 22605 here" in ranks[1].problem
    assert not host.library._ranks


def test_an_id_that_cannot_be_made_ends_it_on_all_ranks() -> None:
    host = Host(2)
    host.opened[0] = lambda: Nccl(FakeNccl(host.streams, refuse="ncclGetUniqueId"))
    first, second = ranks = host.all()
    assert host.meet(ranks) == [None, None]
    assert "ncclGetUniqueId failed" in first.problem
    assert "a rank left" in second.problem


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_not_waited_for_long(missing: int) -> None:
    host = Host(2)
    host.meet_s = 0.3
    rank = host.rank(1 - missing)
    assert host.meet([rank]) == [None]
    assert "did not come in time" in rank.problem


@pytest.mark.parametrize("place", [0, 1])
def test_a_start_that_is_given_up_waits_no_longer(place: int) -> None:
    host = Host(2)
    rank = host.rank(place)
    threading.Timer(0.1, rank.cancel).start()
    assert host.meet([rank]) == [None]
    assert "given up" in rank.problem


def test_a_library_that_does_not_return_is_left_behind() -> None:
    host = Host(1)
    host.join_s = 0.2
    may_end = threading.Event()

    def never(nccl: Nccl, environment: RankEnvironment, unique_id: bytes) -> Communicator:
        may_end.wait(60)
        return host.join(nccl, environment, unique_id)

    host.joins[0] = never
    rank = host.rank(0)
    assert host.meet([rank]) == [None]
    assert "NCCL did not return" in rank.problem
    may_end.set()


def test_a_communicator_is_used_only_if_every_rank_has_one() -> None:
    """Rank 1 could not join: rank 0, which could, leaves its own."""

    class Aborted:
        is_aborted = False

        def abort(self) -> None:
            self.is_aborted = True

    store, first = HashStore(), Aborted()
    answers: list[Any] = [first, None]

    def agree(rank: int) -> None:
        environment = RankEnvironment(rank, 2, rank, 2)
        answers[rank] = agreed(store, environment, answers[rank])  # type: ignore[arg-type]

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [None, None]
    assert first.is_aborted


def test_ranks_that_all_have_one_keep_it() -> None:
    store = HashStore()
    store.set("early/1", "yes")
    mine: Any = object()
    assert agreed(store, RankEnvironment(0, 2, 0, 2), mine) is mine  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cause", [InternalError("no memory", where="NCCL"), TypeError("no memory")], ids=["library", "other"]
)
def test_a_failed_join_is_this_ranks_problem_alone(cause: Exception) -> None:
    host = Host(2)

    def fails(nccl: Nccl, environment: RankEnvironment, unique_id: bytes) -> Communicator:
        raise cause

    host.joins[1] = fails
    host.joins[0] = lambda nccl, environment, unique_id: "made"  # type: ignore[assignment, return-value]
    first, second = ranks = host.all()
    assert host.meet(ranks) == ["made", None]
    assert "no memory" in second.problem
    assert not first.problem


@pytest.mark.parametrize("size", [2, 8, 56])
def test_first_uses_fit_into_little_memory(size: int) -> None:
    gathered, exchanged = first_uses(size)
    assert size * max(*gathered, exchanged) <= 256 << 20
    assert len(set(gathered)) == 3
