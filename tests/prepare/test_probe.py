"""The probe runs a fresh process and tells success, refusal, crash and hang apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loader.errors import ArtifactError, CapabilityError, InternalError
from prepare.probe import probe_directory


def _command(body: str) -> list[str]:
    return [sys.executable, "-c", f"import json, sys\n{body}"]


def test_report_of_the_child_is_returned(tmp_path: Path) -> None:
    result = probe_directory(
        tmp_path, _command("print('noise'); print(json.dumps({'directory': sys.argv[1]}))")
    )
    assert result.report == {"directory": str(tmp_path)}
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("code", "kind"), [(3, ArtifactError), (4, CapabilityError), (1, InternalError), (77, InternalError)]
)
def test_exit_code_decides_the_error(code: int, kind: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(kind, match=f"exit code {code}: it broke"):
        probe_directory(tmp_path, _command(f"sys.stderr.write('it broke'); sys.exit({code})"))


def test_killed_child_is_an_internal_error(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="exit code -9"):
        probe_directory(tmp_path, _command("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))


def test_child_that_hangs_is_killed(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="did not end"):
        probe_directory(tmp_path, _command("sys.stdin.read(); import signal; signal.pause()"), timeout_s=0.5)


@pytest.mark.parametrize("output", ["", "print('done')", "print('[1]')"])
def test_child_without_a_report_is_an_internal_error(output: str, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="no JSON object"):
        probe_directory(tmp_path, _command(output))


def test_command_that_does_not_exist_is_an_internal_error(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="cannot start"):
        probe_directory(tmp_path, [str(tmp_path / "nothing")])
