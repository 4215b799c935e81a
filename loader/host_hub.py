"""Between one reader and the ranks of its host, in a process of its own: an import in any rank cannot hold it up.

Passes the reader's records on to the ranks that need the chunk, and returns a slot to the reader when all of them have
copied it. Every rank has two pipes here, for records and for slots, which its uploader process may hold instead of
itself, and a socket for everything else. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from loader import reader as wire
from loader.host_link import (
    BYE,
    ENDED,
    GREETING,
    JOIN,
    JOIN_S,
    MAGIC,
    REQUESTS_OF_MEMBER,
    receive_messages,
)
from loader.slots import SlotStack

_PEER = 12  # bytes of struct ucred
_ENDING_S = 5.0  # for the leader to find out how the reader ended


class Member:
    """A rank that joined. owes: slots that it was handed and has not given back."""

    def __init__(self, number: int, connection: socket.socket, records: int, slots: int) -> None:
        self.number, self.connection = number, connection
        self.records, self.slots = records, slots
        self.owes: list[int] = []
        self.rest = b""

    def send(self, record: bytes) -> None:
        with contextlib.suppress(OSError):  # its end is noticed where it is heard
            os.write(self.records, record)  # atomic, and a pipe holds more records than a ring has slots

    def close(self) -> None:
        self.connection.close()
        os.close(self.records)
        os.close(self.slots)


class Hub:
    """One load of all ranks of a host.

    Args:
        takers: chunk → bits of the members that need it. ring: its bytes and its slots' bytes; the reader has all slots.
        keep: free slots that it should have at most, once the first ones have come back.
        listener: where ranks join, as many as `size`. leader: told when all is over; knows how the reader ended.
        reader: descriptors `full` (to read), `free` and `ctl` (to write). shared: ring, rows, and the plan's memory, at
            whose `crash_place` the reader leaves its last words.
    """

    def __init__(
        self,
        takers: Sequence[int],
        size: int,
        ring: tuple[int, int],
        keep: int,
        crash_place: int,
        listener: socket.socket,
        leader: socket.socket,
        reader: tuple[int, int, int],
        shared: tuple[int, int, int],
    ) -> None:
        self._takers = [[m for m in range(size) if bits >> m & 1] for bits in takers]
        self._size = self._expected = size
        self._ring = ring
        self._crash_place = crash_place
        self._listener = listener
        self._leader = leader
        self._full, self._free, self._ctl = reader
        self._pool, self._rows, self._plan = shared
        self._guests: set[socket.socket] = set()  # connected, and have not said who they are
        self._members: dict[int, Member] = {}
        self._left: set[int] = set()
        self._early: list[tuple[int, bytes]] = []  # (member, record) for members that have not joined
        self._slots = SlotStack(ring[0] // ring[1], keep)
        self._waiting: dict[int, int] = {}  # slot → members that have not copied it
        self._ended = ""
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for source, handler in (
            (listener, self._accept),
            (leader, self._hear_leader),
            (self._full, self._pass_on),
        ):
            self._selector.register(source, selectors.EVENT_READ, handler)

    def run(self) -> None:
        """Until all members have left, or one of them or the reader has ended without a word."""
        while not self._is_over():
            self._listen()
        self._tell_why()

    def _listen(self, timeout_s: float | None = None) -> None:
        """One round of whoever has something to say, until all is over; `timeout_s` None = until there is someone."""
        was_over = self._is_over()
        for key, _ in self._selector.select(timeout_s):
            if self._is_over() == was_over:
                key.data()

    def _is_over(self) -> bool:
        return bool(self._ended) or (self._expected == 0 and not self._members)

    def _tell_why(self) -> None:
        """To those who are here, and to those who come later: they would wait for a hub that is gone."""
        for member in self._members.values():
            self._say_ended(member)
        self._hear_joining_only()
        deadline = time.monotonic() + JOIN_S
        while self._ended and self._expected and (left_s := deadline - time.monotonic()) > 0:
            self._listen(left_s)

    def _hear_joining_only(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._listener and key.fileobj not in self._guests:
                self._selector.unregister(key.fileobj)

    def _accept(self) -> None:
        """Strangers can connect as well: nobody is waited for, and other users are sent away unheard."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it went away again
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER)
        if peer[4:8] != os.getuid().to_bytes(4, "little"):
            connection.close()
            return
        connection.setblocking(False)
        self._guests.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear_guest(connection))

    def _hear_guest(self, connection: socket.socket) -> None:
        """A guest becomes a member by saying which, in one piece; or goes."""
        if connection not in self._guests:
            return  # the last member was heard in the same round
        self._selector.unregister(connection)
        self._guests.remove(connection)
        try:
            data = connection.recv(JOIN.size)
        except OSError:
            data = b""
        number = JOIN.unpack(data)[1] if len(data) == JOIN.size and data[:8] == MAGIC else -1
        is_wanted = 0 <= number < self._size and number not in self._members and number not in self._left
        member = self._welcome(connection, number) if is_wanted else None
        if member is None:
            connection.close()
        else:
            self._admit(member)

    def _welcome(self, connection: socket.socket, number: int) -> Member | None:
        """Hand a rank its ends of everything; None: it is gone already."""
        records, slots = os.pipe(), os.pipe()
        greeting = GREETING.pack(MAGIC, number, *self._ring)
        try:
            socket.send_fds(connection, [greeting], [self._pool, self._rows, records[0], slots[1]])
        except OSError:
            os.close(records[1])
            os.close(slots[0])
            return None
        finally:
            os.close(records[0])
            os.close(slots[1])
        connection.setblocking(True)
        return Member(number, connection, records[1], slots[0])

    def _admit(self, member: Member) -> None:
        self._members[member.number] = member
        self._expected -= 1
        if not self._expected:
            self._refuse_others()
        if self._ended:
            self._say_ended(member)
            return
        self._selector.register(member.connection, selectors.EVENT_READ, lambda: self._hear(member))
        self._selector.register(member.slots, selectors.EVENT_READ, lambda: self._take_back(member))
        early, self._early = self._early, []
        for target, record in early:
            self._deliver(target, record)

    def _refuse_others(self) -> None:
        """All are here."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for guest in self._guests:
            self._selector.unregister(guest)
            guest.close()
        self._guests.clear()

    def _pass_on(self) -> None:
        data = os.read(self._full, wire.RECORD.size * 1024)
        if not data:
            self._ended = f"the host's reader ended: {self._ask_leader()}"
            return
        for at in range(0, len(data), wire.RECORD.size):
            record = data[at : at + wire.RECORD.size]
            kind, number, slot = wire.RECORD.unpack(record)[:3]
            if kind == wire.FULL:
                takers = self._takers[number]
                self._waiting[slot] = len(takers)
                self._slots.filled(1)
                for member in takers:
                    self._deliver(member, record)
            elif kind == wire.GATHERED:
                fields = list(wire.RECORD.unpack(record))
                member, fields[1] = divmod(number, REQUESTS_OF_MEMBER)
                self._deliver(member, wire.RECORD.pack(*fields))
            elif kind == wire.CRASH:
                text = os.pread(self._plan, wire.ERROR_BYTES, self._crash_place).partition(b"\0")[0]
                self._ended = f"the host's reader failed: {text.decode('utf-8', 'replace')}"
            else:
                if kind == wire.GREW:
                    self._slots.reader_grew(wire.RECORD.unpack(record)[4], self._ring[1])
                for member in range(self._size):
                    self._deliver(member, record)
        self._give_slots()

    def _deliver(self, number: int, record: bytes) -> None:
        kind, _, slot = wire.RECORD.unpack(record)[:3]
        if number in self._members:
            if kind == wire.FULL:
                self._members[number].owes.append(slot)
            self._members[number].send(record)
        elif number not in self._left:
            self._early.append((number, record))
        elif kind == wire.FULL:
            self._copied([slot])  # it must not wait for a member that left

    def _take_back(self, member: Member) -> None:
        if member.number in self._left:
            return  # its farewell was heard in the same round, and what it owed is back
        data = os.read(member.slots, wire.SLOT.size * 1024)
        if not data:
            self._selector.unregister(member.slots)  # the rest is heard on its socket
            return
        slots = [slot for (slot,) in wire.SLOT.iter_unpack(data)]
        for slot in slots:
            member.owes.remove(slot)
        self._copied(slots)

    def _copied(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._waiting[slot] -= 1
            if not self._waiting[slot]:
                self._slots.put([slot])
        self._give_slots()

    def _give_slots(self) -> None:
        free = self._slots.take()
        if free:
            with contextlib.suppress(OSError):  # a reader that is gone shows in `full`
                os.write(self._free, b"".join(map(wire.SLOT.pack, free)))

    def _hear(self, member: Member) -> None:
        messages, member.rest = receive_messages(member.connection, member.rest)
        if messages is None:
            self._ended = f"rank {member.number} of this host ended while its weights were loading"
            return
        for kind, payload in messages:
            if kind == BYE:
                self._leave(member)
                return
            if kind == wire.GATHER:
                with contextlib.suppress(OSError):
                    os.write(self._ctl, wire.MESSAGE.pack(len(payload), kind) + payload)

    def _leave(self, member: Member) -> None:
        self._selector.unregister(member.connection)
        if member.slots in self._selector.get_map():
            self._selector.unregister(member.slots)
        member.close()
        del self._members[member.number]
        self._left.add(member.number)
        self._copied(member.owes)

    def _hear_leader(self) -> None:
        self._ended = "the rank that owns the reader ended"

    def _ask_leader(self) -> str:
        """How the reader ended; only its parent can know."""
        with contextlib.suppress(OSError):
            self._leader.settimeout(_ENDING_S)
            self._leader.send(b"?")
            return self._leader.recv(4096).decode("utf-8", "replace") or "its rank ended"
        return "for a reason that is not known"

    def _say_ended(self, member: Member) -> None:
        """The text on the socket, then the record that sends the rank there."""
        text = self._ended.encode()
        with contextlib.suppress(OSError):
            member.connection.sendall(wire.MESSAGE.pack(len(text), ENDED) + text)
        member.send(wire.RECORD.pack(wire.CRASH, 0, wire.NO_SLOT, 0, 0, 0, 0, 0, 0, 0))


def main(arguments: list[str]) -> None:
    """Entry of the process. Arguments: descriptor of the leader's socket, the leader's pid or 0."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the leader's to handle
    fd, parent = map(int, arguments)
    if parent:
        wire._die_with_parent(parent)
    leader = socket.socket(fileno=fd)
    data, fds, _, _ = socket.recv_fds(leader, 1, 8)
    if not data:
        return  # the leader has no work
    work_fd, listener_fd, full, free, ctl, pool, rows, plan = fds
    work: dict[str, Any] = json.loads(os.pread(work_fd, os.fstat(work_fd).st_size, 0))
    Hub(
        listener=socket.socket(fileno=listener_fd),
        leader=leader,
        reader=(full, free, ctl),
        shared=(pool, rows, plan),
        ring=(work["ring_bytes"], work["slot_bytes"]),
        keep=work["keep"],
        takers=work["takers"],
        size=work["size"],
        crash_place=work["crash_place"],
    ).run()
