"""The reader itself: what it imports, how it ends, how fast it may go."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from loader import reader as wire
from loader.errors import WorkerError
from loader.load_plan import plan_load
from loader.manifest import Manifest
from loader.options import StreamOptions
from loader.reader_link import ChildReader, spawn_reader
from loader.stream import WeightStream, start
from tests.loader.prepared import SMALL_ORDER, Prepared
from tests.loader.rungs import raw_bytes

READER = Path(wire.__file__)
ALLOWED = {"os", "sys", "mmap", "threading", "struct", "array", "errno", "time", "signal", "ctypes"}


def modules_after(code: str) -> set[str]:
    flags = ["-S", "-E", "-I"]
    text = f"import sys; sys.path.insert(0, {str(READER.parent)!r})\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, *flags, "-c", text], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_reader_imports_only_its_short_list() -> None:
    allowed = modules_after("import " + ", ".join(sorted(ALLOWED)))
    found = modules_after("import reader; reader.load_sha256()")
    # __future__ is a file of constants
    assert found - allowed <= {"reader", "_queue", "_sha2", "_sha256", "__future__"}


def test_reader_knows_the_digest_of_nothing() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert {wire.load_sha256(whole)(b"").hexdigest() for whole in (False, True)} == {empty}


def test_a_full_ring_of_records_fits_a_pipe() -> None:
    assert wire.RECORD.size * 512 <= 65536
    assert wire.RECORD.size <= 512  # the least PIPE_BUF that POSIX allows: writes are atomic


class Clock:
    """Time that only sleeping moves, a little more than asked for."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.random.random() * 0.0005


@pytest.mark.parametrize("rate", [1e7, 5e8, 2.2e10])
def test_throttle_holds_within_two_percent_over_any_half_second(
    monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    clock = Clock(seed=3)
    monkeypatch.setattr(wire, "time", clock)
    throttle = wire.Throttle(rate)
    times, sent = [], []
    while clock.now < 3.0:
        throttle.wait(throttle.piece)
        times.append(clock.now)
        sent.append(throttle.piece)
    for first in range(0, len(times), max(1, len(times) // 50)):
        if times[first] > 2.4:
            break
        window = [
            size for at, size in zip(times, sent, strict=True) if times[first] <= at < times[first] + 0.5
        ]
        # a window's ends may each cut one piece
        assert sum(window) == pytest.approx(rate * 0.5, rel=0.02, abs=throttle.piece)


def test_throttle_pieces_are_a_small_part_of_half_a_second() -> None:
    assert all(wire.Throttle(rate).piece <= max(65536, rate * 0.5 * 0.01) for rate in (1e6, 1e9, 1e11))


class FewThreads:
    """The module, where only `most` threads are granted, as below a limit of a container's processes."""

    Lock, Condition = threading.Lock, threading.Condition

    def __init__(self, most: int) -> None:
        self.left = most

    def Thread(self, **arguments: Any) -> threading.Thread:
        self.left -= 1
        return threading.Thread(**arguments) if self.left >= 0 else RefusedThread()


class RefusedThread(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("most", [2, 3, 5])
def test_reader_makes_do_with_the_threads_that_it_gets(
    prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(wire, "threading", FewThreads(most))
    options = StreamOptions(reader="threads", threads=8)
    with start(plan_load(manifest, SMALL_ORDER), prepared.directory, options=options) as stream:
        for name in stream.state_dict():
            assert raw_bytes(stream.tensor(name)) == prepared.content[name]


def test_a_reader_without_a_thread_says_so(
    prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "threading", FewThreads(1))  # nobody but the one that hands out
    options = StreamOptions(reader="threads", threads=8)
    with (
        start(plan_load(manifest, SMALL_ORDER), prepared.directory, options=options) as stream,
        pytest.raises(WorkerError, match="can't start new thread"),
    ):
        stream.wait_all()


PARENT = """
import sys
from pathlib import Path
from loader import StreamOptions, plan_load, read_manifest, start
directory = Path(sys.argv[1])
plan = plan_load(read_manifest(directory), sys.argv[2:], chunk_bytes=4096)
stream = start(plan, directory, options=StreamOptions(storage_gbps=1e-5))
print(stream._transport._link.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("bytes_before", [0, 1, 20_000])
def test_reader_ends_with_its_parent(prepared: Prepared, bytes_before: int) -> None:
    command = [sys.executable, "-c", PARENT, str(prepared.directory), *SMALL_ORDER]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    reader = int(parent.stdout.readline())
    wait_until_read(reader, bytes_before)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    wait_until_gone(reader)
    assert not is_running(reader)


def wait_until_read(pid: int, count: int) -> None:
    """Until the process has read that many bytes from anywhere."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _read_bytes(pid) < count:
        os.sched_yield()


def _read_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    except (OSError, IndexError):
        return 1 << 60


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and is_running(pid):
        os.sched_yield()


def is_running(pid: int) -> bool:
    """Not gone and not a zombie that someone else has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("chunk", range(0, 14, 3))
def test_reader_killed_from_outside(prepared: Prepared, manifest: Manifest, chunk: int) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096)
    reader = spawn_reader()
    options = StreamOptions(storage_fault=f"stall@{chunk}:30", threads=1)
    with start(plan, prepared.directory, options=options, reader=reader) as stream:
        while not any(mark.name == f"reader {reader.pid} up" for mark in stream.marks()):
            os.sched_yield()  # one that never came up is replaced by threads
        if chunk:
            first = plan.groups[0]
            if chunk > max(first.chunks):
                stream.wait(first.name)
        os.kill(reader.pid, 9)
        with pytest.raises(WorkerError, match="killed by signal 9"):
            stream.wait_all()


def test_reader_killed_while_idle_only_ends_rows(prepared: Prepared, manifest: Manifest) -> None:
    reader = spawn_reader()
    with start(plan_load(manifest, SMALL_ORDER), prepared.directory, reader=reader) as stream:
        stream.rows("embed/table.weight", [1])
        stream.wait_all()
        while not any(mark.name.startswith("reader used") for mark in stream.marks()):
            stream.rows("embed/table.weight", [1])
        while not stream._transport._intake.is_done:  # type: ignore[attr-defined]
            os.sched_yield()  # its last word comes after that mark
        os.kill(reader.pid, 9)
        while (error := failure_of_rows(stream)) is None:
            os.sched_yield()  # the death shows at some later request
        assert "killed by signal 9" in str(error)
        assert stream.tensor("dit/scale").shape == ()


def failure_of_rows(stream: WeightStream) -> WorkerError | None:
    try:
        stream.rows("embed/table.weight", [1])
    except WorkerError as error:
        return error
    return None


def test_reader_without_a_plan_is_ended_by_stop() -> None:
    reader = spawn_reader()
    assert reader.stop() == "stopped"
    reader.close()
    reader.close()


def test_reader_leaves_when_its_pipes_close() -> None:
    reader = spawn_reader()
    pid = reader.pid
    reader._pipes.close_all()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert "taken by other code" in reader.stop()
    reader.close()


def test_spawning_needs_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="no reader process"):
        spawn_reader()


def test_reader_is_a_child_reader() -> None:
    reader = spawn_reader()
    assert isinstance(reader, ChildReader)
    reader.stop()
    reader.close()


@pytest.mark.parametrize("spec", ["", "short:7", "errno@3:2:EIO,kill@9", "stall@1:0.5"])
def test_fault_specs_parse(spec: str) -> None:
    faults = wire.Faults(spec)
    assert faults.short == (7 if spec == "short:7" else 0)
    assert sum(map(len, faults.rules.values())) == spec.count("@")
