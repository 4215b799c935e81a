"""Which part of the first evaluation a start pays for behind its load."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import RequestError
from runtime.compute import Compute
from runtime.nodes import WorkerStart, warm_up_items
from runtime.ops.attention import attention
from runtime.settings import Settings, settings_from_environment
from runtime.timeline import Timeline

ENTRY = [f"text_encoder/layers.{i}" for i in range(8)] + ["transformer/prelude", "adaln/a.t2va/step.000"]
ORDER = [*ENTRY, "transformer/blocks.0", "transformer/blocks.1", "vae/decoder.heads"]


class Arriving:
    """Weights of which some groups are there."""

    def __init__(self, ready: Iterable[str]) -> None:
        self.ready = set(ready)

    def ensure(self, groups: Iterable[str]) -> None: ...

    def is_ready(self, group: str) -> bool:
        return group in self.ready


class Family:
    def __init__(self) -> None:
        self.items: list[tuple[str, ...]] = []

        self.attention = 0
        self.conditioner = 0

    def warm_up_denoiser(self, prepared: Any, compute: Any, items: tuple[str, ...]) -> bool:
        self.items.append(items)
        return "step" in items

    def warm_up(self, prepared: Any, compute: Any) -> None:
        self.attention += 1

    def warm_up_conditioner(self, prepared: Any, compute: Any) -> None:
        self.conditioner += 1


def started(
    warm_up: str, ready: Iterable[str], device: str = "cuda", is_warm_natively: bool = False
) -> tuple[Family, Timeline]:
    """The family, with what it was asked for."""
    timeline, family = Timeline(), Family()
    start = WorkerStart(Settings(bundle="x", device="cpu", warm_up=warm_up), timeline, {}, None, None)
    start.device = device
    start.weights = Arriving(ready)  # type: ignore[assignment]
    compute = Compute("cpu", attention, attention, facts={"operators": "none"})
    groups = {name: SimpleNamespace(name=name, start=0, end=1) for name in ORDER}
    manifest = SimpleNamespace(groups=groups, orders={"t2va/a": ORDER})
    request = SimpleNamespace(order="t2va/a")
    results = {"manifest": manifest, "family": family, "request": request, "compute": compute}
    if is_warm_natively:
        start.done_natively.update(("kernels", "operators", "step"))
    start.warm_up_conditioner(results)  # type: ignore[arg-type]
    start.warm_up(results)  # type: ignore[arg-type]
    return family, timeline


@pytest.mark.parametrize(
    ("warm_up", "num_ready", "items"),
    [
        ("all", 0, ("memory", "step")),
        ("all", 7, ("memory", "step")),
        ("all", 8, ()),  # two of ten missing: the conditioner is about to be served
        ("all", 10, ()),
        ("none", 0, ()),
        ("memory", 10, ("memory",)),  # named items are measured, whatever the time
        ("memory, products", 10, ("memory", "products")),
    ],
)
def test_items_follow_the_setting_and_what_is_still_to_come(
    warm_up: str, num_ready: int, items: tuple[str, ...]
) -> None:
    family, timeline = started(warm_up, ENTRY[:num_ready])
    assert family.items == [items]
    assert timeline.facts["warm_up"] == list(items)
    assert family.attention == ("step" not in items), "its plan is built once: by the step, or alone"
    assert timeline.facts["operators"] == "none"


def test_groups_behind_the_entry_do_not_count() -> None:
    assert started("all", ENTRY)[0].items == [()]


@pytest.mark.parametrize(
    ("is_warm_natively", "num_ready", "runs"),
    [(False, 0, 1), (False, 10, 1), (True, 0, 1), (True, 7, 1), (True, 8, 0), (True, 10, 0)],
)
def test_the_conditioner_is_not_warmed_twice_before_weights_that_are_there(
    is_warm_natively: bool, num_ready: int, runs: int
) -> None:
    family, timeline = started("all", ENTRY[:num_ready], is_warm_natively=is_warm_natively)
    assert family.conditioner == runs
    assert ("conditioner_warm_up" in timeline.facts) == (not runs)


def test_cpu_has_nothing_to_warm() -> None:
    family, _ = started("all", (), device="cpu")
    assert (family.items, family.attention, family.conditioner) == ([], 0, 0)


def test_setting_names_items() -> None:
    assert warm_up_items("all") == ("memory", "step")
    assert warm_up_items("none") == warm_up_items("") == ()


def test_unknown_attention_backend_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"attention='fa4'; allowed: 'auto', 'cudnn'.*'flash3'"):
        settings_from_environment({"COLDFRAME_ATTENTION": "fa4"})
