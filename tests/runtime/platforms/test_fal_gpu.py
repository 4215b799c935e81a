"""The runner on fal without fal: requests that wait for each other, and their ends."""

from __future__ import annotations

import concurrent.futures
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.platforms.fal_gpu import Cancelled, FalRuntime, Refused
from tests.fakes.service import ROOT, until

COMMAND = (sys.executable, str(ROOT / "tests/fakes/worker.py"))


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
def runtime(tmp_path: Path, outputs: Path, fake_worker: Path) -> Iterator[FalRuntime]:
    runtime = FalRuntime(tmp_path, outputs, started_ns=time.time_ns(), command=COMMAND)
    yield runtime
    runtime.close()


def test_a_request_becomes_a_file(runtime: FalRuntime, outputs: Path, mp4: Path) -> None:
    answer, path = runtime.run({"prompt": "x", "seed": 3}, "one")
    assert (answer["result"]["seed"], path.read_bytes()) == (3, mp4.read_bytes())
    runtime.discard(path)
    assert list(outputs.iterdir()) == []
    with pytest.raises(Refused) as refusal:
        runtime.run({"prompt": "[refuse]"}, "two")
    assert (refusal.value.status, refusal.value.field) == (400, "seed")
    assert runtime.cancel("two") is False


@pytest.mark.parametrize("stopped", ["running", "waiting"])
def test_a_cancelled_request_makes_no_video_and_the_other_one_does(
    runtime: FalRuntime, outputs: Path, fake_worker: Path, tmp_path: Path, stopped: str
) -> None:
    log = tmp_path / "worker.log"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        requests = {"running": pool.submit(runtime.run, {"prompt": "[gate@3]"}, "running")}
        until(lambda: log.exists() and "generate" in log.read_text(), "the worker has it")
        requests["waiting"] = pool.submit(runtime.run, {"prompt": "x"}, "waiting")
        until(lambda: runtime.cancel(stopped), "the request is known")
        if stopped == "waiting":
            fake_worker.touch()
        with pytest.raises(Cancelled):
            requests.pop(stopped).result(60)
        (made,) = requests.values()
        _, path = made.result(60)
    assert list(outputs.iterdir()) == [path.parent]
    assert log.read_text().count("generate") == (2 if stopped == "running" else 1)
