"""The worker process over its protocol: requests during the load, cancellation, failures, cold against warm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.worker_client import REQUEST, Client


@pytest.fixture
def client(bundle: Path) -> Iterator[Client]:
    client = Client(bundle)
    yield client
    client.close()


def test_requests_are_served_in_order_and_cold_equals_warm(client: Client, tmp_path: Path) -> None:
    for job in ("cold", "warm"):
        client.send(op="generate", job=job, request=REQUEST, output=str(tmp_path / f"{job}.mp4"))
    events = client.until("done", job="cold") + client.until("done", job="warm")
    kinds = [event["event"] for event in events]
    assert kinds[0] == "hello"
    assert "ready" in kinds
    assert [e["step"] for e in events if e["event"] == "step" and e["job"] == "cold"] == [1, 2, 3]
    phases = [e["phase"] for e in events if e["event"] == "phase" and e["job"] == "warm"]
    assert phases == ["conditioning", "denoising", "decoding"]
    results = [event["result"] for event in events if event["event"] == "done"]
    assert results[0]["noise_sha256"] == results[1]["noise_sha256"]
    assert (tmp_path / "cold.mp4").read_bytes() == (tmp_path / "warm.mp4").read_bytes()


def test_a_bad_request_is_an_error_of_its_job_only(client: Client, tmp_path: Path) -> None:
    client.send(op="generate", job="bad", request={**REQUEST, "width": 33}, output=str(tmp_path / "bad.mp4"))
    error = client.until("error", job="bad")[-1]["error"]
    assert (error["kind"], error["http_status"]) == ("bad_request", 400)
    assert "width" in error["message"]
    client.send(op="generate", job="good", request=REQUEST, output=str(tmp_path / "good.mp4"))
    client.until("done", job="good")
    assert [path.name for path in tmp_path.iterdir()] == ["good.mp4"]


def test_cancelling_a_queued_and_a_running_job_leaves_nothing(client: Client, tmp_path: Path) -> None:
    long = {**REQUEST, "size": "128x128", "num_frames": 124}
    client.send(op="generate", job="running", request=long, output=str(tmp_path / "running.mp4"))
    client.send(op="generate", job="queued", request=REQUEST, output=str(tmp_path / "queued.mp4"))
    client.until("step", job="running")
    client.send(op="cancel", job="queued")
    client.send(op="cancel", job="running")
    client.until("cancelled", job="running")
    client.until("cancelled", job="queued")
    assert list(tmp_path.iterdir()) == []
    client.send(op="generate", job="next", request=REQUEST, output=str(tmp_path / "next.mp4"))
    client.until("done", job="next")


def test_unreadable_commands_are_answered_and_survived(client: Client, tmp_path: Path) -> None:
    assert client.process.stdin is not None
    client.process.stdin.write("not json\n")
    assert client.until("error")[-1]["error"]["kind"] == "bad_request"
    client.send(op="dance")
    assert "dance" in client.until("error")[-1]["error"]["message"]
    client.send(op="shutdown")
    assert client.process.wait(timeout=60) == 0


def test_a_directory_that_cannot_start_ends_the_process_with_its_code(tmp_path: Path) -> None:
    client = Client(tmp_path)
    error = client.until("error")[-1]
    assert error["job"] is None
    assert error["error"]["kind"] == "bad_artifact"
    assert "manifest.json" in error["error"]["message"]
    assert client.close() == 3
