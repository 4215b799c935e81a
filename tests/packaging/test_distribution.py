"""The five import names are this project's, and the wheel holds what a worker needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
PACKAGES = ("prepare", "runtime", "loader", "kernels", "manifests")


@pytest.mark.parametrize("name", PACKAGES)
def test_import_name_resolves_to_this_project(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)


def test_no_other_distribution_called_kernels_is_installed() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_kernels_init_holds_a_docstring_and_nothing_else() -> None:
    lines = (ROOT / "kernels" / "__init__.py").read_text().strip().splitlines()
    assert lines[0].startswith('"""')
    assert lines[-1].endswith('"""')


def test_wheel_lists_every_module_and_data_file(tmp_path: Path) -> None:
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "scripts/", "app.py")) for name in names)


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()]
    wanted = {
        _name(item)
        for group in [project["project"]["dependencies"], *groups]
        for item in group
        if isinstance(item, str)
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_name(line) for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    assert wanted <= pinned


def _name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-").replace(".", "-")
