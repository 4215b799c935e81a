"""Request shapes of other servers' clients: the same meaning here, or a refusal that names the field."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.service import ServiceProcess

PICTURE = (Path(__file__).parents[2] / "cases/inputs/images/good.png").read_bytes()
URI = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"


def refused(response: Any, status: int, param: str) -> None:
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["detail"] == response.json()["error"]["message"]


# ---- SGLang Diffusion


def test_sglang_json_with_task_conditions_and_target(service: ServiceProcess) -> None:
    body = {
        "model": "minimax_h3", "prompt": "a", "task": "fl2va", "seed": 3, "num_inference_steps": 50,
        "conditions": [{"type": "image", "role": "keyframe", "uri": URI, "frame_index": 0}],
        "target": {"short_edge": 768, "aspect_ratio": "16:9", "duration_seconds": 5},
    }  # fmt: skip
    job = service.client.post("/v1/videos", json=body).json()
    assert (job["size"], job["num_frames"], job["task"], job["seed"]) == ("1344x768", 124, "fl2va", 3)
    done = service.finished(job["id"])
    assert (done["status"], done["peak_memory_mb"]) == ("completed", 41)
    assert "file_path" not in done


def test_sglang_health(service: ServiceProcess) -> None:
    assert service.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "name", ["output_path", "perf_dump_path", "diffusers_kwargs", "text_encoder_model_path"]
)
def test_sglang_paths_are_refused(service: ServiceProcess, name: str) -> None:
    refused(service.client.post("/v1/videos", json={"prompt": "a", name: "/tmp/x"}), 400, name)


def test_sglang_quality_tiers(service: ServiceProcess) -> None:
    assert service.client.post("/v1/videos", json={"prompt": "a", "quality": "extra-high"}).status_code == 200
    refused(service.client.post("/v1/videos", json={"prompt": "a", "quality": "high"}), 422, "quality")


# ---- vLLM-Omni


def test_vllm_omni_form(service: ServiceProcess) -> None:
    data = {
        "prompt": "a", "aspect_ratio": "9:16", "short_edge": "768", "num_outputs_per_prompt": "1", "seconds": "5",
        "image_reference": json.dumps({"image_url": URI}), "extra_params": json.dumps({"seed": 11}), "guidance_scale": "1.0",
    }  # fmt: skip
    response = service.client.post("/v1/videos", files={name: (None, text) for name, text in data.items()})
    assert response.status_code == 200, response.text
    job = response.json()
    assert (job["size"], job["seed"], job["task"]) == ("768x1344", 11, "fl2va")
    done = service.finished(job["id"])
    assert done["fps"] == 24
    assert done["stage_durations"]["denoise"] >= 0


def test_vllm_omni_several_files(service: ServiceProcess) -> None:
    files = [
        ("prompt", (None, "a")),
        ("input_references", ("a.png", PICTURE)),
        ("input_references", ("b.png", PICTURE)),
    ]
    job = service.client.post("/v1/videos", files=files).json()
    service.finished(job["id"])
    assert "pictures ['first_frame', 'last_frame']" in service.worker_lines()


def test_vllm_omni_sync(service: ServiceProcess, mp4: Path) -> None:
    response = service.client.post("/v1/videos/sync", files={"prompt": (None, "a")})
    assert response.status_code == 200
    assert response.headers["content-type"] == "video/mp4"
    assert response.content == mp4.read_bytes()
    assert json.loads(response.headers["x-stage-durations"])["denoise"] >= 0
    assert float(response.headers["x-inference-time-s"]) >= 0
    assert response.headers["x-model"] == "minimax-h3"
    assert response.headers["x-peak-memory-mb"] == "41"
    assert "denoise;dur=" in response.headers["server-timing"]


def test_vllm_omni_more_outputs_are_refused(service: ServiceProcess) -> None:
    refused(
        service.client.post(
            "/v1/videos", data={"prompt": "a", "num_outputs_per_prompt": "2"}, files={"x": b""}
        ),
        400,
        "x",
    )
    refused(
        service.client.post("/v1/videos", json={"prompt": "a", "num_outputs_per_prompt": 2}),
        400,
        "num_outputs_per_prompt",
    )


# ---- FastVideo


def test_fastvideo_extra_body_as_a_form_field(service: ServiceProcess) -> None:
    fields = {
        "prompt": (None, "a"),
        "extra_body": (None, json.dumps({"num_frames": 141, "enable_teacache": False})),
    }
    job = service.client.post("/v1/videos", files=fields).json()
    assert job["num_frames"] == 141
    listed = service.client.get("/v1/videos").json()
    assert listed["object"] == "list"
    assert job["id"] in [video["id"] for video in listed["data"]]


# ---- NVIDIA Dynamo


def dynamo(**fields: Any) -> dict[str, Any]:
    return {
        "model": "minimax_h3",
        "prompt": "a",
        "size": "1344x768",
        "nvext": {"fps": 24, "num_frames": 124, "seed": 5},
        **fields,
    }


def test_dynamo_blocks_and_answers_with_data(service: ServiceProcess, mp4: Path) -> None:
    done = service.client.post("/v1/videos", json=dynamo(response_format="b64_json")).json()
    assert done["status"] == "completed"
    assert done["created"] == done["created_at"]
    entry = done["data"][0]
    assert base64.b64decode(entry["b64_json"]) == mp4.read_bytes()
    assert (entry["output_format"], entry["fps"], entry["audio_sample_rate"]) == ("mp4", 24, 32000)


def test_dynamo_url(service: ServiceProcess, mp4: Path) -> None:
    done = service.client.post("/v1/videos", json=dynamo()).json()
    assert service.client.get(done["data"][0]["url"]).content == mp4.read_bytes()


def test_dynamo_unknown_response_format_and_negative_prompt(service: ServiceProcess) -> None:
    refused(service.client.post("/v1/videos", json=dynamo(response_format="path")), 400, "response_format")
    refused(
        service.client.post("/v1/videos", json=dynamo(nvext={"negative_prompt": "x"})), 422, "negative_prompt"
    )


def test_dynamo_failures_carry_a_status_and_are_not_to_be_retried(service: ServiceProcess) -> None:
    response = service.client.post("/v1/videos", json=dynamo(prompt="[broken]"))
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("path", "options", "field"),
    [
        ("/v1/videos/sync", {"json": {"prompt": "a", "response_format": "b64_json"}}, "response_format"),
        ("/v1/videos/sync", {"json": {"prompt": "a", "stream": True}}, "stream"),
        (
            "/v1/videos",
            {"files": {"prompt": (None, "a"), "response_format": (None, "b64_json")}},
            "response_format",
        ),
    ],
    ids=["file as base64", "file as stream", "form as base64"],
)
def test_answers_that_a_route_cannot_give_are_refused(
    service: ServiceProcess, path: str, options: dict[str, Any], field: str
) -> None:
    before = service.client.get("/v1/videos?limit=1").json()["first_id"]
    refused(service.client.post(path, **options), 400, field)
    assert service.client.get("/v1/videos?limit=1").json()["first_id"] == before


# ---- Prefer, streams


def test_prefer_wait_answers_with_the_finished_object(service: ServiceProcess) -> None:
    response = service.client.post("/v1/videos", json={"prompt": "a"}, headers={"Prefer": "wait=15"})
    assert response.json()["status"] == "completed"
    assert response.headers["preference-applied"] == "wait=15"


def test_prefer_wait_gives_up_without_losing_the_job(service: ServiceProcess) -> None:
    service.gate.unlink(missing_ok=True)
    response = service.client.post("/v1/videos", json={"prompt": "[gate@2]"}, headers={"Prefer": "wait=0"})
    assert response.status_code == 200
    assert response.json()["status"] in ("queued", "in_progress")
    service.gate.touch()
    assert service.finished(response.json()["id"])["status"] == "completed"
    service.gate.unlink()


def parse_stream(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    frames = [
        dict(line.split(": ", 1) for line in frame.split("\n"))
        for frame in text.strip().split("\n\n")
        if frame[0] != ":"
    ]
    return [(int(frame["id"]), frame["event"], json.loads(frame["data"])) for frame in frames]


def test_a_stream_ends_with_the_job_and_numbers_its_events(service: ServiceProcess) -> None:
    response = service.client.post("/v1/videos", json={"prompt": "a", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    events = parse_stream(response.text)
    numbers = [number for number, _, _ in events]
    assert numbers == sorted(set(numbers))
    assert [kind for _, kind, _ in events][-1] == "completed"
    progress = [data["progress"] for _, _, data in events]
    assert progress == sorted(progress)
    phases = list(dict.fromkeys(data["phase"] for _, _, data in events))
    order = ["queued", "loading", "preprocess", "text_encode", "denoise", "decode", "encode", "mux"]
    assert phases == [phase for phase in order if phase in phases]
    assert {"text_encode", "denoise", "decode", "encode", "mux"} <= set(phases)
    assert {data["step"] for _, _, data in events if data["phase"] == "denoise"} >= set(range(1, 9))


def test_a_stream_resumes_after_the_last_event_seen(service: ServiceProcess) -> None:
    service.gate.unlink(missing_ok=True)
    job = service.create("[gate@4]")
    service.at_step(job["id"], 3)
    seen: list[int] = []
    with service.client.stream("GET", f"/v1/videos/{job['id']}/events") as response:
        for line in response.iter_lines():
            if line.startswith("id: "):
                seen.append(int(line[4:]))
            if line.startswith("data: ") and json.loads(line[6:])["step"] == 3:
                break
    service.gate.touch()
    rest = service.client.get(f"/v1/videos/{job['id']}/events", headers={"Last-Event-ID": str(seen[-1])})
    events = parse_stream(rest.text)
    assert events[-1][1] == "completed"
    assert events[0][0] in (seen[-1] + 1, events[-1][0])
    service.gate.unlink()
