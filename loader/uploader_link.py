"""The parent's end of an uploader process: `spawn_uploader` needs no plan, so that the context is made meanwhile."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from loader import upload_wire as talk
from loader.child_process import Child, spawn_module
from loader.devices import device_ordinal
from loader.errors import CapabilityError

_END_S = 5.0  # for a context to be torn down


class UploaderProcess:
    """An uploader that waits for work, works, or has ended. Created by `spawn_uploader`."""

    def __init__(self, child: Child, sock: socket.socket, ordinal: int, driver: str) -> None:
        self.pid = child.pid
        self.ordinal = ordinal
        self.driver = driver
        self._child = child
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin_reader(self, fds: Sequence[int]) -> None:
        """Start a reader inside, with the descriptors of plan, rows, `free`, `full` and `ctl`. Before `begin`.

        Raises: OSError: the process is gone.
        """
        socket.send_fds(self._socket, [bytes([talk.READER])], list(fds), socket.MSG_NOSIGNAL)

    def begin(self, work: bytes, fds: Sequence[int]) -> None:
        """Send the work (an encoded `UploadWork`) and what a reader's `shared_fds` says.

        Raises: OSError: no memory for it here, or the process is gone.
        """
        memory = os.memfd_create("coldframe-work", os.MFD_CLOEXEC)
        try:
            view = memoryview(work)
            while view:
                view = view[os.write(memory, view) :]
            socket.send_fds(self._socket, [bytes([talk.WORK])], [memory, *fds], socket.MSG_NOSIGNAL)
        finally:
            os.close(memory)

    def receive(self) -> tuple[int, bytes, list[int]] | None:
        """(kind, payload, descriptors, now the caller's) of the next packet; None = the process is gone."""
        try:
            try:
                data, fds = self._receive()
            except ConnectionResetError:
                # It ended before it read all that it was sent; its last words come after that.
                data, fds = self._receive()
        except OSError:
            return None
        return (data[0], data[1:], fds) if data else None

    def _receive(self) -> tuple[bytes, list[int]]:
        size, most = talk.PACKET_BYTES, talk.MOST_FDS
        data, fds, _, _ = socket.recv_fds(self._socket, size, most, socket.MSG_CMSG_CLOEXEC)
        return data, fds

    def say_bye(self) -> None:
        """Let a process that is done go; `receive` meets the end when it has ended."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone already

    def hang_up(self) -> None:
        """Tell it to stop; `receive` meets the end. May be called again, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it hung up first

    def stop(self, grace_s: float = _END_S) -> str:
        """Hang up and wait until it is gone, by force after `grace_s`; how it ended. May be called again."""
        self.hang_up()
        return self._child.stop(grace_s)

    def close(self) -> None:
        """After `stop`. May be called again."""
        self._socket.close()


def spawn_uploader(device: str = "cuda", driver: str = "") -> UploaderProcess:
    """Start a process that makes a context on `device` and waits for work.

    Call it from the main thread where possible: only then the kernel kills the child with its parent; the end of the
    socket tells it in every case.

    Args:
        driver: test hook: `module:function` that makes its driver.
    Raises: OSError: no child process here. CapabilityError: `device` is not a CUDA device's name.
    """
    ordinal = device_ordinal(device)
    if ordinal < 0:
        raise CapabilityError(
            "an uploader needs a CUDA device",
            where="device",
            found=repr(device),
            expected="cuda, cuda:<number>",
        )
    try:
        child, ours = spawn_module("loader.upload_process", [str(ordinal), driver])
    except OSError as error:
        raise OSError(f"no uploader process: {error}") from error
    return UploaderProcess(child, ours, ordinal, driver)
