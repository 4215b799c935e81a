"""Ranks of a host that meet on a UNIX socket of the first of them, before torch is there. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

from loader.errors import CapabilityError, InternalError
from loader.host_link import socket_address
from runtime.parallel.environment import RankEnvironment

_STEP_S = 0.01
_PEER = struct.Struct("3i")  # pid, uid, gid
_HELLO = b"cfmeet1\0"
_HELLO_S = 5.0  # a rank says it at once


class Limit:
    """How long the ranks wait for each other: `seconds` from now on, or until `cancelled` is set."""

    def __init__(self, seconds: float, cancelled: threading.Event) -> None:
        self._deadline = time.monotonic() + seconds
        self._cancelled = cancelled

    def shorter(self, seconds: float) -> Limit:
        """Of `seconds` from now on, or the same end if that comes before."""
        return Limit(min(seconds, self._deadline - time.monotonic()), self._cancelled)

    def tries(self, failure: str) -> Iterator[None]:
        """Again and again. Raises: CapabilityError: time is over (`failure`), or it was cancelled."""
        while not self._cancelled.is_set() and time.monotonic() < self._deadline:
            yield
        cause = "the start was given up" if self._cancelled.is_set() else f"{failure} in time"
        raise CapabilityError(cause, where="ranks of a host")


@contextlib.contextmanager
def host_meeting(environment: RankEnvironment, purpose: str, limit: Limit) -> Iterator[list[socket.socket]]:
    """On the host's first rank: a connection to each of the others, in no order. Raises: CapabilityError; OSError.

    Args: purpose: ranks meet once for each.
    """
    with contextlib.ExitStack() as opened:
        end = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        end.settimeout(_STEP_S)
        end.bind(_address(environment, purpose))
        end.listen(environment.local_size)
        guests: list[socket.socket] = []
        for _ in limit.tries("a rank did not come"):
            if len(guests) == environment.local_size - 1:
                break
            with contextlib.suppress(TimeoutError):
                guest = opened.enter_context(end.accept()[0])
                if _is_rank(guest, limit.shorter(_HELLO_S)):
                    guests.append(guest)
        yield guests


@contextlib.contextmanager
def visit_meeting(environment: RankEnvironment, purpose: str, limit: Limit) -> Iterator[socket.socket]:
    """On the others: the connection to the host's first rank, which may come later. Raises: CapabilityError; OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        for _ in limit.tries("the first rank did not come"):
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
                end.connect(_address(environment, purpose))
                break
            time.sleep(_STEP_S)
        end.sendall(_HELLO)
        yield end


def _is_rank(guest: socket.socket, limit: Limit) -> bool:
    """Whoever leaves, is silent, says something else or is another user's is none."""
    try:
        _, user, _ = _PEER.unpack(guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return user == os.getuid() and receive(guest, len(_HELLO), limit) == _HELLO
    except (InternalError, CapabilityError, OSError):
        return False


def receive(connection: socket.socket, count: int, limit: Limit) -> bytes:
    """Exactly `count` bytes. Raises: InternalError: the other end is gone before; CapabilityError: see `Limit`."""
    connection.settimeout(_STEP_S)
    data, have = bytearray(count), 0
    view = memoryview(data)
    for _ in limit.tries("a rank said nothing"):
        if have == count:
            break
        with contextlib.suppress(TimeoutError):
            part = connection.recv_into(view[have:])
            if not part:
                raise InternalError("a rank left", where="ranks of a host")
            have += part
    return bytes(data)


def _address(environment: RankEnvironment, purpose: str) -> str:
    return f"{socket_address(environment.run_id, environment.host_ranks.start)}-{purpose}"
