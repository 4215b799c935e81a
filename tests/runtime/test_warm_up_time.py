"""Which part of the first evaluation a start pays for behind its load."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from loader.errors import RequestError
from runtime.nodes import WorkerStart, warm_up_items
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

    def warm_up_denoiser(self, prepared: Any, compute: Any, items: tuple[str, ...]) -> None:
        self.items.append(items)


def started(
    warm_up: str, ready: Iterable[str], device: str = "cuda", is_conditioner_warm: bool = True
) -> tuple[list[tuple[str, ...]], Timeline]:
    """What the family was asked for."""
    timeline, family = Timeline(), Family()
    start = WorkerStart(Settings(bundle="x", device="cpu", warm_up=warm_up), timeline, {}, None, None)
    start.device, start.is_conditioner_warm = device, is_conditioner_warm
    start.weights = Arriving(ready)  # type: ignore[assignment]
    groups = {name: SimpleNamespace(name=name, start=0, end=1) for name in ORDER}
    manifest = SimpleNamespace(groups=groups, orders={"t2va/a": ORDER})
    request = SimpleNamespace(order="t2va/a")
    results = {"manifest": manifest, "family": family, "request": request, "compute": None}
    start.warm_up_denoiser(results)  # type: ignore[arg-type]
    return family.items, timeline


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
    found, timeline = started(warm_up, ENTRY[:num_ready])
    assert found == [items]
    assert timeline.facts["warm_up"] == list(items)


def test_groups_behind_the_entry_do_not_count() -> None:
    assert started("all", ENTRY)[0] == [()]


def test_there_is_time_while_the_conditioner_is_being_warmed() -> None:
    assert started("all", ORDER, is_conditioner_warm=False)[0] == [("memory", "step")]


def test_cpu_has_nothing_to_warm() -> None:
    assert started("all", (), device="cpu")[0] == []


def test_setting_names_items() -> None:
    assert warm_up_items("all") == ("memory", "step")
    assert warm_up_items("none") == warm_up_items("") == ()


def test_unknown_attention_backend_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"attention='fa4'; allowed: 'auto', 'cudnn'.*'flash3'"):
        settings_from_environment({"COLDFRAME_ATTENTION": "fa4"})
