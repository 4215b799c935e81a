"""The program's own command line: usage, exit codes, and what is said when something is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.cli import COMMANDS, VERSION, main

ROOT = Path(__file__).parents[2]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"  {name} " in usage for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"coldframe {VERSION}\n"


@pytest.mark.parametrize("argv", [[], ["server"], ["--bundle"]], ids=["nothing", "unknown", "option"])
def test_usage_errors_go_to_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: coldframe <command>" in err
    assert not argv or repr(argv[0]) in err


def test_a_path_that_cannot_be_used_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "inside"
    assert main(["demo", "--folder", str(folder)]) == 4
    assert capsys.readouterr().err == f"coldframe demo: {folder}: Not a directory\n"


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_extra_is_named_with_its_cure(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from runtime.cli import main;"
        "sys.exit(main(['serve', '--bundle', '/nowhere', '--allow-unauthenticated', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert f"{package}: `coldframe serve` needs a package that is not installed" in done.stderr
    assert "coldframe[serve]" in done.stderr
    assert "Traceback" not in done.stderr
