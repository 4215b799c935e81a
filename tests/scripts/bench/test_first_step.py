"""The bench of the first step, dry: one start of a tiny random directory, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.first_step import _figures, main
from scripts.bench.full_size import write_full_size


def test_a_start_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_full_size(tmp_path / "model", ("t2va",), ("base-3",), "test")
    tiny = ["--device", "cpu", "--size", "64x64", "--num-frames", "22", "--prompt-repeat", "1", "--name", ""]
    options = ["--variant", "memory,step", "--runs", "1", "--steps", "3", "--schedule", "base-3"]
    assert main([str(tmp_path / "model"), *tiny, *options]) == 0
    (figures,) = json.loads(capsys.readouterr().out).values()
    assert figures["first_step_s"] == pytest.approx(figures["all_first_steps_s"][0], abs=1e-4)
    assert figures["first_dit_entry_s"] > 0
    assert figures["warmed"] == [None]  # a CPU has nothing to warm


def test_extra_is_taken_within_each_process() -> None:
    reports = [
        {"steps_s": [2.8, 2.7, 2.6, 2.6], "headline": {"first_dit_entry": 2.4}, "facts": {"warm_up": ["step"]}},
        {"steps_s": [2.5, 2.4, 2.4, 2.4], "headline": {"first_dit_entry": 2.6}, "facts": {}},
        {"steps_s": [2.9, 2.8, 2.8, 2.8], "headline": {"first_dit_entry": 2.5}, "facts": {}},
    ]  # fmt: skip
    found = _figures(reports)
    assert found["extra_s"] == pytest.approx(0.1)
    assert found["share_of_eight_steps"] == pytest.approx(0.1 / (8 * 2.6), abs=1e-5)
    assert found["first_dit_entry_s"] == 2.5
    assert found["warmed"] == [["step"], None, None]
