"""First uses during the import of torch: what is asked for, what is noted, and when it stops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import CapabilityError, RequestError
from runtime import native_libraries, native_warm_up, torch_preload
from runtime.native_libraries import CREATE, create_handles
from runtime.native_torch import NativeTorch
from runtime.native_warm_up import AUTO, ITEMS, chosen_items, named_items, warm_natively
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


def nothing(native: NativeTorch, items: Collection[str]) -> Iterator[str]:
    return iter(())


def wrong(native: NativeTorch, items: Collection[str]) -> Iterator[str]:
    yield "first"
    native.zero_(object())  # type: ignore[arg-type]


def never() -> bool:
    return False


def test_each_operation_is_timed() -> None:
    facts = warm_natively(find_torch(), "cpu", ("operators",), three, never)
    assert list(facts["seconds"]) == ["first", "second", "third"]
    assert (facts["is_complete"], facts["problems"]) == (True, [])


def test_a_family_without_operations_is_not_warm() -> None:
    """So the conditioner's warm-up is not left out for it."""
    facts = warm_natively(find_torch(), "cpu", ("operators",), nothing, never)
    assert (facts["is_complete"], facts["seconds"], facts["problems"]) == (False, {}, [])


def test_it_stops_when_torch_is_ready() -> None:
    facts = warm_natively(find_torch(), "cpu", ("operators",), three, lambda: True)
    assert list(facts["seconds"]) == ["first"]
    assert (facts["is_complete"], facts["problems"]) == (False, ["torch was ready after first"])


@pytest.mark.parametrize(
    ("install", "operations", "problem"),
    [
        pytest.param(find_torch(), failing, "aoti_torch_call_dispatcher", id="operator"),
        pytest.param(find_torch(), wrong, "argument 1", id="anything else"),
        pytest.param(TorchInstall("/nowhere", "1", has_bytecode=True), three, "libtorch", id="library"),
    ],
)
def test_failures_are_noted_and_end_it(install: TorchInstall, operations: Any, problem: str) -> None:
    facts = warm_natively(install, "cpu", ("operators",), operations, never)
    (found,) = facts["problems"]
    assert problem in found
    assert not facts["is_complete"]


def test_items_are_named() -> None:
    assert named_items("none") == named_items("") == ()
    assert named_items("all") == ITEMS
    assert named_items("attention, libraries") == ("attention", "libraries")
    with pytest.raises(RequestError, match=r"native_warm_up: unknown item; found \['plan'\]"):
        named_items("operators,plan")


@pytest.mark.parametrize(
    ("setting", "version", "items", "problem"),
    [
        ("auto", "2.11.0+cu130", AUTO, ""),
        ("auto", "2.11.0+cpu", (), "torch 2.11.0+cpu is not among"),
        ("auto", "2.11.0+rocm7", (), "torch 2.11.0+rocm7 is not among"),
        ("auto", "2.11.1+cu130", (), "tried with CUDA: 2.11.0"),
        ("auto", "unknown", (), "torch unknown is not among"),
        ("operators", "2.99.0+cu150", ("operators",), ""),  # whoever names items wants to try them
        ("none", "2.11.0+cu130", (), ""),
    ],
)
def test_auto_is_for_releases_that_were_tried(
    setting: str, version: str, items: tuple[str, ...], problem: str
) -> None:
    found, reason = chosen_items(setting, version)
    assert found == items
    assert problem in reason
    assert bool(reason) == bool(problem)


def test_libraries_that_are_not_mapped_are_noted_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    nobodys = [(name, tuple(f"{library}.nobody" for library in libraries)) for name, libraries in CREATE]
    monkeypatch.setattr(native_libraries, "CREATE", nobodys)
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


class Both(dict[str, Any]):
    """Results of a start whose torch is not there yet."""

    is_cancelled = False


def test_what_needs_no_request_does_not_wait_for_it() -> None:
    asked: list[tuple[object, tuple[str, ...]]] = []

    def operations(request: object, native: NativeTorch, items: Collection[str]) -> Iterator[str]:
        asked.append((request, tuple(items)))
        return three(native, items)

    timeline, request = Timeline(), object()
    settings = Settings(bundle="x", device="cpu", native_warm_up="kernels,operators,step")
    start = AnyDevice(settings, timeline, {}, None, None)
    start.preload = Preload()  # type: ignore[assignment]
    results = Both(family=SimpleNamespace(native_operations=operations), request=request)
    start.use_kernels_natively(results)  # type: ignore[arg-type]
    assert (asked, start.done_natively) == ([(None, ("kernels",))], {"kernels"})
    start.warm_up_natively(results)  # type: ignore[arg-type]
    assert asked[1:] == [(request, ("operators", "step"))]
    assert start.done_natively == {"kernels", "operators", "step"}
    assert timeline.facts["native_kernels"]["is_complete"]


class AnyDevice(WorkerStart):
    """Has first uses on a CPU, too."""

    has_first_uses = True  # type: ignore[assignment]


def test_a_request_that_comes_after_torch_is_warmed_up_for_by_torch_alone() -> None:
    start = AnyDevice(Settings(bundle="x", native_warm_up="all", device="cpu"), Timeline(), None, None, None)
    start.preload = Preload()  # type: ignore[assignment]
    start.warm_up_natively(Both(family=None, request=object(), torch=None))  # type: ignore[arg-type]
    assert start.timeline.facts == {"native_warm_up": {"problems": ["torch was ready before the request"]}}


def refuse(request: object, native: NativeTorch, items: Collection[str]) -> Iterator[str]:
    raise CapabilityError("called", where="operations")


@pytest.mark.parametrize(
    ("setting", "device", "request_", "preload"),
    [
        pytest.param("none", "cuda", object(), Preload(), id="off"),
        pytest.param("all", "cpu", object(), Preload(), id="cpu"),
        pytest.param("auto", "cpu", object(), Preload(), id="cpu by default"),
        pytest.param("all", "cuda", None, Preload(), id="no request"),
        pytest.param("all", "cuda", object(), None, id="libraries not mapped ahead"),
    ],
)
def test_nothing_is_done_unless_it_can_help(
    setting: str, device: str, request_: object, preload: Preload | None
) -> None:
    assert noted(setting, device, request_, preload, refuse) is None


def test_a_build_without_the_device_s_library_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install = TorchInstall(str(tmp_path), "2.11.0+cu130", has_bytecode=True)
    monkeypatch.setattr(torch_preload, "find_torch", lambda: install)
    facts = noted("operators", "cuda", object(), Preload(), refuse)
    (problem,) = facts["problems"]
    assert "libtorch" in problem


def test_libraries_that_could_not_be_mapped_are_noted() -> None:
    preload = Preload()
    preload.problem = "no such file"
    assert noted("all", "cuda", object(), preload, refuse) == {"problems": ["no such file"]}


def test_a_release_that_was_not_tried_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_warm_up, "TRIED_RELEASES", frozenset())
    (problem,) = noted("auto", "cuda", object(), Preload(), refuse)["problems"]
    assert "is not among the releases" in problem
