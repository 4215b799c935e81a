"""Case files sent over a real socket: JSON requests (R), raw bodies (H), pictures as uploads and data URIs (I)."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.service import ServiceProcess, until

INPUTS = Path(__file__).parents[2] / "cases" / "inputs"
CASES: list[dict[str, Any]] = json.loads((INPUTS / "index.json").read_text())
JSON_TYPE = {"Content-Type": "application/json"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=caseboundary"}
HEADERS = {
    "http/multipart_no_boundary": {"Content-Type": "multipart/form-data"},
    "http/json_as_text": {"Content-Type": "text/plain"},
    "http/gzip_bomb": {**JSON_TYPE, "Content-Encoding": "gzip"},
}


def cases(prefix: str) -> Any:
    rows = [case for case in CASES if case["id"].startswith(prefix)]
    return pytest.mark.parametrize("case", rows, ids=[case["id"] for case in rows])


def check(case: dict[str, Any], response: Any, where: str = "") -> None:
    """The answer is what the case asks for: an object, or a refusal that names field or limit."""
    expect, text = case["expect"], response.text.lower()
    assert response.status_code < 500, response.text
    assert "traceback" not in text
    assert response.headers["x-request-id"]
    if expect["outcome"] == "accept":
        assert response.status_code == 200, response.text
    elif expect["outcome"] == "reject":
        assert response.status_code in expect["http"], response.text
        error = response.json()["error"]
        assert error["message"]
        assert error["type"]
        assert any(word.lower() in text for word in [*expect["say"], *([where] if where else [])]), (
            expect["say"],
            text,
        )
    if response.status_code == 200 and "frames" in expect:
        assert response.json()["num_frames"] == expect["frames"]
    if response.status_code == 200 and "seconds" in expect:
        assert float(response.json()["seconds"]) == pytest.approx(expect["seconds"], abs=1e-6)


@cases("R")
def test_json_requests(service: ServiceProcess, case: dict[str, Any]) -> None:
    body = (INPUTS / case["file"]).read_bytes()
    response = service.client.post("/v1/videos", content=body, headers=JSON_TYPE)
    check(case, response)
    for name in case["expect"].get("response_has", ()):
        assert response.json()[name] is not None
    if case["expect"].get("log_must_not_contain") == "payload":
        payload = json.loads(body)["first_frame"][-40:]
        assert payload not in service.log()


@cases("H")
def test_raw_bodies(service: ServiceProcess, case: dict[str, Any]) -> None:
    default = MULTIPART if "multipart" in case["file"] else JSON_TYPE
    before = service.rss_bytes()
    response = service.client.post(
        "/v1/videos", content=(INPUTS / case["file"]).read_bytes(), headers=HEADERS.get(case["file"], default)
    )
    check(case, response)
    if "prompt" in case["expect"]:
        assert response.json()["prompt"] == case["expect"]["prompt"]
    if "limit_mb" in case["expect"]:
        assert service.rss_bytes() - before < case["expect"]["limit_mb"] * 1e6


@cases("I")
@pytest.mark.parametrize("way", ["upload", "data_uri"])
def test_pictures(service: ServiceProcess, case: dict[str, Any], way: str) -> None:
    data = (INPUTS / case["file"]).read_bytes()
    if way == "upload":
        files = {"first_frame": ("../../../../tmp/owned.png", data, "image/png")}
        response = service.client.post("/v1/videos", data={"prompt": "a"}, files=files)
    else:
        uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        response = service.client.post("/v1/videos", json={"prompt": "a", "first_frame": uri})
    check(case, response, "first_frame")
    if response.status_code != 200:
        assert response.json()["error"]["param"] == "first_frame"


def is_idle(service: ServiceProcess) -> bool:
    """A job under way has files of its own."""
    queue = service.client.get("/v1/status").json()["queue"]
    return bool(queue["running"] == queue["queued"] == 0)


def test_no_upload_left_the_job_directories(service: ServiceProcess) -> None:
    assert not Path("/tmp/owned.png").exists()
    until(lambda: is_idle(service), "every job is done")
    names = {
        path.name for path in service.state.rglob("*") if path.is_file() and path.parent.parent.name == "jobs"
    }
    assert names <= {"first_frame.png", "first_frame.jpeg", "first_frame.webp", "video.mp4", "last_frame.png"}
