"""What waits for what at a start: nothing opens a library while torch's are being mapped; the check is in nobody's way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import RequestError
from runtime.nodes import WorkerStart
from runtime.settings import Settings
from runtime.startup import Node
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


def start_of(body: dict[str, object] | None) -> WorkerStart:
    return WorkerStart(Settings(bundle="x", device="cpu"), Timeline(), body, None, None)


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


def behind(nodes: dict[str, Node], name: str) -> set[str]:
    """The node's needs, and theirs."""
    needs = set(nodes[name].needs)
    return needs.union(*(behind(nodes, need) for need in needs))


def test_only_what_needs_it_is_behind_torch_and_no_warm_up_behind_its_check() -> None:
    nodes = {node.name: node for node in start_of({}).nodes()}
    assert [name for name in nodes if "torch check" in behind(nodes, name)] == ["engine"]
    assert {name for name in nodes if "torch" in behind(nodes, name)} == {
        "torch check", "engine", "models", "compute", "library warm-up", "conditioner warm-up", "warm-up",
    }  # fmt: skip
    assert "models" not in behind(nodes, "library warm-up")
    assert nodes["torch check"].thread != nodes["models"].thread != nodes["library warm-up"].thread
