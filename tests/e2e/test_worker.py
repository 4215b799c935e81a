"""The worker process over its protocol: requests during the load, cancellation, failures, cold against warm."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.load_plan import plan_load
from loader.manifest import Manifest, read_manifest
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


SLOW = {"COLDFRAME_STORAGE_GBPS": "0.002"}  # some seconds for the tiny checkpoint


@pytest.mark.parametrize("how", ["cancel", "SIGTERM"])
def test_a_wait_for_weights_can_be_cancelled(how: str, bundle: Path, tmp_path: Path) -> None:
    """And what was begun with half of the conditioner changes nothing for the next request."""
    client = Client(bundle, **SLOW)
    try:
        client.send(op="generate", job="early", request=REQUEST, output=str(tmp_path / "early.mp4"))
        client.until("phase", job="early")
        if how == "SIGTERM":
            client.process.send_signal(signal.SIGTERM)
        else:
            client.send(op="cancel", job="early")
        events = client.until("cancelled", job="early")
        assert "ready" not in [event["event"] for event in events], "it waited for the load"
        if how == "SIGTERM":
            assert client.process.wait(timeout=30) == 0
            return
        for job in ("next", "again"):
            client.send(op="generate", job=job, request=REQUEST, output=str(tmp_path / f"{job}.mp4"))
        client.until("done", job="next")
        client.until("done", job="again")
        assert (tmp_path / "next.mp4").read_bytes() == (tmp_path / "again.mp4").read_bytes()
    finally:
        client.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.mp4", "next.mp4"]


def test_the_timeline_of_a_load_is_whole_whatever_became_of_the_first_request(
    bundle: Path, tmp_path: Path
) -> None:
    timeline = tmp_path / "start.json"
    client = Client(bundle, "--timeline", str(timeline), **SLOW)
    try:
        client.send(op="generate", job="early", request=REQUEST, output=str(tmp_path / "early.mp4"))
        client.until("phase", job="early")
        client.send(op="cancel", job="early")
        ready = client.until("ready")[-1]["timeline"]
    finally:
        client.close()
    written = json.loads(timeline.read_text())
    assert ready["headline"] == written["headline"]
    assert set(written["headline"]) == {"first_request", "first_read", "torch_ready", "all_weights_resident"}
    names = [event["name"] for event in written["traceEvents"] if event["ph"] == "X"]
    groups = [name for name in names if name.startswith("group ")]
    assert len(groups) == len(set(groups)) == len(read_manifest(bundle).orders["t2va/base-3"])
    assert names.count("load transformer") == names.count("load text_encoder") == 1


def test_damage_found_during_the_load_ends_the_worker_with_its_code(bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    file = max(damaged.rglob("transformer*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-4:] = bytes(255 - byte for byte in data[-4:])
    file.write_bytes(data)
    client = Client(damaged)
    try:
        error = client.until("error")[-1]["error"]
        assert error["kind"] == "bad_artifact"
        assert client.process.wait(timeout=30) == 3
    finally:
        client.close()


def test_a_flipped_bit_is_found_after_the_first_request(bundle: Path, tmp_path: Path) -> None:
    """Where the settings ask for it. The start's edges did not see it; the running request is given up."""
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    largest = max(damaged.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip_inside_a_tensor(read_manifest(damaged), largest, damaged)
    client = Client(damaged, COLDFRAME_REHASH_THREADS="1")
    try:
        long = {**REQUEST, "size": "128x128", "num_frames": 362}
        client.send(op="generate", job="first", request=REQUEST, output=str(tmp_path / "first.mp4"))
        for number in range(50):  # more than is done until the damage is found
            client.send(op="generate", job=f"{number}", request=long, output=str(tmp_path / f"{number}.mp4"))
        client.until("done", job="first")
        error = client.until("error")[-1]
        assert (error["job"], error["error"]["kind"]) == (None, "bad_artifact")
        assert largest.name in error["error"]["message"]
        after = client.rest()
        assert "cancelled" not in [event["event"] for event in after]
        given_up = [event for event in after if event["event"] == "error"]
        assert [event["error"] for event in given_up] in ([error["error"]], [])  # none between two jobs
        assert client.process.wait(timeout=30) == 3
        assert not any((tmp_path / f"{event['job']}.mp4").exists() for event in given_up)
        assert not (tmp_path / "49.mp4").exists()
    finally:
        client.close()


def flip_inside_a_tensor(manifest: Manifest, file: Path, directory: Path) -> None:
    """A byte that is neither in the first nor in the last KiB of the largest tensor of `file`."""
    name = file.relative_to(directory).as_posix()
    plan = plan_load(manifest, list(manifest.groups))
    tensors = [t for t in plan.tensors.values() if plan.files[t.file].path == name]
    tensor = max(tensors, key=lambda t: t.bytes)
    data = bytearray(file.read_bytes())
    data[tensor.file_offset + tensor.bytes // 2] ^= 16
    file.write_bytes(data)


def test_a_sound_directory_is_hashed_and_work_goes_on(bundle: Path, tmp_path: Path) -> None:
    client = Client(bundle, COLDFRAME_REHASH_THREADS="2")
    try:
        for job in ("first", "second"):
            client.send(op="generate", job=job, request=REQUEST, output=str(tmp_path / f"{job}.mp4"))
            client.until("done", job=job)
    finally:
        assert client.close() == 0


def test_without_standard_input_it_ends(bundle: Path) -> None:
    line = [sys.executable, "-m", "runtime.worker", "--bundle", str(bundle), "--device", "cpu"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *line], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
