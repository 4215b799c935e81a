"""The runner of all benches: limits, logs, results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import suite
from scripts.bench.suite import PARTS, ROOT, Bench, gpu_test_files, run
from tests.fakes.service import is_running, until


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "old.json").write_text("{}")
    monkeypatch.setattr(suite, "RESULTS", folder)
    return folder


def bench(code: str, seconds: int = 60, needs: str = "") -> Bench:
    return Bench("a bench", ("-c", code), seconds, needs)


def outcome(made: Bench, tmp_path: Path, limit_s: float = 60) -> tuple[bool, dict[str, str]]:
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    succeeded = run(made, tmp_path, out, limit_s)
    return succeeded, {path.name: path.read_text() for path in out.iterdir()}


def test_new_results_and_the_log_are_kept(tmp_path: Path, results: Path) -> None:
    code = f"open(r'{results}/new.json', 'w').write('[1]'); print('done')"
    assert outcome(bench(code), tmp_path) == (True, {"a_bench.log": "done\n", "new.json": "[1]"})


def test_a_changed_result_is_kept_as_well(tmp_path: Path, results: Path) -> None:
    code = f"open(r'{results}/old.json', 'w').write(__import__('json').dumps([2]))"
    _, files = outcome(bench(code), tmp_path)
    assert json.loads(files["old.json"]) == [2]


@pytest.mark.usefixtures("results")
def test_a_failure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeeded, files = outcome(bench("raise SystemExit('no GPU here')"), tmp_path)
    assert not succeeded
    assert files["a_bench.log"] == "no GPU here\n"
    assert "a bench: exit code 1" in capsys.readouterr().out


@pytest.mark.usefixtures("results")
def test_a_bench_that_hangs_ends_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import os, time; pid = os.fork(); _ = pid and print(pid, flush=True); time.sleep(600)"
    succeeded, files = outcome(bench(code), tmp_path, limit_s=5)
    assert not succeeded
    assert "a bench: out of time" in capsys.readouterr().out
    child = int(files["a_bench.log"])
    until(lambda: not is_running(child), "the child has ended")


@pytest.mark.usefixtures("results")
def test_what_needs_a_missing_file_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(bench("print(1)", needs="{work}/manifest.json"), tmp_path) == (False, {})
    assert f"left out, {tmp_path}/manifest.json is not there" in capsys.readouterr().out


def test_files_with_gpu_tests_are_found_by_their_text(tmp_path: Path) -> None:
    mark = "pytest.mark."  # apart, so that this file is not one of them
    (tmp_path / "deep").mkdir()
    for name, text in {
        "test_all.py": f"pytestmark = {mark}gpu\n",
        "deep/test_some.py": f"@{mark}gpu\ndef test(): ...\n",
        "test_two.py": f"@{mark}gpu2\ndef test(): ...\n",
        "test_none.py": "import starlette\n",
        "helper.py": f"pytestmark = {mark}gpu\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert gpu_test_files("gpu", tmp_path) == [
        str(tmp_path / "deep/test_some.py"),
        str(tmp_path / "test_all.py"),
    ]
    assert gpu_test_files("gpu2", tmp_path) == [str(tmp_path / "test_two.py")]


@pytest.mark.slow
def test_the_files_found_have_all_gpu_tests() -> None:
    def selected(*paths: str) -> set[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            *paths,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    everywhere = selected("tests")
    assert len(everywhere) > 100
    assert selected(*gpu_test_files("gpu")) == everywhere


@pytest.mark.parametrize("part", PARTS)
def test_every_part_names_modules_that_exist(part: str) -> None:
    root = Path(suite.__file__).parents[2]
    for made in PARTS[part]:
        for name in made.arguments:
            if name.startswith(("scripts.bench.", "runtime.")):
                assert (root / (name.replace(".", "/") + ".py")).is_file(), name
