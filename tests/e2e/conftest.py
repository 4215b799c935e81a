"""One tiny prepared directory for all end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepare.cli import prepare_main
from scripts.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e2e")
    write_tiny_checkpoint(folder / "checkpoint", "test", "native", seed=1)
    options = ["--schedule", "base-3", "--dtype", "float32", "--json"]
    assert prepare_main([str(folder / "checkpoint"), str(folder / "bundle"), *options]) == 0
    return folder / "bundle"
