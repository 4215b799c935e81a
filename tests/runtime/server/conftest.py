"""One MP4 for all fake workers, and services of the usual kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.service import ServiceProcess
from tests.fakes.worker import write_mp4


@pytest.fixture(scope="session")
def mp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mp4") / "ready.mp4"
    write_mp4(path, 24)
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, mp4: Path) -> Iterator[ServiceProcess]:
    """A service with wide limits, shared by the tests of a module."""
    env = {
        "FAKE_MP4": str(mp4),
        "COLDFRAME_SERVE_MAX_QUEUED": "1000",
        "COLDFRAME_SERVE_MAX_ACTIVE_PER_KEY": "1000",
    }
    process = ServiceProcess(tmp_path_factory.mktemp("service"), env)
    try:
        yield process.ready()
    finally:
        process.close()


@pytest.fixture
def start(tmp_path: Path, mp4: Path) -> Iterator[Callable[..., ServiceProcess]]:
    """Start services with settings of a test's own; a second one of the same test takes over the state."""
    with contextlib.ExitStack() as started:  # the last one first, and all of them whatever happens

        def start_one(**env: str) -> ServiceProcess:
            process = ServiceProcess(tmp_path, {"FAKE_MP4": str(mp4), **env})
            started.callback(process.close)
            return process

        yield start_one
