"""Starts with different settings, dry: real processes on the CPU with a tiny directory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.bench import common
from scripts.bench.full_size import write_full_size
from scripts.bench.start_settings import MARKS, main


def test_every_start_is_kept_and_a_failure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    write_full_size(tmp_path / "bundle", schedules=("base-3",), size="test")
    tries = ["--try", "shipped", "--try", "impossible:COLDFRAME_LOADER_PATH=Z"]
    more = ["--rounds", "1", "--device", "cpu", "--schedule", "base-3", "--name", "tries"]
    assert main([str(tmp_path / "bundle"), *tries, *more]) == 1
    shipped, impossible = json.loads((tmp_path / "results/tries.json").read_text())["figures"]["tries"]
    assert len(shipped["starts"]) == len(impossible["starts"]) == 1
    assert set(shipped["medians"]) == set(MARKS)
    assert {"torch", "conditioner"} <= set(shipped["starts"][0]["spans"])
    assert all("loader_path" in start["error"] for start in impossible["starts"])
    assert impossible["settings"] == {"COLDFRAME_LOADER_PATH": "Z"}
    assert impossible["medians"] == {}


@pytest.mark.parametrize("options", [[], ["--entry-only"]])
def test_a_start_waits_for_all_weights_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no weights here")

    monkeypatch.setattr("scripts.bench.start_settings.subprocess.run", run)
    assert main([str(tmp_path), "--rounds", "1", "--name", "tries", *options]) == 1
    probe = next(command for command in commands if "probe" in command)
    assert ("--wait" in probe) == (not options)


@pytest.mark.parametrize("text", [":A=1", "name:A", "name:=1"])
def test_a_try_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="expected NAME"):
        main(["nowhere", "--try", text])
