"""What waits for what at a start: nothing opens a library while torch's are being mapped; the check is in nobody's way."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import CapabilityError, RequestError
from runtime.first_request import FirstRequest
from runtime.nodes import WorkerStart, choose_device
from runtime.settings import Settings
from runtime.startup import Graph, Node, Results
from runtime.timeline import Timeline


class Recorder:
    """A preload and a family that note in which order they are asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def join(self) -> None:
        self.calls.append("mapped")

    def spawn_tokenizer(self) -> None:
        self.calls.append("spawn tokenizer")

    def stop_tokenizer(self) -> None:
        self.calls.append("stop tokenizer")

    def parse(self, body: Any, resolve_image: Any) -> str:
        self.calls.append("parse")
        return "request"

    def prepare(self, request: str) -> Any:
        self.calls.append("prepare")
        return SimpleNamespace(rows={})


def start_of(body: dict[str, object] | None, first: FirstRequest | None = None) -> WorkerStart:
    return WorkerStart(Settings(bundle="x", device="cpu"), Timeline(), body, None, None, first)


@pytest.mark.parametrize(("device", "spawned"), [("cuda", ["spawn tokenizer"]), ("cpu", [])])
def test_the_request_waits_for_the_mapping_of_libraries(device: str, spawned: list[str]) -> None:
    """Preparing it imports extensions, each of which would wait for that with the interpreter's lock."""
    start, recorder = start_of({}), Recorder()
    start.device, start.preload = device, recorder  # type: ignore[assignment]
    start.request({"family": recorder, "load": None})  # type: ignore[arg-type]
    assert recorder.calls == [*spawned, "mapped", "parse", "prepare", "stop tokenizer"]


def test_no_process_is_left_by_a_request_that_is_refused() -> None:
    start, recorder = start_of({}), Recorder()
    start.device, start.preload = "cuda", recorder  # type: ignore[assignment]
    recorder.parse = refuse  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="prompt"):
        start.request({"family": recorder, "load": None})  # type: ignore[arg-type]
    assert recorder.calls == ["spawn tokenizer", "mapped", "stop tokenizer"]


def refuse(body: object, resolve_image: object) -> str:
    raise RequestError("missing", where="prompt")


def test_a_start_without_a_request_waits_for_nothing() -> None:
    start, recorder = start_of(None), Recorder()
    start.preload = recorder  # type: ignore[assignment]
    assert start.request({}) is None  # type: ignore[arg-type]
    assert recorder.calls == []


def test_a_request_that_comes_meanwhile_is_prepared_by_the_start_and_goes_back_to_its_sender() -> None:
    first, recorder = FirstRequest(), Recorder()
    start = start_of(None, first)
    first.offer({"prompt": "rain"})
    start.await_request({})  # type: ignore[arg-type]
    prepared = start.request({"family": recorder, "load": None})  # type: ignore[arg-type]
    assert recorder.calls == ["parse", "prepare", "stop tokenizer"]
    assert first.result() is prepared is not None


@pytest.mark.parametrize("error", [RequestError("missing", where="prompt"), TypeError("no number")])
def test_what_is_wrong_with_a_request_that_comes_meanwhile_does_not_fail_the_start(error: Exception) -> None:
    def fail(body: object, resolve_image: object) -> str:
        raise error

    first, recorder = FirstRequest(), Recorder()
    recorder.parse = fail  # type: ignore[method-assign]
    start = start_of(None, first)
    first.offer({})
    start.await_request({})  # type: ignore[arg-type]
    assert start.request({"family": recorder, "load": None}) is None  # type: ignore[arg-type]
    with pytest.raises(type(error)) as caught:
        first.result()
    assert caught.value is error


def test_a_start_that_fails_stops_waiting_for_a_request() -> None:
    def fail(results: Results) -> None:
        assert waiting.wait(10)
        raise CapabilityError("no torch here")

    def wait_for_request(results: Results) -> None:
        waiting.set()
        wait.run(results)

    waiting, first = threading.Event(), FirstRequest()
    wait = next(node for node in start_of(None, first).nodes() if node.name == "first request")
    nodes = [replace(wait, run=wait_for_request, needs=()), Node("torch", fail)]
    with pytest.raises(CapabilityError):
        Graph(nodes, Timeline()).run()
    assert not first.offer({})


def behind(nodes: dict[str, Node], name: str) -> set[str]:
    """The node's needs, and theirs."""
    needs = set(nodes[name].needs)
    return needs.union(*(behind(nodes, need) for need in needs))


def test_only_what_needs_it_is_behind_torch_and_no_warm_up_behind_its_check() -> None:
    nodes = {node.name: node for node in start_of({}).nodes()}
    assert [name for name in nodes if "torch check" in behind(nodes, name)] == ["engine"]
    assert {name for name in nodes if "torch" in behind(nodes, name)} == {
        "torch check", "engine", "models", "compute", "last call", "library warm-up", "conditioner warm-up",
        "warm-up",
    }  # fmt: skip
    assert "models" not in behind(nodes, "library warm-up")
    assert nodes["torch check"].thread != nodes["models"].thread != nodes["library warm-up"].thread
    # A request that may not come yet is in the way of nothing but what is done for it.
    assert {name for name in nodes if "first request" in behind(nodes, name)} == {
        "request", "native warm-up", "library warm-up", "warm-up",
    }  # fmt: skip
    assert {node.name for node in nodes.values() if node.thread == "request"} == {"first request", "request"}
    on_main = [name for name, node in nodes.items() if node.thread == "main"]
    assert on_main.index("compute") < on_main.index("last call") < on_main.index("warm-up")
    assert nodes["last call"].needs == ("compute",)


@pytest.mark.parametrize(
    ("has_node", "visible", "expected"),
    [
        (True, None, "cuda"),
        (True, "1", "cuda"),
        (True, "", "cpu"),
        (True, "-1", "cpu"),
        (True, "-1,0", "cpu"),
        (True, "NoDevFiles", "cpu"),
        (True, " ", "cpu"),
        (True, "GPU-4f0a,1", "cuda"),
        (True, "MIG-77", "cuda"),
        (False, None, "cpu"),
        (False, "0", "cpu"),
    ],
)
def test_the_device_is_a_gpu_that_is_there_and_not_hidden(
    has_node: bool, visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: has_node and path == "/dev/nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert choose_device("auto") == expected
    assert choose_device("cpu") == "cpu"
    if expected == "cuda":
        assert choose_device("cuda") == "cuda"
    else:
        with pytest.raises(CapabilityError, match="hides all GPUs" if has_node else "no NVIDIA device"):
            choose_device("cuda")
