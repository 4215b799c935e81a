"""Collectives over a communicator of our own: values, bytes on the wire, order, memory that is used later than it was given."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
import torch

from loader.errors import InternalError
from runtime.native_nccl import Communicator, Nccl
from runtime.parallel import connect
from runtime.parallel.nccl_ranks import NcclRanks
from runtime.parallel.ranks import gather_parts
from runtime.parallel.units import UnitRelay
from tests.fakes.nccl import FakeNccl, FakeStreams
from tests.runtime.parallel.fake_nccl_ranks import FakeOrder, on_fake_nccl, quiet_guard
from tests.runtime.parallel.test_guard import MemoryStore
from tests.runtime.parallel.test_ulysses import run_exchange
from tests.runtime.parallel.test_units import Numbers, alone
from tests.runtime.parallel.thread_ranks import on_threads


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_collectives_move_what_they_should(size: int, seed: int) -> None:
    rng = random.Random(1000 * size + seed)
    operations = [
        (rng.choice(("gather", "exchange", "broadcast", "message")), rng.randrange(1 << 30))
        for _ in range(25)
    ]

    def tensor(place: random.Random, rows: int, salt: int) -> torch.Tensor:
        dtype = place.choice((torch.float32, torch.bfloat16, torch.uint8, torch.int64))
        width = place.choice((1, 3, 8))
        return torch.arange(salt, salt + rows * width).remainder(251).view(rows, width).to(dtype)

    def run(ranks, control):
        pending = []
        for number, (operation, draw) in enumerate(operations):
            here = random.Random(draw)
            salt = 17 * number
            if operation == "gather":
                rows, kind = here.randrange(4), here.randrange(1 << 30)
                parts = [tensor(random.Random(kind), rows, salt + 100 * r + seed) for r in range(ranks.size)]
                out = torch.empty((ranks.size, *parts[0].shape), dtype=parts[0].dtype)
                pending.append((ranks.all_gather(out, parts[ranks.rank].clone()), out, torch.stack(parts)))
            elif operation == "exchange":
                counts = [[here.randrange(4) for _ in range(ranks.size)] for _ in range(ranks.size)]
                kind = here.randrange(1 << 30)
                sent = [tensor(random.Random(kind), sum(counts[s]), salt + 50 * s) for s in range(ranks.size)]
                received = [counts[s][ranks.rank] for s in range(ranks.size)]
                expected = torch.cat([sent[s].split(counts[s])[ranks.rank] for s in range(ranks.size)])
                out = torch.empty_like(expected)
                work = ranks.all_to_all(out, sent[ranks.rank].clone(), received, counts[ranks.rank])
                pending.append((work, out, expected))
            elif operation == "broadcast":
                source = here.randrange(ranks.size)
                value = tensor(here, 3, salt)
                mine = value.clone() if ranks.rank == source else torch.zeros_like(value)
                pending.append((ranks.broadcast(mine, source), mine, value))
            else:
                value, (source, target) = tensor(here, 2, salt), here.sample(range(ranks.size), 2)
                if ranks.rank == source:
                    pending.append((ranks.send(value.clone(), target), value, value))
                if ranks.rank == target:
                    out = torch.zeros_like(value)
                    pending.append((ranks.receive(out, source), out, value))
            gc.collect(0)
            if here.random() < 0.3:
                work, found, expected = pending.pop(0) if pending else (None, None, None)
                if work is not None:
                    work.wait()
                    assert torch.equal(found, expected)
        for work, found, expected in pending:
            work.wait()
            assert torch.equal(found, expected)
        return ranks.received_bytes

    assert all(count > 0 for count in on_fake_nccl(size, run, seed))


@pytest.mark.parametrize("num_rows", [17, 3])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("scheme", ["gathered", "exchanged"])
def test_exchanges_are_exact_and_count_the_same_bytes(scheme: str, size: int, num_rows: int) -> None:
    found = run_exchange(size, num_rows, scheme, parts=4, team=on_fake_nccl)
    assert found == run_exchange(size, num_rows, scheme, parts=4)


@pytest.mark.parametrize("num_units", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_units_pass_though_a_message_waits_for_its_receiver(size: int, num_units: int) -> None:
    def run(ranks, control):
        with control.request():
            return [
                None if frames is None else frames.clone()
                for frames in UnitRelay(ranks, control, Numbers(num_units)).frames()
            ]

    (marker, *frames), *others = on_fake_nccl(size, run, seed=num_units)
    assert marker is None
    assert all(torch.equal(a, b) for a, b in zip(frames, alone(num_units), strict=True))
    assert others == [[]] * (size - 1)


def test_what_a_collective_reads_and_writes_is_kept_until_it_is_waited_for() -> None:
    """The fake reads later than it is called; memory that was given back and taken again would hold something else."""

    def run(ranks, control):
        works, outs = [], []
        for number in range(20):
            part = torch.full((4096,), float(10 * number + ranks.rank))
            out = torch.empty(ranks.size, 4096)
            works.append(ranks.all_gather(out, part))
            outs.append(out)
            del part
            torch.full((4096,), -1.0)
        for number, (work, out) in enumerate(zip(works, outs, strict=True)):
            work.wait()
            assert torch.equal(out[:, 0], torch.tensor([10.0 * number + rank for rank in range(ranks.size)]))

    on_fake_nccl(2, run)


def test_a_transport_is_used_once_with_small_and_large_parts_and_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "first_uses", lambda size: ((1000, 20, 3000), 700))

    def run(ranks, control):
        connect.use_once(ranks, None)
        return ranks.calls, ranks.received_bytes

    assert on_threads(3, run) == [(4, 0)] * 3


def test_what_does_not_lie_in_one_piece_is_refused() -> None:
    def run(ranks, control):
        square = torch.zeros(4, 4)
        with pytest.raises(AssertionError, match="as it lies"):
            ranks.all_gather(torch.empty(ranks.size, 4, 4), square.t())
        with pytest.raises(AssertionError, match="one after the other"):
            ranks.all_gather(torch.empty(4, 4, ranks.size).permute(2, 0, 1), square)
        return gather_parts(ranks, square + ranks.rank).sum()

    assert on_fake_nccl(2, run) == [torch.tensor(16.0)] * 2


def test_a_known_failure_is_raised_instead_of_results() -> None:
    def run(ranks, control):
        tensor = torch.zeros(2)
        work = ranks.broadcast(tensor, 0)
        cause = ranks._guard.report("out of paint")
        with pytest.raises(InternalError, match="out of paint") as raised:
            work.wait()
        return raised.value is cause

    assert on_fake_nccl(2, run) == [True, True]


def test_a_call_that_fails_becomes_the_ranks_failure() -> None:
    streams = FakeStreams()
    library = FakeNccl(streams, refuse="ncclAllGather")
    communicator = Communicator(Nccl(library), streams, 1, 0, Nccl(library).new_id())
    ranks = NcclRanks(communicator, FakeOrder(streams, communicator.stream), quiet_guard(0, 1))
    with pytest.raises(InternalError, match=r"rank 0 of 1 failed: all-gather: .*unhandled system error"):
        gather_parts(ranks, torch.zeros(3))


def test_calling_off_ends_a_collective_that_waits_for_a_dead_rank() -> None:
    """Rank 1 is gone: rank 0 hangs in the device, its guard calls off, and rank 0 sees the cause, not garbage."""
    streams = FakeStreams()
    library = FakeNccl(streams)
    unique_id = Nccl(library).new_id()
    store = MemoryStore()

    def run(ranks, control):
        communicator = Communicator(Nccl(library), streams, 2, ranks.rank, unique_id)
        if ranks.rank == 1:
            return None
        guard = quiet_guard(0, 2, store)
        own = NcclRanks(communicator, FakeOrder(streams, communicator.stream), guard)
        work = own.broadcast(torch.zeros(2), 1)

        def call_off() -> None:
            time.sleep(0.1)
            guard.report("rank 1 died")
            communicator.abort()

        caller = threading.Thread(target=call_off)
        caller.start()
        streams.stream_synchronize(communicator.stream)
        with pytest.raises(InternalError, match="rank 1 died"):
            work.wait()
        with pytest.raises(InternalError, match="rank 0 of 2 failed"):
            own.send(torch.zeros(1), 1)
        caller.join()
        communicator.abort()
        communicator.close()
        return len(library.aborted), len(library.destroyed)

    assert on_threads(2, run) == [(1, 0), None]
    assert ["called off" in str(error) for error in streams.errors] == [True]
