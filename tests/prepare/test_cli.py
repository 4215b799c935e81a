"""Commands: summaries, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loader.manifest import read_manifest
from prepare.cli import prepare_main, validate_main
from scripts.tiny_checkpoint import write_tiny_checkpoint


def test_prepare_and_validate_print_what_was_made(
    tmp_path: Path, diffusers_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    code = prepare_main([str(diffusers_checkpoint), str(target), "--schedule", "base-2", "--task", "t2va"])
    printed = capsys.readouterr()
    assert code == 0
    assert f"manifest SHA-256: {read_manifest(target).sha256}" in printed.out
    assert f"next: coldframe validate {target}" in printed.out
    assert printed.err == ""  # no progress bar outside a terminal
    assert validate_main([str(target), "--sha256", read_manifest(target).sha256]) == 0
    assert "sound" in capsys.readouterr().out


def test_options_reach_the_manifest(
    tmp_path: Path, native_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    options = ["--schedule", "base-1", "--schedule", "base-2", "--dtype", "float32", "--adaln", "match"]
    origin = ["--repository", "example/model", "--revision", "b8b09e3", "--json"]
    assert prepare_main([str(native_checkpoint), str(target), *options, *origin]) == 0
    result = json.loads(capsys.readouterr().out)
    manifest = json.loads((target / "manifest.json").read_bytes())
    assert result["manifest_sha256"] == read_manifest(target).sha256
    assert manifest["model"]["dtype"] == "F32"
    assert (manifest["source"]["repository"], manifest["source"]["revision"]) == ("example/model", "b8b09e3")
    assert [schedule["mode"] for schedule in manifest["schedules"]] == ["match"] * 4
    assert manifest["options"]["schedules"] == ["base-1", "base-2"]


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (["{c}", "{t}", "--schedule", "uniform-8"], 2, "uniform-8"),
        (["{c}", "{t}", "--task", "ref2va"], 2, "ref2va"),
        (["{c}", "{t}", "--max-file-gib", "0"], 2, "--max-file-gib: must be a positive number"),
        (["{c}", "{t}", "--max-file-gib", "nan"], 2, "--max-file-gib: must be a positive number"),
        (["{c}", "{t}", "--max-file-gib", "inf"], 2, "--max-file-gib: must be a positive number"),
        (["{c}", "{t}", "--workers", "-1"], 2, "--workers: must not be negative"),
        (["{c}"], 2, "target"),
        (["{c}", "{t}", "--dtype", "float16"], 2, "float16"),
        (["{t}", "{t}-2"], 3, "does not exist"),
        (["{c}", "{c}"], 3, "not a prepared directory"),
        (["{c}", "{t}", "--variant", "fasth3"], 3, "fastvideo_inference.json"),
    ],
)
def test_refusals_have_their_exit_code(
    arguments: list[str],
    code: int,
    match: str,
    tmp_path: Path,
    diffusers_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [text.format(c=diffusers_checkpoint, t=tmp_path / "model") for text in arguments]
    assert prepare_main(filled) == code
    printed = capsys.readouterr()
    assert match in printed.err
    assert printed.err.startswith("error: ")
    assert prepare_main([*filled, "--json"]) == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert match in error["message"]
    assert not (tmp_path / "model").exists()


def test_validate_refuses_damage_with_its_exit_code(
    editable_prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (editable_prepared / "weights" / "vae-1.safetensors").unlink()
    assert validate_main([str(editable_prepared)]) == 3
    assert "weights/vae-1.safetensors" in capsys.readouterr().err
    assert validate_main([str(editable_prepared / "weights"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "bad_artifact"


def test_help_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_main(["--help"]) == 0
    assert "--schedule" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]], ids=["one rank", "two"])
def test_what_no_worker_takes_is_said_when_it_is_made(
    ranks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_checkpoint(tmp_path / "checkpoint", "test", "diffusers", seed=1, variant="fasth3")
    assert prepare_main([str(tmp_path / "checkpoint"), str(tmp_path / "model"), *ranks]) == 0
    printed = capsys.readouterr()
    assert "warning: workers of this version refuse it" in printed.err
    assert "video sparse attention" in printed.err
