"""The hub alone, driven by hand: what reaches it in one round, in an order that threads seldom make."""

from __future__ import annotations

import os
import select
import socket
import threading
import uuid
from collections.abc import Iterator

import pytest

from loader import reader as wire
from loader.errors import InternalError
from loader.host_hub import Hub
from loader.host_link import BYE, JOIN, MAGIC, HostLink, join_host, socket_address

SLOT = 4096


class Bench:
    """A hub of two members that both need every chunk, and the ends of its pipes to a reader of three slots."""

    def __init__(self, members: int = 2) -> None:
        self.address = socket_address(uuid.uuid4().hex, 0)
        self.listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
        self.links = [self.join(member) for member in range(members)]

    def guest(self) -> socket.socket:
        """A connection that the hub has accepted."""
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        guest.settimeout(10.0)
        guest.connect(self.address)
        self.hub._listen()
        return guest

    def begin_to_join(self, member: int) -> tuple[threading.Thread, list[HostLink]]:
        found: list[HostLink] = []
        joining = threading.Thread(target=lambda: found.append(join_host(self.address, member, 10.0)))
        joining.start()
        return joining, found

    def join(self, member: int) -> HostLink:
        joining, found = self.begin_to_join(member)
        while member not in self.hub._members:
            self.hub._listen()
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
        for end in (self.leader, self.theirs, self.listener, *self.hub._guests):
            end.close()
        self.hub._selector.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def early() -> Iterator[Bench]:
    """Nobody has joined yet."""
    bench = Bench(members=0)
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


def test_a_guest_that_says_nothing_holds_nobody_up(early: Bench) -> None:
    with early.guest() as silent:
        early.links = [early.join(member) for member in range(2)]
        early.fill(0, slot=0)
        for link in early.links:
            assert [record[0] for record in wire.RECORD.iter_unpack(link.read_records())] == [wire.FULL]
        assert silent.recv(1) == b""  # all are here, so it was sent away


def test_another_user_is_sent_away_unheard(early: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: user + 1)
        stranger = early.guest()
    with stranger:
        assert stranger.recv(1) == b""
    early.links = [early.join(1)]


@pytest.mark.parametrize("words", [b"", b"short", JOIN.pack(MAGIC, 7), JOIN.pack(b"another\0", 0)])
def test_a_guest_without_the_right_words_is_sent_away(early: Bench, words: bytes) -> None:
    with early.guest() as guest:
        guest.sendall(words)
        guest.shutdown(socket.SHUT_WR)
        early.hub._listen()
        assert guest.recv(1) == b""
    assert early.hub._members == {}


def test_a_rank_that_is_gone_before_its_greeting_is_no_member(early: Bench) -> None:
    gone = early.guest()
    gone.sendall(JOIN.pack(MAGIC, 0))
    gone.close()
    early.hub._listen()
    assert early.hub._members == {}
    early.links = [early.join(member) for member in range(2)]


def test_an_end_is_told_to_ranks_that_come_later_and_a_silent_guest_does_not_delay_it(early: Bench) -> None:
    silent = early.guest()
    os.close(early.full[1])
    early.full = (early.full[0], os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    early.leader.send(b"exit code 1")
    joining = [early.begin_to_join(member) for member in range(2)]
    early.hub.run()
    for thread, found in joining:
        thread.join()
        early.links += found
    assert [link.crash_text() for link in early.links] == ["the host's reader ended: exit code 1"] * 2
    silent.close()


@pytest.mark.parametrize("is_closed", [False, True], ids=["silent", "hangs up"])
def test_a_hub_that_does_not_answer_is_given_up(is_closed: bool) -> None:
    address = socket_address(uuid.uuid4().hex, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(1)
        joining = threading.Thread(target=lambda: _hang_up(listener) if is_closed else None)
        joining.start()
        with pytest.raises(InternalError, match=r"did not answer.*within 0.1 s"):
            join_host(address, 0, 0.1)
        joining.join()


def _hang_up(listener: socket.socket) -> None:
    """After its first words came, and without reading them: the other end meets a reset."""
    connection, _ = listener.accept()
    select.select([connection], [], [])
    connection.close()
