"""`fal run fal_app.py::H3Worker --local`: the real server of fal, no account. `PLATFORMS_PYTHON` names a Python that has fal."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from runtime.server.schema import CreateVideo
from tests.fakes.service import ROOT, is_running, until

PYTHON = os.environ.get("PLATFORMS_PYTHON", sys.executable)
NOT_BEHIND_A_QUEUE = {"model", "response_format", "stream"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass
class Runner:
    client: httpx.Client
    directory: Path

    def log(self) -> list[str]:
        path = self.directory / "worker.log"
        return path.read_text().splitlines() if path.exists() else []

    def post(self, prompt: str, **headers: str) -> httpx.Response:
        return self.client.post("/", json={"prompt": prompt, "num_frames": 124}, headers=headers)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def runner(tmp_path: Path, mp4: Path) -> Iterator[Runner]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COLDFRAME_", "FAL_"))}
    environ = {
        **kept,
        "HOME": str(tmp_path),
        "COLDFRAME_FAL_BUNDLE": str(tmp_path),
        "COLDFRAME_FAL_WORKER_COMMAND": f"{PYTHON} {ROOT / 'tests/fakes/worker.py'}",
        "COLDFRAME_FAL_REPOSITORY": "in_memory",
        "FAKE_MP4": str(mp4),
        "FAKE_GATE": str(tmp_path / "gate"),
        "FAKE_LOADING_GATE": str(tmp_path / "loaded"),
        "FAKE_LOG": str(tmp_path / "worker.log"),
    }
    port = free_port()
    command = [PYTHON, "-m", "fal", "run", "fal_app.py::H3Worker", "--local", "--exposed-port", str(port)]
    command += ["--exposed-metrics-port", str(free_port())]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    yield Runner(client, tmp_path)
    (tmp_path / "loaded").touch()
    (tmp_path / "gate").touch()
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    client.close()
    pids = [int(line.split()[1]) for line in Runner(client, tmp_path).log() if line.startswith("start ")]
    until(lambda: not any(is_running(pid) for pid in pids), "the workers end")


def answers(client: httpx.Client, path: str) -> httpx.Response | None:
    try:
        return client.get(path)
    except httpx.TransportError:
        return None


def test_a_runner_from_loading_to_its_end(runner: Runner, mp4: Path) -> None:
    client, directory = runner.client, runner.directory
    assert until(lambda: answers(client, "/health"), "the server listens", 60).status_code == 200
    while_loading = until(lambda: [r for r in [client.post("/ready")] if r.text.count("loading")], "it loads")
    assert while_loading[0].status_code == 200  # 503 would end the runner

    waiting: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: waiting.append(runner.post("early")))
    thread.start()
    assert client.get("/health").status_code == 200
    (directory / "loaded").touch()
    thread.join()
    assert waiting[0].status_code == 200, waiting[0].text
    body = waiting[0].json()
    assert base64.b64decode(body["video"]["url"].split(",")[1]) == mp4.read_bytes()
    assert body["start"]["headline"]["first_dit_entry"] == 3.3
    assert client.post("/ready").json()["phase"] == "ready"

    refused = runner.post("[refuse]")
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["body", "seed"])
    unknown = client.post("/", json={"prompt": "x", "num_frame": 124})
    assert unknown.status_code == 422
    failed = runner.post("[broken]")
    assert failed.status_code == 500
    assert "secret path" not in failed.text

    thread = threading.Thread(
        target=lambda: waiting.append(runner.post("[gate@3]", **{"x-fal-request-id": "request-1"}))
    )
    thread.start()
    until(lambda: runner.log().count("pictures []") == 3, "the job runs")
    assert client.post("/cancel", headers={"x-fal-request-id": "request-1"}).json() == {"cancelled": True}
    thread.join()
    assert waiting[1].status_code == 499
    assert runner.post("after").status_code == 200
    assert client.post("/cancel", headers={"x-fal-request-id": "request-1"}).json() == {"cancelled": False}


def test_the_fields_are_those_of_the_http_api() -> None:
    code = "import json, fal_app; print(json.dumps(sorted(fal_app.VideoIn.model_fields)))"
    done = subprocess.run([PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names: set[Any] = {field.name for field in msgspec.structs.fields(CreateVideo)}
    assert set(json.loads(done.stdout)) == names - NOT_BEHIND_A_QUEUE


def test_the_definition_without_an_account() -> None:
    code = (
        "import json; from fal.app import wrap_app; import fal_app; options = wrap_app(fal_app.H3Worker).options; "
        "print(json.dumps({'host': {k: str(v) for k, v in options.host.items()}}))"
    )
    done = subprocess.run([PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    host = json.loads(done.stdout)["host"]
    assert host["machine_type"] == "GPU-H200"
    assert host["max_multiplexing"] == "1"
    assert (host["request_timeout"], host["startup_timeout"]) == ("1800", "300")
