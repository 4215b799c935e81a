"""Where a reader process is refused on the CPU, threads take over, whenever that shows, and the marks say why."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loader.errors import InternalError
from loader.header import TensorEntry, build_header
from loader.load_plan import plan_load
from loader.manifest import Manifest
from loader.options import StreamOptions
from loader.plain_files import plan_files
from loader.stream import WeightStream, start
from tests.loader.prepared import SMALL_ORDER, Prepared
from tests.loader.rungs import raw_bytes


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be larger than two pages, the memory that is shared with a process included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def false_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts, and ends without a word."""
    program = shutil.which("false")
    assert program is not None
    monkeypatch.setattr(sys, "executable", program)


def contents(stream: WeightStream) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in stream.state_dict().items()}


def path_marks(stream: WeightStream) -> list[str]:
    return [mark.name for mark in stream.marks() if mark.name.startswith("path E")]


@pytest.mark.usefixtures("small_files")
def test_memory_that_cannot_be_shared_chooses_threads(prepared: Prepared, manifest: Manifest) -> None:
    with start(plan_load(manifest, SMALL_ORDER), prepared.directory) as stream:
        found = contents(stream)
        assert path_marks(stream) == [f"path E, threads: [Errno {errno.EFBIG}] File too large"]
    assert found == {name: prepared.content[name] for name in found}


@pytest.mark.usefixtures("small_files")
def test_a_forced_process_does_not_fall(prepared: Prepared, manifest: Manifest) -> None:
    with pytest.raises(InternalError, match=r"cannot make \d+ bytes of arenas: .*File too large"):
        start(plan_load(manifest, SMALL_ORDER), prepared.directory, options=StreamOptions(reader="child"))


@pytest.mark.usefixtures("false_interpreter")
def test_a_process_that_ends_before_its_first_word_is_replaced_by_threads(
    prepared: Prepared, manifest: Manifest
) -> None:
    plan = plan_load(manifest, SMALL_ORDER, chunk_bytes=4096, hold="dit/blocks.0")
    with start(plan, prepared.directory) as stream:
        request = stream.rows_async("embed/table.weight", [9])
        stream.release()
        found = contents(stream)
        assert request.bytes == prepared.content["embed/table.weight"][432:480]
        assert path_marks(stream) == [
            "path E, child: first choice",
            "path E, threads: no reader process: it ended before its first word: exit code 1",
        ]
    assert found == {name: prepared.content[name] for name in found}


@pytest.mark.usefixtures("false_interpreter")
def test_tensors_without_bytes_do_not_keep_the_memory_of_a_process_that_is_gone(tmp_path: Path) -> None:
    entries = [TensorEntry("full", "U8", (4,), 0, 4), TensorEntry("none", "U8", (0,), 4, 4)]
    (tmp_path / "x.safetensors").write_bytes(build_header(entries, {}) + b"data")
    plan = plan_files(tmp_path, group_of=lambda name: name)
    with start(plan, tmp_path) as stream:
        assert stream.tensor("none").shape == (0,)
        assert raw_bytes(stream.tensor("full")) == b"data"


@pytest.mark.usefixtures("false_interpreter")
def test_a_forced_process_that_ends_is_an_error(prepared: Prepared, manifest: Manifest) -> None:
    options = StreamOptions(reader="child")
    with (
        start(plan_load(manifest, SMALL_ORDER), prepared.directory, options=options) as stream,
        pytest.raises(InternalError, match="reader ended before its work was done: exit code 1"),
    ):
        stream.wait_all()


@pytest.mark.usefixtures("false_interpreter")
def test_a_fall_that_fails_is_told_to_all_who_wait(
    prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = os.pipe

    def refuse() -> tuple[int, int]:
        if threading.current_thread().name == "coldframe-collector":
            raise OSError(errno.EMFILE, "Too many open files")
        return pipe()

    monkeypatch.setattr(os, "pipe", refuse)
    with start(plan_load(manifest, SMALL_ORDER), prepared.directory) as stream:
        with pytest.raises(InternalError, match="Too many open files"):
            _ = stream.rows_async("embed/table.weight", [9]).bytes
        with pytest.raises(InternalError, match="Too many open files") as caught:
            stream.wait_all()
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.usefixtures("false_interpreter")
@pytest.mark.parametrize("times", range(10))
def test_close_at_any_time_of_a_fall(prepared: Prepared, manifest: Manifest, times: int) -> None:
    stream = start(plan_load(manifest, SMALL_ORDER), prepared.directory)
    for _ in range(50 * times):
        os.sched_yield()
    stream.close()
    with pytest.raises(InternalError, match="closed"):
        stream.wait_all()
