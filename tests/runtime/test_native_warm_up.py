"""First uses during the import of torch: what is asked for, what is noted, and when it stops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import CapabilityError, RequestError
from runtime.native_libraries import CREATE, create_handles
from runtime.native_torch import NativeTorch
from runtime.native_warm_up import chosen_items, warm_natively
from runtime.nodes import WorkerStart
from runtime.settings import Settings
from runtime.timeline import Timeline
from runtime.torch_preload import TorchInstall, find_torch


def three(native: NativeTorch, items: Collection[str]) -> Iterator[str]:
    for name in ("first", "second", "third"):
        native.zero_(native.empty(2, 2))
        yield name


def failing(native: NativeTorch, items: Collection[str]) -> Iterator[str]:
    yield "first"
    native.unary("no_such_operator", native.empty(2))


def never() -> bool:
    return False


def test_each_operation_is_timed() -> None:
    facts = warm_natively(find_torch(), "cpu", ("operators",), three, never)
    assert list(facts["seconds"]) == ["first", "second", "third"]
    assert facts["problems"] == []


def test_it_stops_when_torch_is_ready() -> None:
    facts = warm_natively(find_torch(), "cpu", ("operators",), three, lambda: True)
    assert list(facts["seconds"]) == ["first"]
    assert facts["problems"] == ["torch was ready after first"]


@pytest.mark.parametrize(
    ("install", "operations", "problem"),
    [
        pytest.param(find_torch(), failing, "aoti_torch_call_dispatcher", id="operator"),
        pytest.param(TorchInstall("/nowhere", "1", has_bytecode=True), three, "libtorch", id="library"),
    ],
)
def test_failures_are_noted_and_end_it(install: TorchInstall, operations: Any, problem: str) -> None:
    facts = warm_natively(install, "cpu", ("operators",), operations, never)
    (found,) = facts["problems"]
    assert problem in found


def test_items_are_named() -> None:
    assert chosen_items("none") == chosen_items("") == ()
    assert chosen_items("all") == ("libraries", "operators", "attention")
    assert chosen_items("attention, libraries") == ("attention", "libraries")
    with pytest.raises(RequestError, match=r"native_warm_up: unknown item; found \['plan'\]"):
        chosen_items("operators,plan")


def test_libraries_that_are_not_mapped_are_noted_not_opened() -> None:
    problems = create_handles()
    assert [problem.partition(":")[0] for problem in problems] == [name for name, _ in CREATE]
    assert all("is mapped" in problem for problem in problems)


class Preload:
    problem = ""

    def join(self) -> None: ...


def noted(setting: str, device: str, request: object, preload: Any, operations: Callable[..., Any]) -> Any:
    """What the node of a start notes."""
    timeline = Timeline()
    start = WorkerStart(Settings(bundle="x", device="cpu", native_warm_up=setting), timeline, {}, None, None)
    start.device, start.preload = device, preload
    family = SimpleNamespace(native_operations=operations)
    start.warm_up_natively({"request": request, "family": family})  # type: ignore[arg-type]
    return timeline.facts.get("native_warm_up")


def refuse(request: object, native: NativeTorch, items: Collection[str]) -> Iterator[str]:
    raise CapabilityError("called", where="operations")


@pytest.mark.parametrize(
    ("setting", "device", "request_", "preload"),
    [
        pytest.param("none", "cuda", object(), Preload(), id="off"),
        pytest.param("all", "cpu", object(), Preload(), id="cpu"),
        pytest.param("all", "cuda", None, Preload(), id="no request"),
        pytest.param("all", "cuda", object(), None, id="libraries not mapped ahead"),
    ],
)
def test_nothing_is_done_unless_it_can_help(
    setting: str, device: str, request_: object, preload: Preload | None
) -> None:
    assert noted(setting, device, request_, preload, refuse) is None


def test_a_build_without_the_device_s_library_is_noted() -> None:
    """This torch has no CUDA library."""
    facts = noted("operators", "cuda", object(), Preload(), refuse)
    (problem,) = facts["problems"]
    assert "libtorch" in problem


def test_libraries_that_could_not_be_mapped_are_noted() -> None:
    preload = Preload()
    preload.problem = "no such file"
    assert noted("all", "cuda", object(), preload, refuse) == {"problems": ["no such file"]}
