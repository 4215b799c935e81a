"""What is special about path U: a process that may refuse, die or come too early, and memory that outlives it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.errors import CapabilityError, InternalError, WorkerError
from loader.load_plan import plan_load
from loader.manifest import Manifest
from loader.options import StreamOptions
from loader.reader_link import spawn_reader
from loader.stream import WeightStream, start
from loader.upload_wire import decode_error, encode_error
from loader.uploader_link import spawn_uploader
from tests.fakes.driver import FakeDriver
from tests.loader.prepared import SMALL_ORDER, Prepared
from tests.loader.rungs import Rung, raw_bytes

REFUSALS = {
    "no_device": "no such CUDA device",
    "no_sharing": "cannot be shared",
    "no_pinning": "fake limit of 0 bytes",
    "no_thread_to_pin": "no thread to pin slots with",
    "no_pipe_to_pin": "no pipe to pin slots with",
    "no_context_to_pin": "no context for this thread",
    "small_device": "found 60000 of 60000 bytes free",
    "dies_at_start": "exit code 7",
    "dies_in_its_first_copy": "killed by signal 9",
}


def begin(
    prepared: Prepared, manifest: Manifest, driver: FakeDriver, remote: str, **options: Any
) -> WeightStream:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096, hold=options.pop("hold", None))
    uploader, reader = options.pop("uploader", None), options.pop("reader_link", None)
    settings = StreamOptions(
        driver=driver,
        uploader_driver=f"tests.fakes.remote_driver:{remote}",
        ring_bytes=options.pop("ring_bytes", 16384),
        **options,
    )
    return start(plan, prepared.directory, device="cuda", options=settings, reader=reader, uploader=uploader)


def contents(stream: WeightStream, driver: FakeDriver) -> dict[str, bytes]:
    state = stream.state_dict()
    driver.caller.synchronize()
    return {name: raw_bytes(tensor) for name, tensor in state.items()}


def expected(prepared: Prepared, manifest: Manifest) -> dict[str, bytes]:
    return {name: prepared.content[name] for name, t in manifest.tensors.items() if t.group in SMALL_ORDER}


def marks(stream: WeightStream) -> list[str]:
    return [mark.name for mark in stream.marks()]


def number(stream: WeightStream, start: str, end: str) -> int:
    (name,) = [name for name in marks(stream) if name.startswith(start) and name.endswith(end)]
    return int(name.removeprefix(start).removesuffix(end))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", REFUSALS)
def test_refusal_chooses_path_a_and_says_why(prepared: Prepared, manifest: Manifest, remote: str) -> None:
    driver = FakeDriver()
    with begin(prepared, manifest, driver, remote, hold="dit/blocks.0") as stream:
        request = stream.rows_async("embed/table.weight", [9])
        stream.release()
        assert contents(stream, driver) == expected(prepared, manifest)
        assert request.bytes == prepared.content["embed/table.weight"][432:480]
        assert stream.path == "A"
        (reason,) = [name for name in marks(stream) if name.startswith("path U refused")]
        assert REFUSALS[remote] in reason
    driver.finish()


@pytest.mark.parametrize("remote", REFUSALS)
def test_forced_path_does_not_fall(prepared: Prepared, manifest: Manifest, remote: str) -> None:
    driver = FakeDriver()
    with pytest.raises(WorkerError, match=REFUSALS[remote]):  # noqa: SIM117 - the start may raise, too
        with begin(prepared, manifest, driver, remote, path="U") as stream:
            stream.wait_all()
    driver.finish()


@pytest.mark.parametrize(
    ("driver", "text"),
    [(FakeDriver(sharing_allowed=False), "cannot import"), (FakeDriver(has_device=False), "no such CUDA")],
    ids=["import", "context"],
)
def test_refusal_of_this_process_ends_the_other_one(
    prepared: Prepared, manifest: Manifest, driver: FakeDriver, text: str
) -> None:
    with (
        begin(prepared, manifest, driver, "plain", path="U") as stream,
        pytest.raises(WorkerError, match=text),
    ):
        stream.wait_all()
    driver.finish()


def test_memory_that_cannot_be_imported_chooses_path_a(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver(sharing_allowed=False)
    with begin(prepared, manifest, driver, "plain") as stream:
        assert contents(stream, driver) == expected(prepared, manifest)
        assert stream.path == "A"
        assert "path U refused: fake driver: cannot import" in marks(stream)
    driver.finish()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"reader": "threads"}, "threads of this process"), ({"uploader_driver": ""}, "in this process only")],
    ids=["threads", "driver"],
)
def test_what_cannot_go_with_a_process(
    prepared: Prepared, manifest: Manifest, options: dict[str, str], reason: str
) -> None:
    driver = FakeDriver()
    plan = plan_load(manifest, SMALL_ORDER)
    settings: dict[str, Any] = {
        "driver": driver,
        "uploader_driver": "tests.fakes.remote_driver:plain",
    } | options
    with start(plan, prepared.directory, device="cuda", options=StreamOptions(**settings)) as stream:
        stream.wait_all()
        assert any(name.startswith("path U refused") and reason in name for name in marks(stream))
    with pytest.raises(CapabilityError, match=reason):
        start(plan, prepared.directory, device="cuda", options=StreamOptions(path="U", **settings))
    driver.finish()


def test_a_process_that_ends_before_it_has_read_its_work_is_heard(
    prepared: Prepared, manifest: Manifest
) -> None:
    driver, size = FakeDriver(), 1 << 47  # more than a process can address
    with (
        begin(prepared, manifest, driver, "plain", path="U", ring_bytes=size, slot_bytes=size) as stream,
        pytest.raises(WorkerError, match=f"no ring of {size} bytes"),
    ):
        stream.wait_all()
    driver.finish()


def test_a_context_that_stays_does_not_end_the_reader(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    with begin(prepared, manifest, driver, "keeps_its_context") as stream:
        stream.wait_all()
        while not any(name.startswith("uploader: unpinned") for name in marks(stream)):
            _ = stream.rows_async("embed/table.weight", [0]).bytes
        for _ in range(50):  # the context goes meanwhile
            assert len(stream.rows_async("embed/table.weight", [0]).bytes) == 48
        assert not any("ended with" in name for name in marks(stream))
    driver.finish()


def test_partly_refused_registration_shrinks_the_ring(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    with begin(prepared, manifest, driver, "once_pageable", path="U") as stream:
        assert contents(stream, driver) == expected(prepared, manifest)
        assert any("pinned 8192 of 16384 bytes" in name for name in marks(stream))
    driver.finish()


def test_copies_do_not_wait_for_a_slot_that_is_being_pinned(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    with begin(prepared, manifest, driver, "pins_late", path="U") as stream:
        assert contents(stream, driver) == expected(prepared, manifest)
    driver.finish()


def test_factory_is_a_test_hook(
    prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLDFRAME_ALLOW_STORAGE_FAULT")
    driver = FakeDriver()
    with (
        begin(prepared, manifest, driver, "plain", path="U") as stream,
        pytest.raises(CapabilityError, match="uploader_driver: fault injection is not allowed"),
    ):
        stream.wait_all()
    driver.finish()


def no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that falls gets no descriptors any more."""
    pipe = os.pipe

    def refuse() -> tuple[int, int]:
        if threading.current_thread().name == "coldframe-upload":
            raise OSError(errno.EMFILE, "Too many open files")
        return pipe()

    monkeypatch.setattr(os, "pipe", refuse)


def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gets a thread to upload with."""
    begin_thread = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "coldframe-uploader":
            raise RuntimeError("can't start new thread")
        begin_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize(
    ("refuse", "text", "cause"),
    [(no_pipe, "Too many open files", OSError), (no_thread, "can't start new thread", RuntimeError)],
)
def test_a_fall_that_fails_is_told_to_all_who_wait(
    prepared: Prepared,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[pytest.MonkeyPatch], None],
    text: str,
    cause: type[Exception],
) -> None:
    refuse(monkeypatch)
    driver = FakeDriver()
    with begin(prepared, manifest, driver, "no_sharing") as stream:
        with pytest.raises(InternalError, match=text):
            _ = stream.rows_async("embed/table.weight", [9]).bytes
        with pytest.raises(InternalError, match=text) as caught:
            stream.wait_all()
        assert isinstance(caught.value.__cause__, cause)
    driver.finish()


# -- failures --------------------------------------------------------------------------------------------------------


def test_sticky_error_ends_the_load(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    stream = begin(prepared, manifest, driver, "broken_copy")
    with stream, pytest.raises(InternalError, match="CUDA driver: sticky error; found 700"):
        stream.wait_all()
    driver.finish()


def test_an_error_while_pinning_ends_the_load(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    stream = begin(prepared, manifest, driver, "breaks_pinning", max_load_s=30)
    with stream, pytest.raises(InternalError, match="sticky error of registration"):
        stream.wait_all()
    driver.finish()


def test_killed_uploader_is_an_internal_error(prepared: Prepared, manifest: Manifest) -> None:
    """Once bytes have arrived there is no second attempt inside one start."""
    driver = FakeDriver()
    stream = begin(prepared, manifest, driver, "plain", hold="dit/blocks.1")
    stream.wait("dit/blocks.0")
    os.kill(number(stream, "uploader ", " started"), signal.SIGKILL)
    with stream, pytest.raises(InternalError, match=r"uploader process ended.*killed by signal 9") as caught:
        stream.wait_all()
    assert "bytes" in str(caught.value.found)
    driver.finish()


def test_killed_reader_is_named(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    stream = begin(prepared, manifest, driver, "plain", hold="dit/blocks.1", reader="child")
    stream.wait("dit/blocks.0")
    os.kill(number(stream, "reader ", " up"), signal.SIGKILL)
    with stream, pytest.raises(InternalError, match=r"reader ended.*killed by signal 9"):
        stream.wait_all()
    driver.finish()


@pytest.mark.parametrize("reader", ["child", None], ids=["child", "in-the-uploader"])
def test_reader_that_dies_after_the_load_fails_rows_only(
    prepared: Prepared, manifest: Manifest, reader: str | None
) -> None:
    driver = FakeDriver()
    with begin(prepared, manifest, driver, "plain", reader=reader) as stream:
        stream.wait_all()
        os.kill(number(stream, "reader ", " up"), signal.SIGKILL)
        while (error := failure_of_rows(stream)) is None:
            os.sched_yield()  # the death shows at some later request
        assert "killed by signal 9" in str(error)
        assert contents(stream, driver) == expected(prepared, manifest)
    driver.finish()


def failure_of_rows(stream: WeightStream) -> WorkerError | None:
    try:
        _ = stream.rows_async("embed/table.weight", [0]).bytes
    except WorkerError as error:
        return error
    return None


def test_close_does_not_wait_for_a_context(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    stream = begin(prepared, manifest, driver, "never_ready")
    request = stream.rows_async("embed/table.weight", [0])
    stream.close()
    with pytest.raises(InternalError, match="closed"):
        _ = request.bytes
    driver.finish()


def test_an_uploader_that_is_told_to_go_leaves_while_its_driver_starts() -> None:
    """Not by the interpreter's usual end: a library that is being initialised would abort that."""
    process = spawn_uploader(driver="tests.fakes.remote_driver:never_ready")
    assert process.stop(grace_s=60) == "exit code 0"
    process.close()


_PARENT = """
import sys, time
from pathlib import Path
from loader.load_plan import plan_load
from loader.manifest import read_manifest
from loader.options import StreamOptions
from loader.stream import start
from tests.fakes.driver import FakeDriver
directory = Path(sys.argv[1])
plan = plan_load(read_manifest(directory), sys.argv[2].split(","), chunk_bytes=4096, hold="dit/blocks.1")
options = StreamOptions(driver=FakeDriver(), uploader_driver="tests.fakes.remote_driver:" + sys.argv[3])
stream = start(plan, directory, device="cuda", options=options)
if sys.argv[3] == "plain":
    stream.wait("dit/blocks.0")
print(*[mark.name.split()[1] for mark in stream.marks() if mark.name.endswith(" started")], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("remote", ["plain", "never_ready"])
def test_killed_parent_leaves_nobody(prepared: Prepared, remote: str) -> None:
    root = Path(__file__).parents[2]
    arguments = [str(prepared.directory), ",".join(SMALL_ORDER), remote]
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, *arguments], cwd=root, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        uploader = int(parent.stdout.readline())
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert str(uploader) in children
        assert len(children) == 1
        parent.kill()
    limit = time.monotonic() + 10
    while any(_is_alive(int(child)) for child in children):
        assert time.monotonic() < limit, "children outlived their parent"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- starts ----------------------------------------------------------------------------------------------------------


def test_processes_may_be_spawned_before_the_plan(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    uploader, reader = spawn_uploader("cuda", "tests.fakes.remote_driver:plain"), spawn_reader()
    pids = uploader.pid, reader.pid
    with begin(prepared, manifest, driver, "plain", uploader=uploader, reader_link=reader) as stream:
        assert contents(stream, driver) == expected(prepared, manifest)
        assert (number(stream, "uploader ", " started"), number(stream, "reader ", " up")) == pids
    driver.finish()


def test_uploader_for_another_device_is_replaced(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    uploader = spawn_uploader("cuda:1", "tests.fakes.remote_driver:plain")
    with begin(prepared, manifest, driver, "plain", uploader=uploader) as stream:
        assert contents(stream, driver) == expected(prepared, manifest)
        assert number(stream, "uploader ", " started") != uploader.pid
        assert stream.path == "U"
    driver.finish()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_uploader_that_is_not_needed_is_ended(prepared: Prepared, manifest: Manifest, device: str) -> None:
    """By the CPU's path and by a forced one; the fixture of this folder looks for what is left."""
    driver = FakeDriver()
    options = StreamOptions(driver=driver, path="A") if device == "cuda" else StreamOptions()
    uploader = spawn_uploader("cuda", "tests.fakes.remote_driver:plain")
    plan = plan_load(manifest, SMALL_ORDER)
    with start(plan, prepared.directory, device=device, options=options, uploader=uploader) as stream:
        stream.wait_all()
        assert not any("path U" in name for name in marks(stream))
    driver.finish()


@pytest.mark.parametrize("name", ["U", "A", "B", "C", "D"])
def test_hold_may_be_released_before_there_is_a_context(
    prepared: Prepared, manifest: Manifest, name: str
) -> None:
    rung = Rung(name)
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096, hold="encoder/layers.0")
    with rung.start(plan, prepared.directory) as stream:
        stream.release()
        assert rung.contents(stream) == expected(prepared, manifest)
    rung.finish()


def test_marks_tell_of_both_processes(prepared: Prepared, manifest: Manifest) -> None:
    driver = FakeDriver()
    with begin(prepared, manifest, driver, "plain") as stream:
        stream.wait_all()
        while not any(name.startswith("uploader: unpinned") for name in marks(stream)):
            _ = stream.rows_async("embed/table.weight", [0]).bytes
        found = {mark.name: mark for mark in stream.marks()}
    assert found["uploader: cuda context"].thread == "uploader process"
    assert found["arenas imported"].bytes == found["uploader: device arenas"].bytes == stream.plan.arena_bytes
    assert found["uploader: cuda context"].end_ns <= found["uploader: device arenas"].start_ns
    assert found["uploader: device arenas"].end_ns <= found["cuda context"].start_ns  # one after the other
    pinned, back = found["uploader: every slot pinned"], found["uploader: first slot back"]
    assert found["uploader: device arenas"].end_ns <= min(pinned.start_ns, back.start_ns)
    assert found["all weights"].bytes == stream.plan.total_bytes
    driver.finish()


def test_process_imports_little() -> None:
    """What it imports before it opens the context is on the way to the first copy."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); import loader.upload_process; print(*sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-S", "-E", "-I", "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"torch", "numpy", "cuda", "json", "re", "typing", "dataclasses", "inspect", "pathlib", "socket"}
    assert heavy & set(shown.stdout.split()) == set()


@pytest.mark.parametrize("kind", [CapabilityError, InternalError])
def test_errors_keep_their_parts_on_the_way(kind: type[WorkerError]) -> None:
    error = kind("short", where="card", found=5, expected="6 bytes", hint="stop others")
    again = decode_error(encode_error(error))
    assert (type(again), str(again), again.exit_code) == (kind, str(error), error.exit_code)
