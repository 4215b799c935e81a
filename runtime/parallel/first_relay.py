"""A first request that comes to rank 0, told to the other ranks of its host while all of them start. Standard library only.

Rank 0 says, as a length and JSON: if a request was announced, what to load by, which is the request, or null where it did not come,
so that all ranks load in one order; then, unless it was said, the request, or null once its start takes none any more. To every
rank's start it is a `FirstRequest` like one that was read from a command.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
from collections.abc import Mapping, Sequence

from loader.errors import InternalError
from runtime.first_request import FOLLOWS_S, FirstRequest
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.meeting import Limit, host_meeting, receive, visit_meeting

_LENGTH = struct.Struct("<Q")
MEET_S = 60.0  # for all ranks to come, and for rank 0 to say what to load by

Body = Mapping[str, object] | None


class FirstRelay:
    """One rank's end; at work once it is made.

    Args:
        first: rank 0's own, or on the other ranks the place for what rank 0 says. Its `follows` is the same on all ranks.
    """

    def __init__(self, environment: RankEnvironment, first: FirstRequest, meet_s: float = MEET_S) -> None:
        self._environment, self._first, self._meet_s = environment, first, meet_s
        self._cancelled = threading.Event()
        self._is_decided = threading.Event()
        self._decision: Body = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="first relay", daemon=True)
        self._thread.start()

    def load_body(self) -> Body:
        """The request that all ranks choose by what to load; None: they load what is usual.

        Raises: InternalError: rank 0 did not say.
        """
        if not self._first.follows:
            return None  # it might be on one rank and not yet on another
        if self._environment.rank == 0:
            self._decide(self._first.wait(FOLLOWS_S))
        self._is_decided.wait()
        if self._problem and self._environment.rank:
            raise InternalError(f"rank 0 did not say what to load ({self._problem})", where="ranks")
        return self._decision

    def close(self) -> None:
        """Let the thread end; on rank 0 others learn that there will be no request."""
        self._cancelled.set()
        self._first.close()
        self._is_decided.set()

    def _decide(self, body: Body) -> None:
        self._decision = body
        self._is_decided.set()

    def _run(self) -> None:
        limit = Limit(self._meet_s, self._cancelled)
        try:
            self._host(limit) if self._environment.rank == 0 else self._visit(limit)
        except Exception as error:  # noqa: BLE001 (a border of a thread: `load_body` says it)
            self._problem = str(error) or repr(error)
        finally:
            self._is_decided.set()

    def _host(self, limit: Limit) -> None:
        with host_meeting(self._environment, "request", limit) as guests:
            if self._first.follows:
                self._is_decided.wait()
                _tell(guests, self._decision)
            if self._decision is None:
                _tell(guests, self._first.wait())

    def _visit(self, limit: Limit) -> None:
        with visit_meeting(self._environment, "request", limit) as host:
            body = _hear(host, limit) if self._first.follows else None
            self._decide(body)
            if body is None:  # now or later, or never: as long as the start of rank 0 takes one
                body = _hear(host, Limit(math.inf, self._cancelled))
            if body is not None:
                self._first.offer(body)


def _tell(guests: Sequence[socket.socket], body: Body) -> None:
    """All at once: a request with pictures may have 60 MB."""
    data = json.dumps(body).encode()

    def tell(guest: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a rank that is gone shows elsewhere
            guest.settimeout(None)
            guest.sendall(_LENGTH.pack(len(data)) + data)

    threads = [threading.Thread(target=tell, args=(guest,), daemon=True) for guest in guests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _hear(host: socket.socket, limit: Limit) -> Body:
    (count,) = _LENGTH.unpack(receive(host, _LENGTH.size, limit))
    body: Body = json.loads(receive(host, count, limit))
    return body
