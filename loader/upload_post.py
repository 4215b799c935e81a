"""What an uploader process says to its parent: packets that never block, and the two ways to give up."""

from __future__ import annotations

import os
import select
import time
from collections import deque

from loader import upload_wire as talk

TYPE_CHECKING = False  # the typing module costs as much as everything else here
if TYPE_CHECKING:
    import socket

    from loader.errors import WorkerError


class Stop(Exception):
    """The parent hung up."""


class Refused(Exception):
    """This machine does not do it, but nothing was copied yet: another path may. Carries the WorkerError."""

    def __init__(self, error: WorkerError) -> None:
        super().__init__(str(error))
        self.error = error


class Post:
    """Packets to the parent; never blocks: what does not fit now waits for the next `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def send(self, kind: int, payload: bytes = b"", fds: list[int] | None = None) -> None:
        """`fds` are closed after they were sent."""
        self._waiting.append((bytes([kind]) + payload, fds or []))
        self.flush()

    def mark(self, name: str, start_ns: int, size: int = 0) -> None:
        self.send(talk.MARK, talk.encode_mark(name, start_ns, time.monotonic_ns(), size))

    def flush(self) -> None:
        """Raises: Stop: the parent is gone."""
        import array
        import socket

        while self._waiting:
            data, fds = self._waiting[0]
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._socket.sendmsg([data], extra, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                raise Stop from None
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)

    def wait_empty(self) -> None:
        while self._waiting:
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLOUT)
            poll.poll()
            self.flush()
