"""The random directory of released layout is one that `coldframe validate` accepts; tiny sizes here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from loader.manifest import read_manifest
from prepare.validate import validate_directory
from scripts.bench.full_size import write_full_size
from scripts.tiny_presets import TinyConfig, preset

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def _few_kernels() -> TinyConfig:
    """A hidden width that the row kernels cannot do, so that four cubins are compiled instead of thirteen."""
    small = preset("test")
    transformer = dataclasses.replace(small.model.transformer, hidden_size=40)
    return dataclasses.replace(small, model=dataclasses.replace(small.model, transformer=transformer))


@pytest.mark.parametrize(
    "architectures", [(), pytest.param(("sm_90a",), marks=needs_triton)], ids=["plain", "kernels"]
)
def test_directory_is_sound(architectures: tuple[str, ...], tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_full_size(target, ("t2va", "fl2va"), ("base-2",), _few_kernels(), architectures, (1, 2))
    report = validate_directory(target)
    assert report.problems == ()
    manifest = read_manifest(target)
    listed = {file.path for file in manifest.files}
    written = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert written - {"manifest.json"} == listed
    kernels = {f"kernels/{entry['file']}" for entry in manifest.kernels}
    assert kernels == {path for path in listed if path.endswith(".cubin")}
    assert bool(kernels) == bool(architectures)
    options = json.loads((target / "manifest.json").read_bytes())["options"]
    assert options.get("kernels", []) == list(architectures)
