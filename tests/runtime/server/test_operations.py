"""Health, readiness, metrics, starts, models: what operators see while a worker loads and after."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.server.metrics import TYPES, Metrics
from runtime.server.mp4 import check_container
from runtime.server.starts import Starts
from runtime.server.supervisor import WorkerStatus
from tests.fakes.service import ROOT, ServiceProcess, until

SAMPLE = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)(\{(?:[a-z_]+=\"(?:[^\"\\\n]|\\[\\\"n])*\",?)*\})? (\S+)")


def test_loading_is_healthy_but_not_ready(start: Callable[..., ServiceProcess], tmp_path: Path) -> None:
    gate = tmp_path / "loaded"
    service = start(FAKE_LOADING_GATE=str(gate))
    loading = until(lambda: (h := service.client.get("/health").json())["loaded_bytes"] and h, "bytes arrive")
    assert (loading["status"], loading["phase"]) == ("ok", "loading")
    ready = service.client.get("/readyz")
    assert (ready.status_code, ready.json()["phase"]) == (503, "loading")
    assert service.client.get("/v1/models").json()["data"][0]["state"] == "loading"
    job = service.create("early")
    until(lambda: service.get(job["id"])["phase"] == "loading", "the job waits for weights")
    gate.touch()
    done = service.finished(job["id"])
    assert done["status"] == "completed"
    assert done["cold_start"]["waited_s"] > 0
    assert service.client.get("/readyz").status_code == 200


def parse_metrics(text: str) -> dict[str, float]:
    """Every line is a comment or a sample; samples have a HELP and a TYPE before them."""
    values, known = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            known.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert re.sub(r"_(bucket|sum|count)$", "", match[1]) in known or match[1] in known
            values[match[1] + (match[2] or "")] = float(match[3])
    return values


def test_metrics_after_jobs_of_every_outcome(service: ServiceProcess) -> None:
    for mark in ("", "[broken]", "[refuse]"):
        service.finished(service.create(mark + " x")["id"])
    service.client.get("/v1/videos/nothing")
    response = service.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = parse_metrics(response.text)
    assert values['h3_jobs_total{outcome="completed"}'] == 1
    assert values['h3_jobs_total{outcome="internal"}'] == 1
    assert values['h3_jobs_total{outcome="invalid_request"}'] == 1
    assert values['h3_job_duration_seconds_count{shape="1344x768x124",task="t2va"}'] == 1
    assert values['h3_weights_read_bytes_total{component="text_encoder"}'] == 3 << 30
    assert values['h3_weights_read_bytes_total{component="transformer"}'] == 1 << 30
    assert values['h3_weights_read_seconds{component="transformer"}'] == 1.6
    assert values["h3_jobs_running"] == values["h3_jobs_queued"] == 0
    assert values["h3_worker_ready"] == 1
    assert values["h3_first_dit_forward_seconds"] == 3.3
    assert values['h3_requests_total{route="/v1/videos/{video_id}",status="404"}'] == 1
    assert values['h3_gpu_memory_bytes{kind="peak"}'] == 41e6
    assert 0 < values["h3_server_ready_seconds"] < 60
    assert all(f"# HELP {name} " in response.text for name in TYPES)


def test_unknown_routes_share_one_label(service: ServiceProcess) -> None:
    for index in range(5):
        service.client.get(f"/nothing/{index}")
    text = service.client.get("/metrics").text
    assert "/nothing/" not in text
    assert 'route="unmatched"' in text


@settings(max_examples=100, deadline=None)
@given(st.text(), st.lists(st.floats(0, 1e6), max_size=20))
def test_the_exposition_parses_for_any_label_and_value(label: str, seconds: list[float]) -> None:
    metrics = Metrics()
    metrics.count("h3_errors_total", code="".join(c for c in label if c.isprintable()))
    for value in seconds:
        metrics.observe("h3_queue_wait_seconds", value)
    values = parse_metrics(metrics.render())
    if seconds:
        assert values["h3_queue_wait_seconds_count"] == len(seconds)
        assert values['h3_queue_wait_seconds_bucket{le="+Inf"}'] == len(seconds)


def test_the_last_start_as_data_trace_and_picture(service: ServiceProcess) -> None:
    starts = service.client.get("/v1/startup").json()["data"]
    assert starts[0]["headline"]["first_dit_entry"] == 3.3
    assert {span["track"] for span in starts[0]["spans"]} == {
        "main",
        "reader",
        "uploader",
        "weights",
        "groups",
    }
    assert all(0 <= span["start_s"] <= span["end_s"] for span in starts[0]["spans"])
    trace = service.client.get("/v1/startup", params={"format": "trace"}).json()
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "i"}
    picture = service.client.get("/v1/startup", params={"format": "svg"})
    assert picture.headers["content-type"] == "image/svg+xml"
    assert ET.fromstring(picture.text).tag.endswith("svg")
    missing = service.client.get("/v1/startup", params={"format": "svg", "id": "start-0"})
    assert missing.status_code == 404


def test_the_first_job_completes_the_start(service: ServiceProcess) -> None:
    service.finished(service.create()["id"])
    headline = service.client.get("/v1/startup").json()["data"][0]["headline"]
    assert headline == {
        "first_read": 0.2,
        "torch_ready": 2.9,
        "first_dit_entry": 3.3,
        "all_weights_resident": 3.6,
        "mp4_complete": 9.5,
    }


def test_starts_are_kept_over_restarts_of_the_service(start: Callable[..., ServiceProcess]) -> None:
    first = start().ready()
    made = first.client.get("/v1/startup").json()["data"][0]["id"]
    first.terminate()
    second = start().ready()
    assert made in [entry["id"] for entry in second.client.get("/v1/startup").json()["data"]]


def test_the_model_card_and_its_aliases(service: ServiceProcess) -> None:
    card = service.client.get("/v1/models").json()["data"][0]
    assert card["supported_task_types"] == ["t2va", "fl2va"]
    assert "1344x768" in card["sizes"]
    assert (card["min_seconds"], card["max_seconds"]) == (4.0, 15.0)
    for name in [card["id"], *card["aliases"]]:
        assert service.client.get(f"/v1/models/{name}").json() == card
    assert service.client.get("/v1/models/sora-2").json()["error"]["code"] == "model_not_found"


def test_status_tells_the_place_in_the_queue(service: ServiceProcess) -> None:
    service.gate.unlink(missing_ok=True)
    made = [service.create("[gate@1]")["id"] for _ in range(3)]
    service.at_step(made[0], 0)
    queue = service.client.get("/v1/status").json()["queue"]
    assert (queue["running"], queue["queued"]) == (1, 2)
    assert {entry["id"]: entry["place"] for entry in queue["own"]} == {made[0]: 0, made[1]: 1, made[2]: 2}
    service.gate.touch()
    for video in made:
        service.finished(video)
    service.gate.unlink()


def test_server_timing_on_a_finished_job(service: ServiceProcess) -> None:
    video = service.finished(service.create()["id"])["id"]
    timing = service.client.get(f"/v1/videos/{video}").headers["server-timing"]
    assert re.fullmatch(r"queue;dur=[\d.]+(, (coldstart|encode|denoise|decode|mux);dur=[\d.]+)+", timing)


@pytest.mark.parametrize(
    "path", ["edits", "extensions", "characters", "characters/x", f"video_{'0' * 32}/remix"]
)
def test_operations_of_the_sdk_without_a_counterpart(service: ServiceProcess, path: str) -> None:
    method = "GET" if path == "characters/x" else "POST"
    response = service.client.request(method, f"/v1/videos/{path}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unsupported_operation")


def test_wrong_methods_and_routes_have_the_envelope(service: ServiceProcess) -> None:
    wrong = service.client.put("/v1/videos")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"]
    assert service.client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert service.client.get("/v1/videos/").status_code == 404


def test_logs_are_one_object_a_line_with_ids(service: ServiceProcess) -> None:
    service.client.post("/v1/videos", json={"prompt": "logged"}, headers={"X-Request-Id": "find-me"})
    entry = until(
        lambda: next(
            (e for e in service.entries() if e.get("request_id") == "find-me" and e["event"] == "job ended"),
            None,
        ),
        "the line",
    )
    assert entry["outcome"] == "completed"
    assert entry["job_id"].startswith("video_")
    for line in service.log().splitlines()[:-1]:  # the last one may be being written
        assert isinstance(json.loads(line), dict), line


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "file type"),
        (b"hello", "cut off"),
        (b"\x00\x00\x00\x08moov", "file type"),
        (b"\x00\x00\x00\x08ftyp\x00\x00\x00\x08mdat\x00\x00\x00\x08moov", "after the media"),
        (b"\x00\x00\x00\x08ftyp\x00\x00\x00\x08moov", "missing"),
        (b"\x00\x00\x00\x08ftyp\x00\x00\x00\x08moov\x00\x00\x01\x00mdat", "cut off"),
        (b"\x00\x00\x00\x00ftyp", "cut off"),
    ],
)
def test_containers_that_are_not_playable(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(data)
    assert problem in str(check_container(path))


def test_a_real_file_and_64_bit_boxes_pass(tmp_path: Path, mp4: Path) -> None:
    assert check_container(mp4) is None
    path = tmp_path / "a.mp4"
    path.write_bytes(
        b"\x00\x00\x00\x08ftyp\x00\x00\x00\x08moov\x00\x00\x00\x01mdat" + (16).to_bytes(8, "big")
    )
    assert check_container(path) is None


def test_the_service_imports_nothing_heavy() -> None:
    code = "import json, sys; import runtime.server.main, runtime.server.schema; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    heavy = {
        "torch",
        "numpy",
        "av",
        "PIL",
        "tokenizers",
        "transformers",
        "diffusers",
        "pydantic",
        "fastapi",
        "httpx",
        "openai",
        "cuda",
    }
    assert heavy & {name.split(".")[0] for name in json.loads(done.stdout)} == set()


@pytest.mark.parametrize(
    ("came", "kept"),
    [
        (
            None,
            {"torch_ready", "first_dit_entry", "all_weights_resident"},
        ),  # a start that was told it on its command line
        (0.1, {"torch_ready", "first_dit_entry", "all_weights_resident", "first_request"}),
        (3.5, {"torch_ready", "first_dit_entry", "all_weights_resident", "first_request"}),
        (25.0, {"torch_ready", "all_weights_resident"}),  # before it the worker was idle
    ],
)
def test_waiting_for_a_first_request_is_no_cold_start(
    came: float | None, kept: set[str], tmp_path: Path
) -> None:
    starts = Starts(tmp_path)
    starts.add({"headline": {"torch_ready": 2.9, "all_weights_resident": 3.6}}, WorkerStatus())
    request = {} if came is None else {"first_request": came}
    starts.complete({**request, "first_dit_entry": 0.3 + (came or 3.0)})
    assert set(starts.cold_seconds()) == kept
    metrics = Metrics()
    metrics.replace("h3_cold_start_seconds", "phase", {"first_dit_entry": 1.0})
    metrics.replace("h3_cold_start_seconds", "phase", starts.cold_seconds())
    phases = set(re.findall(r'h3_cold_start_seconds\{phase="(\w+)"\}', metrics.render()))
    assert phases == kept
