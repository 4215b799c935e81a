"""One worker on several GPUs of this host: `python -m runtime.server.ranks 2 PROGRAM ARGUMENT…` runs it once per rank.

Rank 0 owns standard input and output and so is the worker that the service talks to. Sets the variables that torchrun
sets, without importing torch first: that import would come on top of the one that every rank makes. The ranks stay in
the process group of this process, so that whoever started it can end them together. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType

HOST = "127.0.0.1"
GRACE_S = 15.0  # after the first rank has ended; the ranks' own guard takes 5 s


def main(argv: Sequence[str]) -> int:
    """Run one process per rank. Returns the exit code of the first rank that failed, 0 if none did."""
    if len(argv) < 2 or not argv[0].isdecimal() or int(argv[0]) < 1:
        print("usage: python -m runtime.server.ranks NUM_RANKS PROGRAM [ARGUMENT …]", file=sys.stderr)  # noqa: T201
        return 2
    num_ranks, meeting = int(argv[0]), meeting_place()
    port = int(meeting.getsockname()[1])
    environments = [rank_variables(rank, num_ranks, port, os.environ) for rank in range(num_ranks)]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    running: set[int] = set()

    def end(sig: int, frame: FrameType | None) -> None:
        _signal(running, sig)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    for rank, environment in enumerate(environments):
        process = subprocess.Popen(
            list(argv[1:]), env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL, stdout=None if rank == 0 else sys.stderr,
        )  # fmt: skip
        processes[process.pid] = process
        running.add(process.pid)
    _let_go_of_streams()
    with meeting:
        return _wait(processes, running)


def meeting_place() -> socket.socket:
    """A socket whose port is kept for rank 0 as long as it is open.

    Bound, not listening, and open to reuse: Linux gives the port to nobody who does not ask for reuse as well, and picks it for
    nobody; rank 0's store asks for reuse and may listen there.
    """
    meeting = socket.socket()
    meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    meeting.bind((HOST, 0))
    return meeting


def rank_variables(rank: int, num_ranks: int, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of one rank. Threads are shared out unless the environment says how many."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
    }


def _let_go_of_streams() -> None:
    """The end of rank 0's output must show although this process lives on."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)


def _wait(processes: Mapping[int, subprocess.Popen[bytes]], running: set[int]) -> int:
    """Wait for all. Once one has ended the others have `GRACE_S` to follow, then they are killed."""
    failed = 0
    killer: threading.Timer | None = None
    while running:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        running.discard(ended.si_pid)  # before it is reaped: from then on the number may be another process's
        _, status = os.waitpid(ended.si_pid, 0)
        if ended.si_pid not in processes:
            continue
        code = os.waitstatus_to_exitcode(status)
        processes[ended.si_pid].returncode = code
        failed = failed or (code if code >= 0 else 128 - code)
        if killer is None and running:
            killer = threading.Timer(GRACE_S, _signal, [running, signal.SIGKILL])
            killer.daemon = True
            killer.start()
    if killer is not None:
        killer.cancel()
    return failed


def _signal(pids: Iterable[int], sig: int) -> None:
    """Signal processes without asking how they are: `Popen.send_signal` would reap one that has just ended."""
    for pid in tuple(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
