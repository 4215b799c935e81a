"""The blocking worker child that platforms use: results, refusals, deaths, interruptions."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.errors import InternalError
from runtime.platforms.child import JobFailed, WorkerChild
from runtime.platforms.gpu import GpuRuntime, Publisher, request_of
from runtime.server.config import worker_environment
from runtime.settings import OTHER_PROGRAMS
from tests.fakes.service import ROOT, is_running, until

COMMAND = (sys.executable, str(ROOT / "tests/fakes/worker.py"))


class Interrupted(BaseException):
    """What a platform raises into the thread that runs a job."""


@pytest.fixture
def child(tmp_path: Path, fake_worker: Path) -> Iterator[WorkerChild]:
    child = WorkerChild(tmp_path, COMMAND)
    yield child
    child.close()


def test_a_job_and_its_messages(child: WorkerChild, tmp_path: Path, mp4: Path) -> None:
    seen: list[str] = []
    result = child.run(
        "a", {"prompt": "x", "seed": 3}, tmp_path / "a.mp4", lambda event: seen.append(event["event"])
    )
    assert (tmp_path / "a.mp4").read_bytes() == mp4.read_bytes()
    assert result["seed"] == 3
    assert seen == ["accepted", "phase", "phase", *["step"] * 8, "phase", "phase"]
    assert child.state["phase"] == "ready"


def test_refusals_and_failures_are_told_apart(child: WorkerChild, tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as refusal:
        child.run("a", {"prompt": "[refuse]"}, tmp_path / "a.mp4")
    with pytest.raises(JobFailed) as failure:
        child.run("b", {"prompt": "[broken]"}, tmp_path / "b.mp4")
    assert (refusal.value.is_refusal, failure.value.is_refusal) == (True, False)


def test_a_dead_worker_is_replaced_for_the_next_job(child: WorkerChild, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="the worker died"):
        child.run("a", {"prompt": "[crash@2]"}, tmp_path / "a.mp4")
    assert child.run("b", {"prompt": "x"}, tmp_path / "b.mp4")["frames"] == 124
    log = (tmp_path / "worker.log").read_text().splitlines()
    kinds = [line.split()[0] for line in log if not line.startswith("pictures")]
    assert kinds == [
        "start",
        "generate",
        "start",
        "request",
        "generate",
    ]  # only the second was started for a job


def test_an_interruption_stops_the_job_and_the_same_worker_goes_on(
    child: WorkerChild, tmp_path: Path
) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        child.run("a", {"prompt": "[gate@5]"}, tmp_path / "a.mp4", interrupt)
    assert not (tmp_path / "a.mp4").exists()
    child.run("b", {"prompt": "x"}, tmp_path / "b.mp4")
    log = (tmp_path / "worker.log").read_text().splitlines()
    assert [line for line in log if not line.startswith("pictures")][1:] == [
        "generate a",
        "cancel a",
        "generate b",
    ]


def test_a_signal_in_the_main_thread_is_noticed_while_waiting(child: WorkerChild, tmp_path: Path) -> None:
    def raise_interrupted(*_: object) -> None:
        raise Interrupted

    running = threading.Event()

    def send_signal() -> None:
        assert running.wait(20)
        os.kill(os.getpid(), signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, raise_interrupted)
    watcher = threading.Thread(target=send_signal)
    watcher.start()
    try:
        with pytest.raises(Interrupted):
            child.run("a", {"prompt": "[gate@2]"}, tmp_path / "a.mp4", lambda event: running.set())
    finally:
        watcher.join()
        signal.signal(signal.SIGUSR1, previous)
    assert child.run("b", {"prompt": "x"}, tmp_path / "b.mp4")["frames"] == 124


def test_cancel_from_another_thread(child: WorkerChild, tmp_path: Path) -> None:
    def cancel(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            child.cancel("a")

    with pytest.raises(JobFailed) as failure:
        child.run("a", {"prompt": "[gate@2]"}, tmp_path / "a.mp4", cancel)
    assert failure.value.error["kind"] == "cancelled"


def test_a_job_that_is_cancelled_before_its_turn_never_reaches_the_worker(
    child: WorkerChild, tmp_path: Path
) -> None:
    child.cancel("a")
    with pytest.raises(JobFailed) as end:
        child.run("a", {"prompt": "x"}, tmp_path / "a.mp4")
    assert end.value.error["kind"] == "cancelled"
    assert child.run("b", {"prompt": "x"}, tmp_path / "b.mp4")["frames"] == 124
    assert "generate a" not in (tmp_path / "worker.log").read_text()


def test_close_leaves_no_process_and_no_thread(tmp_path: Path, fake_worker: Path) -> None:
    before = threading.active_count()
    child = WorkerChild(tmp_path, COMMAND)
    child.run("a", {"prompt": "x"}, tmp_path / "a.mp4")
    pid = int((tmp_path / "worker.log").read_text().split()[1])
    child.close()
    child.close()
    assert not is_running(pid)
    assert threading.active_count() == before
    with pytest.raises(InternalError, match="closed"):
        child.run("b", {"prompt": "x"}, tmp_path / "b.mp4")


def test_the_worker_sees_no_secrets() -> None:
    environ = {f"{prefix}X": "secret" for prefix in OTHER_PROGRAMS} | {"COLDFRAME_DEVICE": "cpu"}
    assert worker_environment(environ) == {"COLDFRAME_DEVICE": "cpu"}


# ---- the GPU side of a platform


def test_an_answer_with_its_start_once(tmp_path: Path, fake_worker: Path, mp4: Path) -> None:
    published: list[tuple[str, dict[str, Any]]] = []
    runtime = GpuRuntime(
        tmp_path,
        tmp_path / "out",
        started_ns=0,
        publish=lambda *args: published.append(args),
        command=COMMAND,
    )
    payload = {
        "id": "video_1",
        "request": {"prompt": "x"},
        "pictures": {"first_frame": b"png"},
        "kinds": {"first_frame": "png"},
    }
    first, second = runtime.run(payload), runtime.run({**payload, "id": "video_2", "pictures": {}})
    refused = runtime.run({"id": "video_3", "request": {"prompt": "[refuse]"}})
    runtime.close()
    assert first["start"]["headline"]["first_dit_entry"] == 3.3
    assert "start" not in second
    assert refused["error"]["where"] == "seed"
    assert (tmp_path / "out/video_1/video.mp4").read_bytes() == mp4.read_bytes()
    assert "pictures ['first_frame']" in (tmp_path / "worker.log").read_text()
    assert {job for job, _ in published} <= {"video_1", "video_2", "video_3"}


def test_pictures_become_data_uris() -> None:
    payload = {
        "request": {"prompt": "x"},
        "pictures": {"last_frame": b"\x01"},
        "kinds": {"last_frame": "webp"},
    }
    assert request_of(payload) == {"prompt": "x", "last_frame": "data:image/webp;base64,AQ=="}


def test_a_slow_network_sees_the_last_message_of_each_kind() -> None:
    begun, release, seen = threading.Event(), threading.Event(), []

    def publish(job: str, last: dict[str, Any]) -> None:
        seen.append(last)
        begun.set()
        release.wait(10)

    publisher = Publisher("a", publish)
    publisher.note({"event": "phase", "phase": "denoising"})
    assert begun.wait(10)
    for step in range(1, 5):
        publisher.note({"event": "step", "step": step, "steps": 4})
    release.set()
    until(lambda: len(seen) == 2, "the second message")
    publisher.close()
    assert seen[1] == {"phase": {"phase": "denoising"}, "step": {"step": 4, "steps": 4}}
