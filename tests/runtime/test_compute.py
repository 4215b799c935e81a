"""What a start reports about its attention backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kernels.attention import AttentionChoice, DenseAttention
from runtime.compute import Compute, open_early
from runtime.nodes import WorkerStart
from runtime.ops.attention import attention
from runtime.settings import Settings
from runtime.timeline import Timeline

MATH = AttentionChoice("math", "torch's own")


class Family:
    """Warms up as a family does with a request."""

    def warm_up(self, prepared: Any, compute: Compute) -> None:
        compute.attention(*torch.zeros(5, 3, 2, 8, dtype=torch.bfloat16).unbind(1))


def test_start_reports_the_backend_that_runs_after_the_warm_up() -> None:
    """FlashAttention-3 is chosen by what is installed, and found missing by the first call."""
    dense = DenseAttention(AttentionChoice("flash3", "package fa3_fwd", otherwise=MATH))
    compute = Compute("cpu", dense, attention, facts={"operators": "none"})
    timeline = Timeline()
    timeline.note(**compute.report())
    assert timeline.facts == {"attention": "flash3: package fa3_fwd", "operators": "none"}
    start = WorkerStart(Settings(bundle="x", device="cpu"), timeline, {}, None, None)
    start.device = "cuda"
    start.warm_up({"family": Family(), "request": None, "compute": compute})  # type: ignore[arg-type]
    assert timeline.facts["operators"] == "none"
    assert timeline.facts["attention"] == (
        "math: torch's own; not flash3: FlashAttention-3 is not installed; allowed: ('fa3_fwd', 'flash_attn_3')"
    )


def test_callables_without_a_choice_report_nothing() -> None:
    assert Compute("cpu", attention, attention).report() == {}


def test_kernels_are_left_to_the_choice_where_nothing_can_open_them_early(tmp_path: Path) -> None:
    """Here without a driver; `choose_compute` then says why."""
    assert open_early(tmp_path, []) is None


class Preload:
    def __init__(self) -> None:
        self.joined = False

    def join(self) -> None:
        self.joined = True


def test_kernels_are_opened_behind_the_mapping_of_libraries(tmp_path: Path) -> None:
    start = WorkerStart(Settings(bundle=str(tmp_path), device="cpu"), Timeline(), None, None, None)
    start.device, start.preload = "cuda", Preload()  # type: ignore[assignment]
    manifest = SimpleNamespace(kernels=[])
    assert start.open_kernels({"manifest": manifest}) is None  # type: ignore[arg-type]
    assert start.preload.joined  # type: ignore[union-attr]


def test_kernels_are_not_opened_on_a_cpu() -> None:
    start = WorkerStart(Settings(bundle="x", device="cpu"), Timeline(), None, None, None)
    start.preload = Preload()  # type: ignore[assignment]
    assert start.open_kernels({}) is None  # type: ignore[arg-type]
    assert not start.preload.joined  # type: ignore[union-attr]
