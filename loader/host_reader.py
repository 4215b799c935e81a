"""The leader's end: one reader and one ring for all ranks of a host, whoever copies from it.

A thread passes records on to the ranks that need the chunk and returns a slot when all of them have copied it. Shared
bytes are thus read once and cross every GPU's own link; ranks exchange nothing. A rank that dies ends the load of all.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from loader import budget
from loader import reader as wire
from loader.host_link import (
    BYE,
    ENDED,
    GREETING,
    JOIN,
    MAGIC,
    REQUESTS_OF_MEMBER,
    SLOTS,
    HostLink,
    join_host,
)
from loader.host_plan import HostPlan
from loader.options import StreamOptions
from loader.plan_wire import VERIFY_LEVELS, ReadSettings, encode_plan
from loader.reader_link import ChildReader, spawn_reader

_JOIN_S = 60.0


class HostReader:
    """Starts reading at once; ranks join later, as many as the plan has members.

    Args:
        reader: one that was spawned before the plan was known. address: see `socket_address`.
    Raises: OSError: no child process, shared memory or socket here; then every rank reads for itself.
    """

    def __init__(
        self,
        shared: HostPlan,
        directory: Path,
        options: StreamOptions,
        address: str,
        reader: ChildReader | None = None,
    ) -> None:
        self.address = address
        self.read_bytes = 0  # so far, of chunks; each counted once, whoever takes it
        self._takers = shared.takers
        self._size = self._expected = len(shared.members)
        self._members: dict[int, _Member] = {}
        self._left: set[int] = set()
        self._early: list[tuple[int, bytes]] = []  # (member, record) for members that have not joined
        self._waiting: dict[int, int] = {}  # slot -> members that have not copied it
        self._ended = ""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(address)
            self._listener.listen(self._expected)
            self._reader = reader or spawn_reader()
        except OSError:
            self._listener.close()
            raise
        self._begin(shared, directory, options)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._reader.records_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="coldframe-host-reader", daemon=True)
        self._thread.start()

    def join(self, member: int) -> HostLink:
        """The leader's own link, like any other rank's."""
        return join_host(self.address, member, _JOIN_S)

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Until all members have left and the reader has ended; whether that is so."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _begin(self, shared: HostPlan, directory: Path, options: StreamOptions) -> None:
        """As a device's load does for one rank; slots are as many as the smallest member can fill."""
        cpus = budget.cpu_count()
        threads = options.threads or budget.reader_threads(cpus.value).value
        smallest = min(
            sum([chunk.bytes for chunk in plan.chunks if chunk.pieces or chunk.coded])
            for plan in shared.members
        )
        choice = budget.choose_ring(
            threads,
            shared.plan.chunk_bytes,
            smallest,
            budget.memory_headroom().value,
            options.ring_bytes,
            shared.plan.chunk_bytes,
        )
        settings = ReadSettings(
            mode=wire.RING,
            threads=threads,
            verify=VERIFY_LEVELS[options.verify],
            slot_bytes=choice.slot_bytes,
            pool_bytes=choice.bytes,
            cpus=cpus.value,
            rate=(options.storage_gbps or 0.0) * 1e9,
            fault=options.storage_fault,
        )
        self._ring = (choice.bytes, choice.slot_bytes)
        self._reader.begin(encode_plan(shared.plan, directory, settings).data, choice.bytes)
        self._reader.give_slots(range(choice.slots))

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._ended and not (self._expected == 0 and not self._members):
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._admit()
                    elif key.fd == self._reader.records_fd:
                        self._pass_on(self._reader.read_records())
                    else:
                        self._hear(key.data)
        except Exception as error:  # noqa: BLE001 - border of a thread: reported to all members
            self._ended = self._ended or f"the host's reader failed: {error!r}"
        finally:
            self._close()

    def _admit(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_JOIN_S)
        data = connection.recv(JOIN.size, socket.MSG_WAITALL)
        member = JOIN.unpack(data)[1] if len(data) == JOIN.size and data[:8] == MAGIC else -1
        is_ours = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[
            4:8
        ] == os.getuid().to_bytes(4, "little")
        is_wanted = 0 <= member < self._size and member not in self._members and member not in self._left
        if not (is_ours and is_wanted):
            connection.close()
            return
        greeting = GREETING.pack(MAGIC, member, *self._ring)
        socket.send_fds(connection, [greeting], list(self._reader.memory_fds()))
        connection.settimeout(None)
        self._expected -= 1
        if not self._expected:
            self._selector.unregister(self._listener)
            self._listener.close()
        joined = self._members[member] = _Member(member, connection)
        self._selector.register(connection, selectors.EVENT_READ, joined)
        early, self._early = self._early, []
        for target, record in early:
            self._deliver(target, record)

    def _pass_on(self, data: bytes) -> None:
        if not data:
            self._ended = f"the host's reader ended: {self._reader.stop(grace_s=1.0)}"
            return
        for at in range(0, len(data), wire.RECORD.size):
            record = data[at : at + wire.RECORD.size]
            kind, number, slot = wire.RECORD.unpack(record)[:3]
            if kind == wire.FULL:
                takers = self._takers[number]
                self._waiting[slot] = len(takers)
                self.read_bytes += wire.RECORD.unpack(record)[4]
                for member in takers:
                    self._deliver(member, record)
            elif kind == wire.GATHERED:
                fields = list(wire.RECORD.unpack(record))
                member, fields[1] = divmod(number, REQUESTS_OF_MEMBER)
                self._deliver(member, wire.RECORD.pack(*fields))
            elif kind == wire.CRASH:
                self._ended = f"the host's reader failed: {self._reader.crash_text()}"
            else:
                for member in range(self._size):
                    self._deliver(member, record)

    def _deliver(self, member: int, record: bytes) -> None:
        if member in self._members:
            self._members[member].send(record)
        elif member not in self._left:
            self._early.append((member, record))
        elif wire.RECORD.unpack(record)[0] == wire.FULL:
            self._copied([wire.RECORD.unpack(record)[2]])  # the slot must not wait for a member that left

    def _hear(self, member: _Member) -> None:
        messages = member.receive()
        if messages is None:
            self._ended = f"rank {member.number} of this host ended while its weights were loading"
            return
        for kind, payload in messages:
            if kind == SLOTS:
                self._copied([slot for (slot,) in wire.SLOT.iter_unpack(payload)])
            elif kind == BYE:
                self._leave(member)
                return
            elif kind == wire.GATHER:
                self._reader.send(kind, payload)

    def _copied(self, slots: Sequence[int]) -> None:
        free = []
        for slot in slots:
            self._waiting[slot] -= 1
            if not self._waiting[slot]:
                free.append(slot)
        if free:
            self._reader.give_slots(free)

    def _leave(self, member: _Member) -> None:
        self._selector.unregister(member.connection)
        member.connection.close()
        del self._members[member.number]
        self._left.add(member.number)
        if member.owes:
            self._copied(member.owes)

    def _close(self) -> None:
        for member in self._members.values():
            if self._ended:
                member.say_ended(self._ended)
            member.connection.close()
        self._selector.close()
        self._listener.close()
        self._reader.stop()
        self._reader.close()


class _Member:
    """A rank that joined. owes: slots that it was handed and has not given back."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.owes: list[int] = []
        self._rest = b""

    def send(self, record: bytes) -> None:
        kind, _, slot = wire.RECORD.unpack(record)[:3]
        if kind == wire.FULL:
            self.owes.append(slot)
        with contextlib.suppress(OSError):  # its end is noticed where it is heard
            self.connection.sendall(record)

    def say_ended(self, text: str) -> None:
        data = text.encode()
        filled = data + b"\0" * (-len(data) % wire.RECORD.size)
        record = wire.RECORD.pack(ENDED, 0, wire.NO_SLOT, 0, len(data), 0, 0, 0, 0, 0)
        with contextlib.suppress(OSError):
            self.connection.sendall(record + filled)

    def receive(self) -> list[tuple[int, bytes]] | None:
        """Whole messages; None: the rank is gone."""
        try:
            part = self.connection.recv(1 << 16)
        except OSError:
            part = b""
        if not part:
            return None
        data, messages = self._rest + part, []
        while len(data) >= wire.MESSAGE.size:
            length, kind = wire.MESSAGE.unpack_from(data)
            end = wire.MESSAGE.size + length
            if len(data) < end:
                break
            messages.append((kind, data[wire.MESSAGE.size : end]))
            data = data[end:]
        self._rest = data
        for kind, payload in messages:
            if kind == SLOTS:
                for (slot,) in wire.SLOT.iter_unpack(payload):
                    self.owes.remove(slot)
        return messages
