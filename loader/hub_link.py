"""The leader's end of a hub process; see `loader.host_hub`. `spawn_hub` needs no plan."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence

from loader.child_process import Child, spawn_module


class HubProcess:
    """A hub that waits for work, works, or has ended."""

    def __init__(self, child: Child, sock: socket.socket) -> None:
        self.pid = child.pid
        self._child = child
        self._socket = sock

    def begin(self, work: Mapping[str, object], fds: Sequence[int]) -> None:
        """Send the work and the descriptors of listener, `full`, `free`, `ctl`, ring, rows and plan.

        Raises: OSError: no memory for it here, or the process is gone.
        """
        memory = os.memfd_create("coldframe-hub-work", os.MFD_CLOEXEC)
        try:
            os.pwrite(memory, json.dumps(work, separators=(",", ":")).encode(), 0)
            socket.send_fds(self._socket, [b"w"], [memory, *fds], socket.MSG_NOSIGNAL)
        finally:
            os.close(memory)

    def wait_asked(self) -> bool:
        """Until it asks how the reader ended (true), or is gone."""
        try:
            return bool(self._socket.recv(1))
        except OSError:
            return False

    def answer(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.send(text.encode())

    def stop(self, grace_s: float = 0.0) -> str:
        """End it and reap it; how it ended. May be called again."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        ending = self._child.stop(grace_s)
        self._socket.close()
        return ending


def spawn_hub() -> HubProcess:
    """Start a hub that waits for its work. Raises: OSError: no child process here."""
    try:
        child, ours = spawn_module("loader.host_hub")
    except OSError as error:
        raise OSError(f"no process between reader and ranks: {error}") from error
    return HubProcess(child, ours)
