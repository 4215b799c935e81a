"""The launcher of ranks, with small programs instead of workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.server import supervisor
from runtime.server.config import RANK_COMMAND, ServerConfig
from runtime.server.ranks import rank_variables
from tests.fakes.service import ROOT, is_running, until


def launch(num_ranks: str, code: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.server.ranks", num_ranks, sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, **options
    )  # type: ignore[call-overload, no-any-return]


def test_rank_0_has_the_streams_and_the_others_speak_on_stderr() -> None:
    code = "import os, sys; os.write(1, f\"{os.environ['RANK']} {sys.stdin.read()}\\n\".encode())"  # one call a rank
    done = launch("3", code, input="hello")
    assert (done.returncode, done.stdout) == (0, "0 hello\n")
    assert sorted(done.stderr.split()) == ["1", "2"]


def test_every_rank_gets_the_standard_variables(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    code = (
        "import json, os, pathlib; rank = os.environ['RANK'];"
        f"pathlib.Path({str(tmp_path)!r}, rank).write_text(json.dumps([os.environ[n] for n in {names}]))"
    )
    assert launch("2", code).returncode == 0
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert first[5] == second[5] != "0"


def test_threads_are_shared_out_unless_the_environment_says() -> None:
    cores = len(os.sched_getaffinity(0))
    assert rank_variables(1, cores, 1, {})["OMP_NUM_THREADS"] == "1"
    assert rank_variables(1, 2, 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("ends", "code"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)],
    ids=["exit", "killed"],
)
def test_the_first_failure_is_the_exit_code(ends: str, code: int, tmp_path: Path) -> None:
    """Rank 1 fails once it has been seen; rank 0 sees its standard input end only after that."""
    seen = tmp_path / "seen"
    program = f"""
import os, sys, time
while os.environ['RANK'] == '1':
    if os.path.exists({str(seen)!r}): {ends}
    time.sleep(0.01)
sys.stdin.read(); sys.exit(1)
"""
    command = [sys.executable, "-m", "runtime.server.ranks", "2", sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: len(children.read_text().split()) == 2, "both ranks run")
    seen.touch()
    until(lambda: len(children.read_text().split()) == 1, "rank 1 has ended")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == code


def test_a_rank_that_does_not_follow_is_killed(tmp_path: Path) -> None:
    """Rank 1 ends once rank 0 has said who it is."""
    said = tmp_path / "said"
    program = f"""
import os, pathlib, time
said = pathlib.Path({str(said)!r})
if os.environ['RANK'] == '0':
    print(os.getpid(), flush=True); said.touch(); time.sleep(600)
while not said.exists(): time.sleep(0.01)
"""
    code = (
        "import sys; from runtime.server import ranks; ranks.GRACE_S = 0.1;"
        f"sys.exit(ranks.main(['2', sys.executable, '-c', {program!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 137
    assert not is_running(int(done.stdout))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_signal_to_ranks_that_have_just_ended_leaves_their_exit_codes(tmp_path: Path) -> None:
    """They end while the launcher is stopped, and the signal is the first thing that it sees afterwards."""
    go = tmp_path / "go"
    program = f"""
import os, sys, time
while not os.path.exists({str(go)!r}): time.sleep(0.01)
sys.exit(3)
"""
    command = [sys.executable, "-m", "runtime.server.ranks", "2", sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: len(children.read_text().split()) == 2, "both ranks run")
    until(lambda: Path(f"/proc/{process.pid}/fd/1").readlink() == Path(os.devnull), "the launcher waits")
    ranks = [int(pid) for pid in children.read_text().split()]
    process.send_signal(signal.SIGSTOP)
    until(lambda: state_of(process.pid) == "T", "the launcher stops")
    go.touch()
    until(lambda: [state_of(pid) for pid in ranks] == ["Z", "Z"], "both ranks have ended")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 3


def test_the_port_of_the_ranks_is_kept_for_the_first_of_them() -> None:
    """Rank 0 listens as torch's store does, on all addresses; before, nobody else can."""
    program = """
import errno, os, socket
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as other:
            try:
                other.bind((address, port))
            except OSError as error:
                print(errno.errorcode[error.errno])
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("0.0.0.0", port))
        store.listen()
        with socket.create_connection((os.environ["MASTER_ADDR"], port)):
            print("met")
"""
    assert launch("2", program).stdout.split() == ["EADDRINUSE", "EADDRINUSE", "met"]


@pytest.mark.slow
def test_ranks_meet_in_torchs_store() -> None:
    pytest.importorskip("torch")
    program = """
import os
from torch.distributed import TCPStore
is_first = os.environ["RANK"] == "0"
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_first, wait_for_workers=False)
store.set(os.environ["RANK"], "here")
store.wait(["0", "1"])
if is_first: print(store.get("1").decode())
else: store.set("read", "")
store.wait(["read"])
"""
    assert launch("2", program).stdout == "here\n"


def test_the_service_waits_for_the_exit_code_of_the_first_rank_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails, which ends the worker's output; rank 1 follows later than a single worker would be waited for."""
    monkeypatch.setattr(supervisor, "EXIT_GRACE_S", 0.05)
    program = tmp_path / "worker.py"
    program.write_text("import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(4)\ntime.sleep(1)\n")
    config = ServerConfig(
        bundle=tmp_path, state=tmp_path, allow_unauthenticated=True, ranks=2,
        worker_command=(sys.executable, str(program)),
    )  # fmt: skip

    async def exit_code() -> int:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        worker = supervisor.Supervisor(config, lambda event: None, ended.set_result, lambda: False)
        worker.start()
        try:
            return await asyncio.wait_for(ended, 60)
        finally:
            await worker.close(10.0)

    assert asyncio.run(exit_code()) == 4


@pytest.mark.parametrize("arguments", [[], ["2"], ["0", "x"], ["two", "x"]], ids=str)
def test_wrong_arguments(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime.server.ranks", *arguments], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"usage" in done.stderr


def test_the_service_starts_ranks_through_the_launcher() -> None:
    environ = {"COLDFRAME_SERVE_ALLOW_UNAUTHENTICATED": "1", "COLDFRAME_BUNDLE": "b"}
    one = ServerConfig.from_environment(environ)
    assert one.command == (sys.executable, "-m", "runtime.worker")
    two = ServerConfig.from_environment(environ, ranks=2)
    assert two.command == (sys.executable, "-m", "runtime.server.ranks", "2", *RANK_COMMAND)
    own = ServerConfig.from_environment({**environ, "COLDFRAME_SERVE_WORKER_COMMAND": "my worker"}, ranks=2)
    assert own.command[-2:] == ("my", "worker")
