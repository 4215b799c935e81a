"""Kernels of a prepared directory: compiled on request, listed and hashed like every other file, checked by validate."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.catalog import ModelSizes, specialisations
from kernels.cubin_index import parse_entries
from loader.errors import CapabilityError
from loader.manifest import MANIFEST_NAME, encode_manifest, read_manifest
from prepare.family import PrepareOptions, open_source
from prepare.kernel_files import are_compiled, kernel_entries, kernel_files, write_kernels
from prepare.pipeline import prepare_checkpoint
from prepare.publish import open_staging
from prepare.validate import validate_directory

OPTIONS = PrepareOptions(tasks=("t2va",), schedules=("base-1",), kernels=("sm_90a",), workers=2)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory: pytest.TempPathFactory, diffusers_checkpoint: Path) -> Path:
    target = tmp_path_factory.mktemp("kernels") / "model"
    prepare_checkpoint(diffusers_checkpoint, target, OPTIONS)
    return target


@pytest.fixture
def editable(tmp_path: Path, with_kernels: Path) -> Path:
    """A directory with kernels that the test may damage."""
    return Path(shutil.copytree(with_kernels, tmp_path / "model"))


def _edit_manifest(root: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads((root / MANIFEST_NAME).read_bytes())
    edit(table)
    (root / MANIFEST_NAME).write_bytes(encode_manifest(table))


@needs_triton
def test_every_kernel_of_the_model_is_listed_with_its_file(
    with_kernels: Path, diffusers_checkpoint: Path
) -> None:
    manifest = read_manifest(with_kernels)
    entries = parse_entries(manifest.kernels)
    sizes = open_source(diffusers_checkpoint, OPTIONS).kernel_sizes
    wanted = {(key, "sm_90a") for key in (item.key() for item in specialisations(sizes))}
    assert {((e.operator, tuple(sorted(e.constants.items()))), e.architecture) for e in entries} == wanted
    files = {file.path: (file.size, file.sha256) for file in manifest.files if file.data_start is None}
    assert files.keys() == {"tokenizer/tokenizer.json", "kernels/index.json"} | {
        f"kernels/{e.file}" for e in entries
    }
    assert all(files[f"kernels/{e.file}"] == (e.size, e.sha256) for e in entries)
    assert manifest.options["kernels"] == ["sm_90a"]
    assert validate_directory(with_kernels).problems == ()


@needs_triton
def test_everything_else_is_as_without_kernels(
    tmp_path: Path, with_kernels: Path, diffusers_checkpoint: Path
) -> None:
    prepare_checkpoint(diffusers_checkpoint, tmp_path / "without", replace(OPTIONS, kernels=()))
    one, without = (
        {file.path: file.sha256 for file in read_manifest(root).files}
        for root in (with_kernels, tmp_path / "without")
    )
    assert without == {path: digest for path, digest in one.items() if not path.startswith("kernels/")}


@needs_triton
def test_interrupted_prepare_does_not_compile_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt has no compiler left to start, the third needs one because a file is gone."""
    sizes = ModelSizes(hidden=40, head_dim=24, rotary_dim=16, encoder_hidden=40, encoder_head_dim=24)
    target = tmp_path / "model"
    with open_staging(target, "key", replace=False) as staging:
        write_kernels(staging, sizes, ["sm_90a"], 1)
        first = kernel_files(staging)
    with open_staging(tmp_path / "again", "key", replace=False) as staging:
        write_kernels(staging, sizes, ["sm_90a"], 1)
        assert kernel_files(staging) == first  # the same bytes every time
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with open_staging(target, "key", replace=False) as staging:
        write_kernels(staging, sizes, ["sm_90a"], 1)
        assert kernel_files(staging) == first
        assert len(kernel_entries(staging)) == 1
        (staging.folder / first[-1][0]).unlink()
    with open_staging(target, "key", replace=False) as staging:
        assert not are_compiled(staging)
        with pytest.raises(FileNotFoundError):
            write_kernels(staging, sizes, ["sm_90a"], 1)


def _cubin(root: Path) -> Path:
    return sorted((root / "kernels" / "sm_90a").iterdir())[0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _drop_field(table: dict[str, Any]) -> None:
    del table["kernels"][0]["symbol"]


def _other_sources(table: dict[str, Any]) -> None:
    table["kernels"][0]["source_sha256"] = "0" * 64


def _twice(table: dict[str, Any]) -> None:
    table["kernels"].append(table["kernels"][0])


def _other_digest(table: dict[str, Any]) -> None:
    table["kernels"][0]["sha256"] = "0" * 64


def _outside(table: dict[str, Any]) -> None:
    table["kernels"][0]["file"] = "../manifest.json"


def _no_entries(table: dict[str, Any]) -> None:
    table["kernels"] = []


def _not_listed(table: dict[str, Any]) -> None:
    table["files"] = [file for file in table["files"] if not file["path"].startswith("kernels/")]


ENTRIES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("missing-field", _drop_field, "missing or unknown fields; found ['symbol']"),
    ("other-sources", _other_sources, "compiled from other sources"),
    ("twice", _twice, "listed twice"),
    ("other-digest", _other_digest, "size or SHA-256 differ between kernels and files"),
    ("outside", _outside, "lies outside its folder"),
    ("no-entries", _no_entries, "in no kernel entry"),
    ("not-listed", _not_listed, "not in the manifest"),
]


@needs_triton
@pytest.mark.parametrize(
    ("edit", "match"), [row[1:] for row in ENTRIES], ids=[f"P15-{row[0]}" for row in ENTRIES]
)
def test_malformed_kernel_entry_is_found(
    edit: Callable[[dict[str, Any]], object], match: str, editable: Path
) -> None:
    _edit_manifest(editable, edit)
    problems = validate_directory(editable).problems
    assert any(match in problem for problem in problems), problems


FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("P15-flipped", lambda root: _flip(_cubin(root)), "SHA-256 differs"),
    ("P15-missing", lambda root: _cubin(root).unlink(), "missing or cannot be read"),
    ("P2x-truncated", lambda root: _cubin(root).write_bytes(b"x"), "truncated"),
    (
        "P2x-garbage-index",
        lambda root: (root / "kernels" / "index.json").write_bytes(b"{"),
        "kernel index cannot be read",
    ),
    ("P14-extra", lambda root: _cubin(root).with_name("x.cubin").write_bytes(b"x"), "not in the manifest"),
]


@needs_triton
@pytest.mark.parametrize(("damage", "match"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_damaged_kernel_file_is_found(damage: Callable[[Path], object], match: str, editable: Path) -> None:
    damage(editable)
    problems = validate_directory(editable).problems
    assert any("kernels/" in problem and match in problem for problem in problems), problems


PLAN = {"path": "plans/a.bin", "size": 3, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("plan", "data", "match"),
    [
        pytest.param(PLAN, b"abc", "plans/a.bin: SHA-256 differs", id="P2x-garbage"),
        pytest.param(PLAN, b"ab", "plans/a.bin: truncated", id="P2x-truncated"),
        pytest.param({"path": "plans/a.bin", "size": 3}, b"abc", "malformed entry", id="P2x-no-digest"),
        pytest.param({**PLAN, "size": "3"}, b"abc", "malformed entry", id="P2x-size-is-text"),
        pytest.param({"key": "x"}, b"abc", "malformed entry", id="P2x-no-path"),
        pytest.param(PLAN, None, "plans/a.bin: missing", id="P2x-missing"),
    ],
)
def test_bad_plan_is_found(
    plan: dict[str, object], data: bytes | None, match: str, editable_prepared: Path
) -> None:
    if data is not None:
        (editable_prepared / "plans").mkdir()
        (editable_prepared / "plans" / "a.bin").write_bytes(data)
    _edit_manifest(editable_prepared, lambda table: table["plans"].append(plan))
    problems = validate_directory(editable_prepared).problems
    assert any(match in problem for problem in problems), problems


def test_missing_compiler_is_refused_before_anything_is_written(
    tmp_path: Path, diffusers_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        CapabilityError, match="sm_90a: kernels cannot be compiled: triton is not installed – pip"
    ):
        prepare_checkpoint(diffusers_checkpoint, tmp_path / "model", OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_unknown_architecture_is_refused_before_anything_is_written(
    tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    with pytest.raises(CapabilityError, match=r"unknown architecture; found \['sm_80'\]"):
        prepare_checkpoint(diffusers_checkpoint, tmp_path / "model", replace(OPTIONS, kernels=("sm_80",)))
    assert list(tmp_path.iterdir()) == []
