"""A file without a name: when it gets one, and that a killed process leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.media.unnamed_file import UnnamedFile

ROOT = Path(__file__).parents[3]
# Writes two of three units, says so, and waits to be killed.
WRITER = """
import sys
from pathlib import Path
from runtime.media.encode import Mp4Writer
from tests.runtime.media.clips import moving_frames, tone
with Mp4Writer(Path(sys.argv[1]), 48, 32, frames=51, threads=1) as writer:
    writer.add_sound(tone(51))
    writer.add_frames(moving_frames(17))
    writer.add_frames(moving_frames(17))
    writer._muxed[1].result()
    print(writer._file._file.path.stat().st_size, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["without a name", "with a hidden name"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The second one as on systems that have no files without a name; the first only where the file system has them."""
    if request.param == "without a name":
        probe = UnnamedFile(tmp_path / "probe")
        has_name = probe.has_name
        probe.discard()
        if has_name:
            pytest.skip("this file system has no files without a name")
    if request.param == "with a hidden name":
        monkeypatch.delattr(os, "O_TMPFILE")
    return str(request.param)


def test_it_appears_with_its_content_or_not_at_all(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "clip.mp4"
    for content in (b"first", b"second, which replaces the first"):
        file = UnnamedFile(target)
        assert file.has_name == (kind == "with a hidden name")
        file.path.write_bytes(content)
        assert not target.exists() or target.read_bytes() == b"first"
        file.commit()
        file.discard()
        assert target.read_bytes() == content
        assert list(tmp_path.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_discarding_leaves_the_old_file(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "clip.mp4"
    target.write_bytes(b"old")
    file = UnnamedFile(target)
    file.path.write_bytes(b"new")
    file.discard()
    file.discard()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_file_system_that_refuses_links_gets_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    file = UnnamedFile(tmp_path / "clip.mp4")
    file.path.write_bytes(b"content")
    file.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
    assert (tmp_path / "clip.mp4").read_bytes() == b"content"


def test_targets_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        UnnamedFile(tmp_path / "absent" / "clip.mp4")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        UnnamedFile(tmp_path / "folder")


def test_a_writer_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    line = [sys.executable, "-c", WRITER, str(tmp_path / "clip.mp4")]
    child = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        assert int(child.stdout.readline()) > 0  # bytes of the file are on the disk
        child.kill()
        child.wait(20)
    assert list(tmp_path.iterdir()) == []
