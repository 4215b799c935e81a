"""The hub alone, driven by hand: what reaches it in one round, in an order that threads seldom make."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator

import pytest

from loader import reader as wire
from loader.host_hub import Hub
from loader.host_link import BYE, HostLink, join_host, socket_address

SLOT = 4096


class Bench:
    """A hub of two members that both need every chunk, and the ends of its pipes to a reader of three slots."""

    def __init__(self) -> None:
        self.address = socket_address(uuid.uuid4().hex, 0)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(2)
        self.leader, theirs = socket.socketpair()
        self.full, self.free, self.ctl = os.pipe(), os.pipe(), os.pipe()
        self.memory = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("pool", "rows", "plan")]
        pool, rows, plan = self.memory
        self.hub = Hub(
            takers=[3] * 8, size=2, ring=(3 * SLOT, SLOT), keep=4, crash_place=0, listener=listener, leader=theirs,
            reader=(self.full[0], self.free[1], self.ctl[1]), shared=(pool, rows, plan),
        )  # fmt: skip
        self.theirs = theirs
        self.links = [self.join(member) for member in range(2)]

    def join(self, member: int) -> HostLink:
        found: list[HostLink] = []
        joining = threading.Thread(target=lambda: found.append(join_host(self.address, member, 10.0)))
        joining.start()
        assert self.hub._admit() == member
        joining.join()
        found[0].give_slots(range(3))  # the first ones are the reader's already
        return found[0]

    def fill(self, chunk: int, slot: int) -> None:
        os.write(self.full[1], wire.RECORD.pack(wire.FULL, chunk, slot, 0, SLOT, 0, 0, 0, 0, 0))
        self.hub._pass_on()

    def slots_at_reader(self) -> list[int]:
        os.set_blocking(self.free[0], False)
        try:
            return [slot for (slot,) in wire.SLOT.iter_unpack(os.read(self.free[0], 4096))]
        except BlockingIOError:
            return []

    def close(self) -> None:
        for link in self.links:
            link.close()
        for member in self.hub._members.values():
            member.close()
        for fd in (*self.full, *self.free, *self.ctl, *self.memory):
            os.close(fd)
        self.leader.close()
        self.theirs.close()
        self.hub._selector.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_slots_that_come_back_behind_a_farewell_hold_nobody_up(bench: Bench) -> None:
    """A rank that is closed says BYE while its uploader still gives slots back: both are heard in one round."""
    leaving, staying = bench.links
    for chunk in range(3):
        bench.fill(chunk, slot=chunk)
    leaving.send(BYE)
    leaving.give_slots([0, 1])
    staying.give_slots([2])
    staying.send(BYE)
    bench.hub.run()
    assert sorted(bench.slots_at_reader()) == [0, 1, 2]


def test_an_end_is_told_when_all_have_joined(bench: Bench) -> None:
    bench.fill(0, slot=0)
    os.close(bench.full[1])
    bench.full = (bench.full[0], os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    bench.leader.send(b"killed by signal 9")
    bench.hub.run()
    for link in bench.links:
        kinds = [record[0] for record in wire.RECORD.iter_unpack(link.read_records())]
        assert kinds == [wire.FULL, wire.CRASH]
        assert link.crash_text() == "the host's reader ended: killed by signal 9"
