"""A rank's end of a reader that its host's ranks share: the same face as `loader.reader_link`.

Over a UNIX socket, from the host's hub: a greeting with the descriptors of ring and rows and of two pipes, for records
and for slots; at the end perhaps ENDED and why. To it: the messages of the reader's `ctl`. A rank says BYE before it
leaves; a socket that ends without it is a rank that died.
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
BYE, ENDED = 101, 102  # message kinds beside those of the reader
ROWS_OF_MEMBER = 1 << 40  # each member's part of the rows memory
REQUESTS_OF_MEMBER = 1 << 24
_CONNECT_STEP_S = 0.005
JOIN_S = 60.0  # for a rank to find the hub, and for the hub to be joined


def socket_address(run: str, first_rank: int) -> str:
    """Abstract name of a host's hub: no file is left, and two runs do not meet."""
    return f"\0coldframe-{os.getuid()}-{run}-{first_rank}"


class HostLink:
    """See `loader.reader_link.ReaderLink`. The reader is at work already; slots come back to the hub.

    Args:
        fds: of ring, rows, records (to read) and slots (to write).
    """

    kind = "shared"
    can_share = True
    recycles = False  # the hub does, once every rank has given it back

    def __init__(
        self, connection: socket.socket, member: int, fds: tuple[int, int, int, int], ring: tuple[int, int]
    ) -> None:
        self.ring_bytes, self.slot_bytes = ring
        self._socket = connection
        self._member = member
        self._pool, self._rows, self._records, self._slots = fds
        self._lock = threading.Lock()
        self._ended = ""
        self._has_begun = False
        self._is_stopped = False
        self._is_closed = False

    @property
    def records_fd(self) -> int:
        return self._records

    def begin(self, plan: bytes, pool_bytes: int, cpus: Sequence[int] = ()) -> None:
        """Nothing: the host's plan is being read. The slots that are given first are the reader's already."""
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

    def shared_fds(self) -> tuple[int, ...]:
        """(ring, records to read, slots to write) for an uploader in another process; still owned here."""
        return self._pool, self._records, self._slots

    def read_records(self) -> bytes:
        return os.read(self._records, wire.RECORD.size * 1024)

    def give_slots(self, slots: Iterable[int]) -> None:
        if not self._has_begun:
            self._has_begun = True
            return
        with contextlib.suppress(OSError):  # a hub that is gone shows in `read_records`
            os.write(self._slots, b"".join(map(wire.SLOT.pack, slots)))

    def send(self, kind: int, payload: bytes = b"") -> None:
        if kind == wire.GATHER:
            payload = _as_member(payload, self._member)
        with self._lock:
            if self._is_stopped:
                return
            try:
                self._socket.sendall(wire.MESSAGE.pack(len(payload), kind) + payload)
            except OSError:
                return  # the hub is gone, which shows in `read_records`

    def take_rows(self, place: int, count: int) -> bytes:
        return os.pread(self._rows, count, place + self._member * ROWS_OF_MEMBER)

    def crash_text(self) -> str:
        """Why the hub ended the load, which it said before the record that led here."""
        if not self._ended:
            rest = b""
            messages: list[tuple[int, bytes]] | None = []
            while messages is not None and not messages:
                messages, rest = receive_messages(self._socket, rest)
            self._ended = b"".join(text for _, text in messages or ()).decode("utf-8", "replace")
        return self._ended

    def stop(self, grace_s: float = 0.0, drain: bool = False) -> str:
        self.send(BYE)
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                with contextlib.suppress(OSError):  # the other end was quicker
                    self._socket.shutdown(socket.SHUT_RDWR)
        return self._ended or "stopped, or the process between the reader and its ranks ended"

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.drop_pool()
        for fd in (self._rows, self._records, self._slots):
            os.close(fd)
        self._socket.close()


def receive_messages(connection: socket.socket, rest: bytes) -> tuple[list[tuple[int, bytes]] | None, bytes]:
    """Whole messages (kind, payload), and the start of the next; None instead of messages: the other end is gone."""
    try:
        part = connection.recv(1 << 16)
    except OSError:
        part = b""
    if not part:
        return None, rest
    data, messages = rest + part, []
    while len(data) >= wire.MESSAGE.size:
        length, kind = wire.MESSAGE.unpack_from(data)
        end = wire.MESSAGE.size + length
        if len(data) < end:
            break
        messages.append((kind, data[wire.MESSAGE.size : end]))
        data = data[end:]
    return messages, data


def join_host(address: str, member: int, timeout_s: float) -> HostLink:
    """Connect to the host's hub, which may start later than this rank.

    Args:
        timeout_s: for the hub to come, and again for its answer.
    Raises: InternalError: it did not come or answer in time, or is not one of this program.
    """
    connection = _connect(address, timeout_s)
    try:
        connection.sendall(JOIN.pack(MAGIC, member))
        data, fds, _, _ = socket.recv_fds(connection, GREETING.size, 4, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        connection.close()
        raise InternalError(
            f"the host's first rank did not answer ({error})",
            where="loader",
            found=f"member {member}",
            expected=f"within {timeout_s:g} s",
        ) from error
    if len(data) != GREETING.size or len(fds) != 4 or data[:8] != MAGIC:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise InternalError(
            "the host's first rank refused this rank", where="loader", found=f"member {member}"
        )
    connection.settimeout(None)
    _, _, ring_bytes, slot_bytes = GREETING.unpack(data)
    pool, rows, records, slots = fds
    return HostLink(connection, member, (pool, rows, records, slots), (ring_bytes, slot_bytes))


def _connect(address: str, timeout_s: float) -> socket.socket:
    """A connection whose calls take `timeout_s` at most. Raises: InternalError: nobody listens in that time."""
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise InternalError(
                    f"the host's first rank did not open its reader ({error.strerror})",
                    where="loader",
                    expected=f"within {timeout_s:g} s",
                ) from error
            time.sleep(_CONNECT_STEP_S)


def _as_member(payload: bytes, member: int) -> bytes:
    """A row request under a number and at a place that no other member uses."""
    number, file, base, row_bytes, place, rows, edges = wire.ROWS.unpack_from(payload)
    head = wire.ROWS.pack(
        number % REQUESTS_OF_MEMBER + member * REQUESTS_OF_MEMBER, file, base, row_bytes,
        place + member * ROWS_OF_MEMBER, rows, edges,
    )  # fmt: skip
    return head + payload[wire.ROWS.size :]
