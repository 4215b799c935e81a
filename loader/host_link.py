"""A rank's end of a reader that its host's ranks share: the same face as `loader.reader_link`, over a UNIX socket.

From the leader: a greeting with the descriptors of ring and rows, then the reader's records, then the end. To it: the
messages of the reader's `ctl`, and slots that were copied. A rank says BYE before it leaves; a socket that ends without
it is a rank that died.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence

from loader import reader as wire
from loader.errors import InternalError

GREETING = struct.Struct("<8sIQQ")  # magic, member, ring bytes, slot bytes
MAGIC = b"cfhost1\0"
JOIN = struct.Struct("<8sI")  # magic, member
SLOTS, BYE = 100, 101  # message kinds beside those of the reader
ENDED = 100  # record kind: why the leader stops; `bytes` of text follow, filled up to whole records
ROWS_OF_MEMBER = 1 << 40  # each member's part of the rows memory
REQUESTS_OF_MEMBER = 1 << 24
_CONNECT_STEP_S = 0.005


def socket_address(run: str, first_rank: int) -> str:
    """Abstract name of a host's leader: no file is left, and two runs do not meet."""
    return f"\0coldframe-{os.getuid()}-{run}-{first_rank}"


class HostLink:
    """See `loader.reader_link.ReaderLink`. The leader has begun reading; slots come back to it."""

    kind = "shared"

    def __init__(
        self, connection: socket.socket, member: int, fds: tuple[int, int], ring: tuple[int, int]
    ) -> None:
        self.ring_bytes, self.slot_bytes = ring
        self._socket = connection
        self._member = member
        self._pool, self._rows = fds
        self._lock = threading.Lock()
        self._rest = b""
        self._ended = ""
        self._has_begun = False
        self._is_stopped = False
        self._is_closed = False

    @property
    def records_fd(self) -> int:
        return self._socket.fileno()

    def begin(self, plan: bytes, pool_bytes: int, cpus: Sequence[int] = ()) -> None:
        """Nothing: the leader's plan is being read. The slots that are given first are the reader's already."""
        if pool_bytes != self.ring_bytes:
            raise InternalError(
                "ranks of a host disagree on the ring",
                where="loader",
                found=pool_bytes,
                expected=self.ring_bytes,
            )
        self._has_begun = False

    def map_pool(self, offset: int, length: int) -> mmap.mmap | memoryview:
        return mmap.mmap(self._pool, length, offset=offset)

    def drop_pool(self) -> None:
        with self._lock:
            if self._pool >= 0:
                os.close(self._pool)
            self._pool = -1

    def read_records(self) -> bytes:
        data = self._rest
        while not (whole := len(data) // wire.RECORD.size * wire.RECORD.size):
            part = self._receive()
            if not part:
                return b""
            data += part
        self._rest = data[whole:]
        return self._without_end(data[:whole])

    def give_slots(self, slots: Iterable[int]) -> None:
        if not self._has_begun:
            self._has_begun = True
            return
        self.send(SLOTS, b"".join(map(wire.SLOT.pack, slots)))

    def send(self, kind: int, payload: bytes = b"") -> None:
        if kind == wire.GATHER:
            payload = _as_member(payload, self._member)
        with self._lock:
            if self._is_stopped:
                return
            try:
                self._socket.sendall(wire.MESSAGE.pack(len(payload), kind) + payload)
            except OSError:
                return  # the leader is gone, which shows in `read_records`

    def take_rows(self, place: int, count: int) -> bytes:
        return os.pread(self._rows, count, place + self._member * ROWS_OF_MEMBER)

    def crash_text(self) -> str:
        return self._ended

    def stop(self, grace_s: float = 0.0, drain: bool = False) -> str:
        self.send(BYE)
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                with contextlib.suppress(OSError):  # the other end was quicker
                    self._socket.shutdown(socket.SHUT_RDWR)
        return self._ended or "stopped, or the rank that owns the reader ended"

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.drop_pool()
        os.close(self._rows)
        self._socket.close()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(wire.RECORD.size * 1024)
        except OSError:
            return b""

    def _without_end(self, data: bytes) -> bytes:
        """Records up to the leader's last word, which becomes a CRASH record with that text."""
        for at in range(0, len(data), wire.RECORD.size):
            record = wire.RECORD.unpack_from(data, at)
            if record[0] != ENDED:
                continue
            text = data[at + wire.RECORD.size :] + self._rest
            while len(text) < record[4] and (part := self._receive()):
                text += part
            self._rest = b""
            self._ended = text[: record[4]].decode("utf-8", "replace")
            return data[:at] + wire.RECORD.pack(wire.CRASH, 0, wire.NO_SLOT, 0, 0, 0, 0, 0, 0, 0)
        return data


def join_host(address: str, member: int, timeout_s: float) -> HostLink:
    """Connect to the host's leader, which may start later than this rank.

    Raises: InternalError: it did not come in time, or is not one of this program.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            break
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise InternalError(
                    f"the host's first rank did not open its reader ({error.strerror})",
                    where="loader",
                    expected=f"within {timeout_s:g} s",
                ) from error
            time.sleep(_CONNECT_STEP_S)
    connection.sendall(JOIN.pack(MAGIC, member))
    data, fds, _, _ = socket.recv_fds(connection, GREETING.size, 2)
    if len(data) != GREETING.size or len(fds) != 2 or data[:8] != MAGIC:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise InternalError(
            "the host's first rank refused this rank", where="loader", found=f"member {member}"
        )
    _, _, ring_bytes, slot_bytes = GREETING.unpack(data)
    return HostLink(connection, member, (fds[0], fds[1]), (ring_bytes, slot_bytes))


def _as_member(payload: bytes, member: int) -> bytes:
    """A row request under a number and at a place that no other member uses."""
    number, file, base, row_bytes, place, rows, edges = wire.ROWS.unpack_from(payload)
    head = wire.ROWS.pack(
        number % REQUESTS_OF_MEMBER + member * REQUESTS_OF_MEMBER, file, base, row_bytes,
        place + member * ROWS_OF_MEMBER, rows, edges,
    )  # fmt: skip
    return head + payload[wire.ROWS.size :]
