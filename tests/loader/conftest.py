"""Every test of this folder leaves no child, no descriptor and no thread behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.manifest import Manifest, read_manifest
from tests.loader.prepared import Prepared, write_prepared


def _descriptors() -> set[str]:
    """Targets of open descriptors, without the listing's own and those that a CUDA driver keeps for the process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(f"{entry.name} {entry.readlink()}")
        except OSError:
            continue
    return {text for text in found if "/proc/" not in text and "/dev/nvidia" not in text}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("coldframe")}


def _children() -> list[str]:
    return (Path("/proc/self/task") / str(threading.get_native_id()) / "children").read_text().split()


@pytest.fixture(scope="session")
def cuda_is_open() -> None:
    """The driver opens descriptors at the first use of a process and keeps them."""
    import torch

    torch.zeros(1, device="cuda").cpu()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("cuda_is_open")
    before, children, threads = _descriptors(), _children(), _threads()
    yield
    assert _children() == children
    assert _threads() <= threads
    if _descriptors() - before:
        gc.collect()  # arenas live as long as views in reference cycles
    assert _descriptors() - before == set()


@pytest.fixture(autouse=True)
def faults_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDFRAME_ALLOW_STORAGE_FAULT", "1")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A small directory that no test changes."""
    return write_prepared(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def manifest(prepared: Prepared) -> Manifest:
    return read_manifest(prepared.directory)
