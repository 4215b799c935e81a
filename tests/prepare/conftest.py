"""Tiny checkpoints in both layouts and what prepare makes of them, written once per session and never changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
from scripts.tiny_checkpoint import write_tiny_checkpoint

# A short schedule keeps the tables small; base-49 has tests of its own.
OPTIONS = PrepareOptions(schedules=("base-3",), workers=2)


@pytest.fixture(scope="session")
def native_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    write_tiny_checkpoint(folder, "test", "native", seed=5)
    return folder


@pytest.fixture(scope="session")
def diffusers_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusers")
    write_tiny_checkpoint(folder, "test", "diffusers", seed=5)
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, diffusers_checkpoint: Path) -> Path:
    target = tmp_path_factory.mktemp("prepared") / "model"
    prepare_checkpoint(diffusers_checkpoint, target, OPTIONS)
    return target


@pytest.fixture
def editable_checkpoint(tmp_path: Path, diffusers_checkpoint: Path) -> Path:
    """A Diffusers checkpoint that the test may damage."""
    return Path(shutil.copytree(diffusers_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def editable_prepared(tmp_path: Path, prepared: Path) -> Path:
    """A prepared directory that the test may damage."""
    return Path(shutil.copytree(prepared, tmp_path / "prepared"))


@pytest.fixture(scope="session")
def tree_bytes() -> Callable[[Path], dict[str, bytes]]:
    """Relative path -> content of every file of a folder."""
    return lambda folder: {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
