"""The service with the real worker on a tiny checkpoint: the same command line as in production."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from prepare.cli import prepare_main
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.server.spans import trace_of_start
from scripts.tiny_checkpoint import write_tiny_checkpoint
from tests.fakes.service import KEY, ROOT, ServiceProcess, is_running, until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


class RealService(ServiceProcess):
    """`coldframe serve` as users run it."""

    flags: tuple[str, ...] = ()

    def command(self, bundle: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "runtime.cli",
            "serve",
            "--bundle",
            str(self.directory / "tiny"),
            "--state",
            str(self.state),
            *self.flags,
        ]

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        environ = super()._environment(extra)
        del environ["COLDFRAME_SERVE_WORKER_COMMAND"]
        return {**environ, "OMP_NUM_THREADS": "1", "COLDFRAME_DEVICE": "cpu"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint, prepared as `tiny`."""
    directory = tmp_path_factory.mktemp("real")
    write_tiny_checkpoint(directory / "checkpoint", "demo", "native", seed=0)
    options = ["--schedule", "base-8", "--dtype", "float32", "--json"]
    assert prepare_main([str(directory / "checkpoint"), str(directory / "tiny"), *options]) == 0
    return directory


@pytest.fixture(scope="module")
def real(directory: Path) -> Iterator[RealService]:
    service = RealService(directory)
    try:
        until(lambda: service.client.get("/ready").status_code == 200, "the worker is ready", 120)
        yield service
    finally:
        service.close()


def finished(service: RealService, video: str) -> dict[str, Any]:
    return dict(
        until(
            lambda: (job := service.get(video))["status"] in ("completed", "failed") and job,
            "the job ends",
            120,
        )
    )


def test_the_official_client_makes_a_video(real: RealService, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key=KEY) as client:
        job = client.videos.create_and_poll(
            model="minimax-h3", prompt="a harbor at dawn", size="96x64", extra_body={"seed": 7}
        )  # type: ignore[arg-type]
        assert job.status == "completed", job.error
        client.videos.download_content(job.id).write_to_file(tmp_path / "out.mp4")
    extra = job.to_dict()
    report = check_mp4(
        tmp_path / "out.mp4", Mp4Expectation(width=96, height=64, frames=22, allow_silence=True)
    )
    assert report.problems == []
    assert extra["num_frames"] == 22
    assert extra["seed"] == 7


def test_one_seed_makes_one_file_whatever_happened_in_between(real: RealService) -> None:
    fields = {"num_frames": 22, "seed": 3}
    first = finished(real, real.create("same", **fields)["id"])
    cancelled = real.create("cancelled", num_frames=362)["id"]
    until(lambda: real.get(cancelled)["phase"] == "denoise", "it denoises", 60)
    real.client.post(f"/v1/videos/{cancelled}/cancel")
    assert finished(real, cancelled)["error"]["code"] == "cancelled"
    second = finished(real, real.create("same", **fields)["id"])
    assert first["sha256"] == second["sha256"]


def test_keyframes_and_refusals_of_the_real_family(real: RealService) -> None:
    picture = (ROOT / "tests/cases/inputs/images/good.png").read_bytes()
    job = real.client.post("/v1/videos", data={"prompt": "a"}, files={"first_frame": ("a", picture)}).json()
    assert job["task"] == "fl2va"
    assert finished(real, job["id"])["status"] == "completed"
    refused = real.client.post("/v1/videos", json={"prompt": "a", "num_inference_steps": 28})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "schedule_not_prepared")
    long = real.client.post("/v1/videos", json={"prompt": "word " * 12_000})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "prompt_too_long")


def test_the_start_is_told(real: RealService) -> None:
    finished(real, real.create("it belongs to the start if it is the first", num_frames=22)["id"])
    headline = real.client.get("/v1/startup").json()["data"][0]["headline"]
    assert 0 < headline["torch_ready"] < headline["first_dit_entry"] < headline["mp4_complete"]
    assert httpx.get(f"{real.url}/livez").json() == {"status": "ok"}


def test_the_weights_of_the_start_are_counted_and_can_be_traced(real: RealService) -> None:
    text = real.client.get("/metrics").text
    read = dict(re.findall(r'h3_weights_read_bytes_total\{component="(\w+)"\} (\S+)', text))
    took = dict(re.findall(r'h3_weights_read_seconds\{component="(\w+)"\} (\S+)', text))
    assert {"text_encoder", "transformer"} <= set(read) == set(took)
    assert all(float(value) > 0 for value in (*read.values(), *took.values()))
    stored = json.loads(sorted((real.state / "starts").glob("start-*.json"))[-1].read_text())
    trace = trace_of_start(stored)
    assert trace is not None
    # Unix time, not the host's monotonic clock: the start began before it was ready, within this test's limit.
    assert 0 < stored["ready_at"] - trace.root.start_ns / 1e9 < 300
    loads = {
        span.name: span.attributes["coldframe.bytes"]
        for span in trace.children
        if span.name.startswith("load ")
    }
    assert loads == {f"load {component}": int(float(size)) for component, size in read.items()}


def test_a_worker_that_replaces_a_dead_one_starts_with_the_job_that_waits(real: RealService) -> None:
    picture = (ROOT / "tests/cases/inputs/images/good.png").read_bytes()
    doomed = real.create("long", num_frames=362)["id"]
    job = real.client.post("/v1/videos", data={"prompt": "a"}, files={"first_frame": ("a", picture)}).json()
    until(lambda: real.get(doomed)["phase"] == "denoise", "it denoises", 60)
    dead = [entry["pid"] for entry in real.entries() if entry["event"] == "worker started"][-1]
    os.kill(dead, signal.SIGKILL)
    assert finished(real, doomed)["error"]["code"] == "interrupted"
    assert finished(real, job["id"])["status"] == "completed"

    def latest() -> dict[str, Any] | None:
        start: dict[str, Any] = real.client.get("/v1/startup").json()["data"][0]
        return start if start["pid"] != dead else None

    start = until(latest, "the new start is there")
    assert start["facts"]["order"] == "fl2va/base-8"  # not what a start without a request loads
    tracks = {span["name"]: span["track"] for span in start["spans"]}
    assert tracks["request"] == "request"


def test_torch_stays_in_the_worker(real: RealService) -> None:
    assert "/torch/" not in Path(f"/proc/{real.process.pid}/maps").read_text()


def test_a_wrong_setting_of_the_worker_is_said_and_not_tried_again(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(directory / "tiny")
    service = RealService(tmp_path, {"COLDFRAME_VERIFI": "full"})
    try:
        until(lambda: service.client.get("/health").status_code == 503, "the failure shows")
        refused = service.client.post("/v1/videos", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "worker_misconfigured")
        assert sum(entry["event"] == "worker started" for entry in service.entries()) == 1
        assert "COLDFRAME_VERIFI is unknown" in service.log()
    finally:
        service.close()


class RealServiceOnRanks(RealService):
    """Two processes work on every request; on GPUs each has its own."""

    flags = ("--ranks", "2")


@pytest.mark.slow  # 28 s: four processes import torch
def test_two_ranks_are_one_worker(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to(directory / "tiny")
    service = RealServiceOnRanks(tmp_path)
    try:
        until(lambda: service.client.get("/ready").status_code == 200, "both ranks are ready", 120)
        fields = {"num_frames": 22, "seed": 3, "size": "64x64"}
        first = finished(service, service.create("same", **fields)["id"])
        assert first["status"] == "completed", service.log()
        launcher = next(entry["pid"] for entry in service.entries() if entry["event"] == "worker started")
        ranks = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
        assert len(ranks) == 2
        doomed = service.create("long", num_frames=362)["id"]
        until(lambda: service.get(doomed)["phase"] == "denoise", "it denoises", 60)
        os.kill(ranks[1], signal.SIGKILL)
        assert finished(service, doomed)["error"]["code"] == "interrupted"
        until(lambda: not any(map(is_running, ranks)), "no rank is left", 60)
        again = finished(service, service.create("same", **fields)["id"])
        assert again["sha256"] == first["sha256"]
    finally:
        service.close()
