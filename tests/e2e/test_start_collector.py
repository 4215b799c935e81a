"""The garbage collector is off while a worker starts, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.errors import ArtifactError
from runtime import bootstrap
from runtime.settings import Settings


@pytest.fixture(autouse=True)
def collector_on_afterwards() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_start_leaves_the_collector_as_it_was(bundle: Path, is_on: bool) -> None:
    seen: list[bool] = []
    (gc.enable if is_on else gc.disable)()
    engine, _ = bootstrap.start(
        Settings(bundle=str(bundle), device="cpu"), on_family=lambda family: seen.append(gc.isenabled())
    )
    with engine:
        assert seen == [False]
        assert gc.isenabled() == is_on


def test_failed_start_turns_it_on_again(tmp_path: Path) -> None:
    gc.enable()
    with pytest.raises(ArtifactError):
        bootstrap.start(Settings(bundle=str(tmp_path / "nowhere"), device="cpu"))
    assert gc.isenabled()
