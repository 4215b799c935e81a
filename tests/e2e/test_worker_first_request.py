"""A worker's first request is the start's: prepared and warmed up for beside the load, whatever becomes of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.errors import RequestError
from runtime import bootstrap
from runtime.family import Family
from runtime.first_request import FirstRequest
from runtime.settings import Settings
from tests.fakes.worker_client import REQUEST, Client

PICTURE = Path(__file__).resolve().parents[1] / "cases/inputs/images/good.png"


@pytest.fixture
def waiting(bundle: Path, tmp_path: Path) -> Iterator[Client]:
    """A worker whose parent has a request for it."""
    client = Client(bundle, "--request-follows", "--timeline", str(tmp_path / "start.json"))
    yield client
    client.close()


def spans(path: Path) -> dict[str, dict[str, Any]]:
    """Spans of the start by name, with their thread's name and their seconds from the origin."""
    events = json.loads(path.read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return {
        event["name"]: {
            "thread": threads[event["tid"]],
            "start_s": event["ts"] / 1e6,
            "end_s": (event["ts"] + event["dur"]) / 1e6,
        }
        for event in events
        if event["ph"] == "X"
    }


def test_it_is_prepared_in_the_start_and_chooses_what_is_loaded(waiting: Client, tmp_path: Path) -> None:
    picture = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    request = {**REQUEST, "first_frame": picture}
    waiting.send(op="generate", job="first", request=request, output=str(tmp_path / "first.mp4"))
    events = waiting.until("done", job="first")
    kinds = [event["event"] for event in events]
    assert kinds[0] == "hello"
    assert kinds.index("accepted") < kinds.index("phase")
    assert waiting.close() == 0  # the timeline is written after the last event
    start = json.loads((tmp_path / "start.json").read_text())
    assert start["facts"]["order"] == "fl2va/base-3"
    found = spans(tmp_path / "start.json")
    assert found["request"]["thread"] == "request"
    assert found["request"]["start_s"] < start["headline"]["torch_ready"]
    assert found["request"]["start_s"] < found["models"]["start_s"]


def test_a_refused_one_is_an_error_of_its_job_and_the_start_goes_on(waiting: Client, tmp_path: Path) -> None:
    bad = {**REQUEST, "width": 33}
    waiting.send(op="generate", job="bad", request=bad, output=str(tmp_path / "bad.mp4"))
    waiting.send(op="generate", job="good", request=REQUEST, output=str(tmp_path / "good.mp4"))
    events = waiting.until("done", job="good")
    errors = [event for event in events if event["event"] == "error"]
    assert [(event["job"], event["error"]["kind"]) for event in errors] == [("bad", "bad_request")]
    assert "width" in errors[0]["error"]["message"]
    assert [event["job"] for event in events if event["event"] == "accepted"] == ["good"]
    assert (tmp_path / "good.mp4").exists()
    assert not (tmp_path / "bad.mp4").exists()
    assert waiting.close() == 0


def test_one_that_is_no_object_is_an_error_and_the_start_goes_on(waiting: Client, tmp_path: Path) -> None:
    waiting.send(op="generate", job="bad", request=["rain"], output=str(tmp_path / "bad.mp4"))
    assert waiting.until("error")[-1]["error"]["kind"] == "bad_request"
    waiting.send(op="generate", job="good", request=REQUEST, output=str(tmp_path / "good.mp4"))
    waiting.until("done", job="good")


def test_one_that_is_cancelled_during_the_start_leaves_nothing(waiting: Client, tmp_path: Path) -> None:
    fragments = tmp_path / "first.fragments"
    waiting.send(
        op="generate", job="first", request=REQUEST, output=str(tmp_path / "first.mp4"), fragments=str(fragments)
    )  # fmt: skip
    waiting.send(op="cancel", job="first")
    waiting.send(op="generate", job="next", request=REQUEST, output=str(tmp_path / "next.mp4"))
    events = waiting.until("done", job="next")
    of_first = [event["event"] for event in events if event.get("job") == "first"]
    assert of_first == ["accepted", "cancelled"]
    assert waiting.close() == 0  # the timeline is written after the last event
    assert {path.name for path in tmp_path.iterdir()} == {"start.json", "start.svg", "next.mp4"}


def test_a_shutdown_during_the_start_comes_after_it(waiting: Client, tmp_path: Path) -> None:
    waiting.send(op="generate", job="first", request=REQUEST, output=str(tmp_path / "first.mp4"))
    waiting.send(op="shutdown")
    waiting.until("done", job="first")
    assert waiting.process.wait(timeout=60) == 0


def test_a_start_that_fails_lets_it_go(tmp_path: Path) -> None:
    client = Client(tmp_path, "--request-follows")
    client.send(op="generate", job="first", request=REQUEST, output=str(tmp_path / "first.mp4"))
    assert client.until("error")[-1]["job"] is None
    assert client.close() == 3


@pytest.mark.parametrize("flags", [(), ("--request-follows",)], ids=["none told", "told and not sent"])
def test_none_is_waited_for_in_vain(bundle: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    client = Client(bundle, "--timeline", str(tmp_path / "start.json"), *flags)
    try:
        client.until("ready")
        facts = json.loads((tmp_path / "start.json").read_text())["facts"]
        assert facts["order"] == "t2va/base-3"
        client.send(op="generate", job="later", request=REQUEST, output=str(tmp_path / "later.mp4"))
        client.until("done", job="later")
    finally:
        assert client.close() == 0


# ---- requests that come while the start is under way


def start_with(bundle: Path, first: FirstRequest, body: dict[str, object]) -> Any:
    """A start that is sent a request when its load has begun."""

    def send(family: Family) -> None:
        assert first.offer(body)

    settings = Settings(bundle=str(bundle), device="cpu")
    engine, prepared = bootstrap.start(settings, on_family=send, first=first)
    engine.close()
    return prepared


def test_one_that_comes_after_the_load_has_begun_is_prepared_in_the_start(bundle: Path) -> None:
    first = FirstRequest()
    prepared = start_with(bundle, first, REQUEST)
    assert prepared is not None
    assert first.result() is prepared
    assert prepared.report["seed"] == REQUEST["seed"]


def test_one_that_comes_then_and_is_refused_does_not_fail_the_start(bundle: Path) -> None:
    first = FirstRequest()
    assert start_with(bundle, first, {**REQUEST, "width": 33}) is None
    with pytest.raises(RequestError, match="width"):
        first.result()


def test_one_that_comes_after_the_start_is_left_to_its_sender(bundle: Path) -> None:
    first = FirstRequest()
    engine, prepared = bootstrap.start(Settings(bundle=str(bundle), device="cpu"), first=first)
    with engine:
        assert prepared is None
        assert not first.offer(REQUEST)
