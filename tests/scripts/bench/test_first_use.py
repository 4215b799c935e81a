"""The bench of first uses, dry: real processes on the CPU with tiny sizes, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.manifest import read_manifest
from runtime.native_warm_up import ITEMS
from scripts.bench.first_use import main, measure, summary
from scripts.bench.full_size import write_full_size
from scripts.bench.weightless import write_weightless

TINY = ["--device", "cpu", "--preset", "test", "--size", "64x64", "--num-frames", "22", "--name", ""]


def test_a_start_and_its_parts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--runs", "1", "--variant", "parts", "--variant", "all native"]) == 0
    found = json.loads(capsys.readouterr().out)["variants"]
    parts, start = found["parts"]["seconds"], found["all native"]
    assert {"torch", "models", "compute again", "kernel: cat", "attention: denoiser again"} <= set(parts)
    assert {"conditioner", "conditioner warm-up again", "denoiser warm-up, after all"} <= set(parts)
    assert {"torch", "library warm-up", "conditioner warm-up", "warm-up"} <= set(start["spans"])
    assert start["entry_after_torch_s"] > start["graph_after_torch_s"] > 0
    native = [start["facts"][name] for name in ("native_kernels", "native_warm_up")]
    problems = [problem for found in native for problem in found["problems"]]
    done = {item for found in native for item in found.get("items", ())}
    assert done == set(ITEMS) or any("torch was ready" in problem for problem in problems)
    assert [problem for problem in problems if "torch was ready" not in problem] == []


def test_a_variant_that_fails_is_named_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--runs", "1", "--variant", "now", "--limit-s", "0.01"]) == 1
    assert json.loads(capsys.readouterr().out) == {"variants": {}, "failed": {"now": "no end within 0.01 s"}}


def answered(failing: str, seconds: float) -> tuple[list[str], dict[str, int], dict[str, str]]:
    """Order of the processes, reports and failures, with children that answer at once and a clock that they move."""
    order: list[str] = []

    def run(name: str) -> dict[str, Any] | str:
        order.append(name)
        return "exit status 9" if name == failing else {"process_s": 1.0, "facts": {}}

    variants = ("parts", "now", "none", "early")
    reports, failed = measure(variants, run, 3, 20.0, lambda: seconds * len(order))
    return order, {name: len(found) for name, found in reports.items()}, failed


def test_the_others_go_on_and_the_parts_come_last() -> None:
    order, counts, failed = answered("none", 0.1)
    assert order == ["now", "none", "early", "now", "early", "now", "early", "parts"]
    assert counts == {"parts": 1, "now": 3, "none": 0, "early": 3}
    assert failed == {"none": "exit status 9"}


def test_no_round_and_no_parts_are_begun_that_would_end_after_the_budget() -> None:
    assert answered("", 4.0)[0] == ["now", "none", "early", "parts"]  # a round takes 12 of 20 s
    assert answered("", 8.0)[0] == ["now", "none", "early"]


def test_figures_are_medians_by_name() -> None:
    reports = [
        {
            "process_s": seconds,
            "entry_after_torch_s": 2 * seconds,
            "seconds": {"a": {"wall_s": seconds, "cpu_s": 0.0}},
            "spans": {"warm-up": {"start_s": 0.0, "end_s": seconds}},
            "facts": {},
        }
        for seconds in (3.0, 1.0, 2.0)
    ]
    found = summary(reports)
    assert (found["runs"], found["process_s"], found["entry_after_torch_s"]) == (3, 2.0, 4.0)
    assert found["all_process_s"] == [3.0, 1.0, 2.0]
    assert found["seconds"] == {"a": {"wall_s": 2.0, "cpu_s": 0.0}}
    assert found["spans"] == {"warm-up": {"start_s": 0.0, "end_s": 2.0}}


def test_a_directory_without_weights_has_the_manifest_of_one_with(tmp_path: Path) -> None:
    write_weightless(tmp_path / "none", "test", "base-3")
    write_full_size(tmp_path / "all", ("t2va",), ("base-3",), "test")
    none, full = (read_manifest(tmp_path / name) for name in ("none", "all"))
    assert (none.orders, none.groups, none.config) == (full.orders, full.groups, full.config)
    shapes = [{name: (t.dtype, t.shape, t.offset) for name, t in m.tensors.items()} for m in (none, full)]
    assert shapes[0] == shapes[1]
    assert not (tmp_path / "none" / "weights").exists()
