"""Traces as a real receiver gets them: over OTLP/HTTP, decoded with the protocol's own messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from runtime.server.jobs import Job
from runtime.server.spans import trace_of_job, trace_of_start
from runtime.server.starts import weights_read
from tests.fakes.service import ServiceProcess, until

Start = Callable[..., ServiceProcess]
PHASES = ["preprocess", "text_encode", "denoise", "decode", "encode"]


class Receiver:
    """What a collector does: takes POSTs, answers with protobuf, remembers spans, headers and resources."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        received = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.take(self)

            def log_message(self, *args: Any) -> None:
                """Silence."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        message = ExportTraceServiceRequest.FromString(
            handler.rfile.read(int(handler.headers["Content-Length"]))
        )
        self.requests.append((handler.path, {name.lower(): value for name, value in handler.headers.items()}))
        for group in message.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
            for scope in group.scope_spans:
                self.spans += scope.spans
        answer = ExportTraceServiceResponse().SerializeToString()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/x-protobuf")
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Span) -> list[Span]:
        return [s for s in self.spans if s.parent_span_id == parent.span_id and s.trace_id == parent.trace_id]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def traced(start: Start, directory: Path, endpoint: str, **env: str) -> tuple[ServiceProcess, Path]:
    imports = directory / "imports"
    return start(FAKE_IMPORTS=str(imports), OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, **env), imports


def stored(service: ServiceProcess, video: str) -> Job:
    import sqlite3

    with sqlite3.connect(service.state / "jobs.sqlite3") as database:
        (text,) = database.execute("SELECT document FROM jobs WHERE id = ?", (video,)).fetchone()
    database.close()
    return Job(**json.loads(text))


def test_the_spans_of_a_start_are_those_of_its_timeline(
    start: Start, tmp_path: Path, receiver: Receiver
) -> None:
    service, _ = traced(start, tmp_path, receiver.endpoint)
    service.finished(service.ready().create()["id"])
    (root,) = until(lambda: receiver.named("video") and receiver.named("worker.start"), "the start arrives")
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    origin = timeline["origin_unix_ns"]
    lanes = {e["tid"]: e["args"]["name"] for e in timeline["traceEvents"] if e["ph"] == "M"}
    expected = {
        (
            e["name"],
            lanes[e["tid"]],
            origin + round(e["ts"] * 1e3),
            origin + round((e["ts"] + e["dur"]) * 1e3),
        )
        for e in timeline["traceEvents"]
        if e["ph"] == "X" and lanes[e["tid"]] != "groups"
    }
    children = receiver.below(root)
    found = {
        (s.name, attributes(s)["thread.name"], s.start_time_unix_nano, s.end_time_unix_nano) for s in children
    }
    assert len(children) == len(expected) == 8
    assert found == expected
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (origin, origin + 9_500_000_000)
    assert root.parent_span_id == b""
    assert {e.name: e.time_unix_nano - origin for e in root.events} == {
        "first_read": 200_000_000,
        "torch_ready": 2_900_000_000,
        "first_dit_entry": 3_300_000_000,
        "all_weights_resident": 3_600_000_000,
        "mp4_complete": 9_500_000_000,
    }
    sizes = {s.name: attributes(s).get("coldframe.bytes") for s in children}
    assert (sizes["load text_encoder"], sizes["load transformer"], sizes["import torch"]) == (
        3 << 30,
        1 << 30,
        None,
    )


def test_the_spans_of_a_request_are_its_recorded_times(
    start: Start, tmp_path: Path, receiver: Receiver
) -> None:
    service, _ = traced(start, tmp_path, receiver.endpoint)
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    asked = service.ready().client.post(
        "/v1/videos", json={"prompt": "x"}, headers={"traceparent": caller, "X-Request-Id": "mine"}
    )
    video = asked.json()["id"]
    service.finished(video)
    (root,) = until(lambda: receiver.named("video"), "the request arrives")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == tuple(caller.split("-")[1:3])
    assert root.kind == Span.SPAN_KIND_SERVER
    told = attributes(root)
    assert (told["coldframe.job"], told["coldframe.request_id"], told["coldframe.task"]) == (
        video,
        "mine",
        "t2va",
    )
    job = stored(service, video)
    assert job.started_at is not None
    assert job.completed_at is not None
    assert root.start_time_unix_nano == round(job.created_at * 1e9)
    assert root.end_time_unix_nano == round(job.completed_at * 1e9)
    queue, *phases = receiver.below(root)
    assert (queue.name, queue.start_time_unix_nano) == ("queue", root.start_time_unix_nano)
    border = round(job.started_at * 1e9)
    assert queue.end_time_unix_nano == border
    assert [span.name for span in phases] == [*job.timings, "mux"] == [*PHASES, "mux"]
    *phases, last = phases
    for span in phases:
        assert span.start_time_unix_nano == border
        border += round(job.timings[span.name] * 1e9)
        assert span.end_time_unix_nano == border
    assert (last.start_time_unix_nano, last.end_time_unix_nano) == (border, root.end_time_unix_nano)
    assert {resource["service.name"] for resource in receiver.resources} == {"coldframe"}
    assert receiver.requests[0][0] == "/v1/traces"


def test_nothing_is_imported_before_the_first_request_is_complete(
    start: Start, tmp_path: Path, receiver: Receiver
) -> None:
    gate = tmp_path / "loaded"
    service, imports = traced(start, tmp_path, receiver.endpoint, FAKE_LOADING_GATE=str(gate))
    refused = service.create("[refuse] x")["id"]
    held = service.create("[gate@2] x")["id"]
    gate.touch()
    service.ready()
    assert service.finished(refused)["status"] == "failed"
    service.at_step(held, 1)
    assert not imports.exists()
    assert receiver.requests == []
    service.gate.touch()
    service.finished(held)
    until(lambda: len(receiver.named("video")) == 2, "both requests arrive")
    completed_ns = round((stored(service, held).completed_at or 0.0) * 1e9)
    times = [int(line.split()[0]) for line in imports.read_text().splitlines()]
    assert min(times) >= completed_ns
    failed, made = receiver.named("video")
    assert (failed.status.code, failed.status.message) == (Status.STATUS_CODE_ERROR, "invalid_request")
    assert made.status.code == Status.STATUS_CODE_UNSET
    (began,) = receiver.named("worker.start")
    # The first one was handed over while weights arrived, the other one to a ready worker.
    assert [link.span_id for link in failed.links] == [began.span_id]
    assert list(made.links) == []


def test_the_usual_variables_hold(start: Start, tmp_path: Path, receiver: Receiver) -> None:
    env = {"OTEL_SERVICE_NAME": "films", "OTEL_EXPORTER_OTLP_HEADERS": "x-token=t"}
    service, _ = traced(start, tmp_path, receiver.endpoint, **env)
    service.finished(service.create()["id"])
    until(lambda: receiver.named("video"), "the request arrives")
    assert {resource["service.name"] for resource in receiver.resources} == {"films"}
    assert {headers["x-token"] for _, headers in receiver.requests} == {"t"}


def test_shutdown_sends_what_is_left(start: Start, tmp_path: Path, receiver: Receiver) -> None:
    service, _ = traced(start, tmp_path, receiver.endpoint)
    made = [service.create()["id"] for _ in range(3)]
    for video in made:
        service.finished(video)
    assert service.terminate() == 0
    assert {attributes(span)["coldframe.job"] for span in receiver.named("video")} == set(made)


def test_without_the_variable_nothing_is_imported(start: Start, tmp_path: Path) -> None:
    service, imports = traced(start, tmp_path, "")
    service.finished(service.create()["id"])
    assert service.terminate() == 0
    assert not imports.exists()


def test_missing_packages_are_one_warning(start: Start, tmp_path: Path) -> None:
    service, _ = traced(start, tmp_path, "http://127.0.0.1:1", FAKE_NO_OTEL="1")
    for _ in range(2):
        service.finished(service.create()["id"])
    warning = until(
        lambda: [e for e in service.entries() if "OpenTelemetry is not installed" in e["event"]], "it"
    )
    assert service.terminate() == 0
    assert [entry["level"] for entry in warning] == ["warning"]
    assert warning[0]["hint"] == "pip install 'coldframe[otel]'"


def test_a_receiver_that_is_not_there_costs_nothing_but_log_lines(start: Start, tmp_path: Path) -> None:
    service, _ = traced(start, tmp_path, "http://127.0.0.1:1", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    for _ in range(2):
        assert service.finished(service.create()["id"])["status"] == "completed"
    until(lambda: [e for e in service.entries() if e["logger"].startswith("opentelemetry")], "it is logged")
    assert service.terminate() == 0


@pytest.mark.parametrize(
    "trace", [{}, {"traceEvents": [7, {"ph": "X", "name": "load x"}]}], ids=["none", "odd"]
)
def test_a_broken_timeline_has_no_trace_and_no_figures(trace: dict[str, Any]) -> None:
    start = {"id": "start-1", "trace": trace}
    assert trace_of_start(start) is None
    assert weights_read(start) == {}


def test_a_job_that_ran_twice_has_no_phases() -> None:
    job = Job(
        "video_1", "o", "m", 10.0, {}, {}, started_at=20.0, completed_at=30.0, timings={"denoise": 25.0}, attempts=2
    )  # fmt: skip
    assert [span.name for span in trace_of_job(job).children] == ["queue"]
