"""Starts bare interpreters with exactly the descriptors they need, and ends them."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

STUCK = "stopped, still in a system call"  # what `Child.stop` returns for a process that cannot be killed now
FIRST_FD = 3  # of the descriptors in the child
_ABOVE_CHILD_FDS = 16
_RUN_MODULE = (
    "import sys; from importlib import import_module; count = int(sys.argv[2]); "
    "sys.path += sys.argv[3 : 3 + count]; "  # behind the standard library
    "import_module(sys.argv[1]).main(sys.argv[3 + count :])"
)
_REAP_S = 5.0


class Child:
    """A process that was spawned here; ended and reaped once, by whoever comes first."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._ending: str | None = None

    def stop(self, grace_s: float = 0.0) -> str:
        """Kill and reap; returns how it ended. A system call that hangs must not delay us. May be called again.

        Args:
            grace_s: how long it may take to end by itself first.
        """
        with self._lock:
            if self._ending is None:
                self._ending = self._wait(grace_s)
                if self._ending is None:
                    os.kill(self.pid, 9)
                    self._ending = "stopped" if self._wait(_REAP_S) else STUCK
                if self._ending == STUCK:  # a dead network mount: the kernel ends it when the call returns
                    threading.Thread(target=os.waitpid, args=(self.pid, 0), daemon=True).start()
            return self._ending

    def _wait(self, seconds: float) -> str | None:
        end = time.monotonic() + seconds
        while True:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return "ended, its status was taken by other code of this process"
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            if time.monotonic() >= end:
                return None
            time.sleep(0.001)


def parent_argument() -> str:
    """This process's number for a child that dies with the thread that spawned it; "0" where that thread may be short."""
    is_main = threading.current_thread() is threading.main_thread()
    return str(os.getpid() if is_main else 0)


def spawn_module(module: str, arguments: Sequence[str] = ()) -> tuple[Child, socket.socket]:
    """Run `main` of `module`, which may import what this process can, and our end of a packet socket to it.

    `main` gets the number of its end, `parent_argument()` and `arguments`.
    Raises: OSError: no child process here.
    """
    import socket  # a reader alone needs none

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        paths = _search_path()
        given = [module, str(len(paths)), *paths, str(FIRST_FD), parent_argument(), *arguments]
        return spawn(["-c", _RUN_MODULE], given, [theirs.fileno()]), ours
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()


def _search_path() -> list[str]:
    """Where a child finds `loader` and `cuda.bindings`: this package's parent, then this process's own path."""
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 - before pathlib is imported
    return list(dict.fromkeys([here, *(os.path.abspath(path) for path in sys.path)]))  # noqa: PTH100 - links stay


def spawn(program: Sequence[str], arguments: Sequence[str], fds: Sequence[int]) -> Child:
    """Run `program` in an isolated interpreter without site; it finds `fds` at FIRST_FD and up.

    Raises: OSError: no child process here.
    """
    if not sys.executable:
        raise OSError("sys.executable is not known")
    high: list[int] = []
    try:
        high += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE_CHILD_FDS) for fd in fds]
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-S", "-E", "-I", *program, *arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, FIRST_FD + index) for index, fd in enumerate(high)],
        )
    finally:
        for fd in high:
            os.close(fd)
    return Child(pid)
