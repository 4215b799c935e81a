"""`NcclRanks` over `tests.fakes.nccl`: one rank a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.native_nccl import Communicator, Nccl
from runtime.parallel.control import Control
from runtime.parallel.guard import Guard, GuardTimes
from runtime.parallel.nccl_ranks import NcclRanks
from tests.fakes.nccl import FakeNccl, FakeStreams
from tests.runtime.parallel.test_guard import MemoryStore
from tests.runtime.parallel.thread_ranks import ThreadRanks, on_threads


class FakeOrder:
    """A caller on the CPU is never behind; it waits by waiting."""

    def __init__(self, streams: FakeStreams, stream: int) -> None:
        self._streams, self._stream = streams, stream

    def begin(self) -> None:
        return None

    def end(self) -> Callable[[], None]:
        return self._streams.event(self._stream)


def quiet_guard(rank: int, size: int, store: MemoryStore | None = None) -> Guard:
    """One that watches nobody."""
    times = GuardTimes(limit_s=60.0, beat_s=0.01, grace_s=60.0)
    guard = Guard(store or MemoryStore(), rank, size, times, lambda: None, lambda error: None)
    guard.announce()
    return guard


def on_fake_nccl(size: int, function: Callable[[NcclRanks, Control], Any], seed: int = 0) -> list[Any]:
    """See `on_threads`; whatever a stream could not do fails."""
    streams = FakeStreams(seed)
    library = FakeNccl(streams)
    unique_id = Nccl(library).new_id()

    def run(ranks: ThreadRanks, control: Control) -> Any:
        communicator = Communicator(Nccl(library), streams, size, ranks.rank, unique_id)
        communicator.use_once((64, 1000), 500)
        order = FakeOrder(streams, communicator.stream)
        result = function(NcclRanks(communicator, order, quiet_guard(ranks.rank, size)), control)
        communicator.close()
        return result

    results = on_threads(size, run)
    assert not streams.errors, streams.errors
    assert not streams.allocations
    assert len(library.destroyed) == size
    return results
