"""What a reader does when files do not open: tries again, raises its limit, or says whose fault it is."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader import reader as wire
from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError
from loader.header import TensorEntry, build_header
from loader.load_plan import plan_load
from loader.manifest import Manifest
from loader.options import StreamOptions
from loader.plain_files import plan_files
from loader.reader_link import ThreadReader
from loader.stream import start
from tests.loader.prepared import SMALL_ORDER, Prepared

IN_THREADS = StreamOptions(reader="threads")
ROOM = 20  # descriptors for pipes, memory and the process


@pytest.fixture
def many_files(tmp_path: Path) -> Path:
    """More than a process of few descriptors may open."""
    for index in range(100):
        head = build_header([TensorEntry(f"t{index}", "U8", (4,), 0, 4)], {})
        (tmp_path / f"m-{index:03}.safetensors").write_bytes(head + b"data")
    return tmp_path


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """The soft limit leaves this process, and those that it starts, little more than they have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(list(Path("/proc/self/fd").iterdir())) + ROOM
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_reader_process_raises_its_own_limit(many_files: Path, few_descriptors: int) -> None:
    with start(plan_files(many_files), many_files) as stream:
        stream.wait_all()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_descriptors


def test_a_limit_that_may_not_be_raised_is_named(many_files: Path, few_descriptors: int) -> None:
    """Threads of this process leave its limit alone."""
    with (
        start(plan_files(many_files), many_files, options=IN_THREADS) as stream,
        pytest.raises(CapabilityError, match=rf"EMFILE.*limit of {few_descriptors} open files.*100 files"),
    ):
        stream.wait_all()


def refuse(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> None:
    """The first opens of weights fail, each second one only when it is asked what was opened."""
    left = [times]
    stale: list[int] = []
    system_open, system_fstat = os.open, os.fstat

    def fail(path: str | bytes, flags: int, *arguments: int) -> int:
        is_refused = isinstance(path, bytes) and path.endswith(b".safetensors") and left[0]
        left[0] -= 1 if is_refused else 0
        if is_refused and left[0] % 2:
            raise OSError(code, os.strerror(code))
        fd = system_open(path, flags, *arguments)
        stale.extend([fd] if is_refused else [])
        return fd

    def fail_late(fd: int) -> os.stat_result:
        if fd in stale:
            stale.remove(fd)
            raise OSError(code, os.strerror(code))
        return system_fstat(fd)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(os, "fstat", fail_late)
    monkeypatch.setattr(wire, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_an_open_is_tried_again(
    prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse(monkeypatch, code, times=3)
    with start(plan_load(manifest, SMALL_ORDER), prepared.directory, options=IN_THREADS) as stream:
        stream.wait_all()
        retries = [mark.name for mark in stream.marks() if mark.name.startswith("retry")]
    assert [name.split()[:3] for name in retries] == [
        ["retry", str(number), errno.errorcode[code]] for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.EIO, InternalError, "cannot open: EIO.*after 4 attempts"),
        (errno.ENOMEM, CapabilityError, "cannot open: ENOMEM.*memory limit"),
        (errno.ENFILE, CapabilityError, "cannot open: ENFILE.*file-max"),
        (errno.ENXIO, InternalError, "cannot open: ENXIO.*after 1 attempts"),
        (errno.ENOENT, ArtifactError, "No such file.*files are missing"),
        (errno.ENOTDIR, ArtifactError, "Not a directory.*files are missing"),
        (errno.EACCES, ArtifactError, "Permission denied.*files are missing"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else None,
)
def test_an_open_that_fails_says_whose_fault_it_is(
    prepared: Prepared,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[WorkerError],
    text: str,
) -> None:
    refuse(monkeypatch, code, times=1000)
    with (
        start(plan_load(manifest, SMALL_ORDER), prepared.directory, options=IN_THREADS) as stream,
        pytest.raises(kind, match=text),
    ):
        stream.wait_all()


def test_threads_of_finished_gathers_are_let_go(prepared: Prepared, manifest: Manifest) -> None:
    link = ThreadReader()
    with start(plan_load(manifest, SMALL_ORDER), prepared.directory, reader=link) as stream:
        stream.wait_all()
        for _ in range(100):
            assert len(stream.rows_async("embed/table.weight", [0]).bytes) == 48
        assert len(link._reader.threads) < 50
