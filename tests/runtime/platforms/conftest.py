"""One MP4 for all fake workers, and their environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.worker import write_mp4


@pytest.fixture(scope="session")
def mp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mp4") / "ready.mp4"
    write_mp4(path, 24)
    return path


@pytest.fixture
def fake_worker(tmp_path: Path, mp4: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Environment of the fake worker; returns the gate's path."""
    monkeypatch.setenv("FAKE_MP4", str(mp4))
    monkeypatch.setenv("FAKE_GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "worker.log"))
    return tmp_path / "gate"
