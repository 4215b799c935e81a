"""The bench of first uses, dry: real processes on the CPU with tiny sizes, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loader.manifest import read_manifest
from runtime.native_warm_up import ITEMS
from scripts.bench.first_use import main, summary
from scripts.bench.full_size import write_full_size
from scripts.bench.weightless import write_weightless

TINY = ["--device", "cpu", "--preset", "test", "--size", "64x64", "--num-frames", "22", "--name", ""]


def test_a_start_and_its_parts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--runs", "1", "--variant", "parts", "--variant", "native with plan"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts, start = found["parts"]["seconds"], found["native with plan"]
    assert {"torch", "models", "compute again", "kernel: cat", "attention: denoiser again"} <= set(parts)
    assert {"conditioner", "conditioner warm-up again", "denoiser warm-up, after all"} <= set(parts)
    assert {"torch", "library warm-up", "conditioner warm-up", "warm-up"} <= set(start["spans"])
    assert start["entry_after_torch_s"] > start["graph_after_torch_s"] > 0
    native = start["facts"]["native_warm_up"]
    assert native["items"] == list(ITEMS)
    assert [problem for problem in native["problems"] if "torch was ready" not in problem] == []


def test_a_variant_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--runs", "1", "--variant", "now", "--limit-s", "0.01"]
    assert main(arguments) == 1
    streams = capsys.readouterr()
    assert json.loads(streams.out) == {}
    assert "timed out" in streams.err


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
