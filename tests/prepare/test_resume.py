"""A prepare that is killed anywhere continues, keeps finished files, and ends with the same bytes."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import prepare.publish
from loader.errors import ArtifactError
from prepare.family import PrepareOptions
from prepare.pipeline import PrepareResult, prepare_checkpoint
from scripts.tiny_checkpoint import write_tiny_checkpoint
from scripts.tiny_presets import preset
from tests.prepare.conftest import OPTIONS

TreeBytes = Callable[[Path], dict[str, bytes]]
KILLED = 87
NUM_UNITS = 12  # five weight files, four hashed source files and the small ones, both tables, tokenizer
_SERIAL = PrepareOptions(schedules=OPTIONS.schedules, workers=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One weight file per component: every source file is a unit of work."""
    folder = tmp_path_factory.mktemp("whole")
    write_tiny_checkpoint(
        folder, dataclasses.replace(preset("test"), shard_bytes=1 << 30), "diffusers", seed=5
    )
    return folder


@pytest.fixture(scope="module")
def undisturbed(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, tree_bytes: TreeBytes
) -> dict[str, bytes]:
    """What a prepare that nobody kills writes."""
    target = tmp_path_factory.mktemp("undisturbed") / "model"
    prepare_checkpoint(checkpoint, target, _SERIAL)
    return tree_bytes(target)


def _kill_at(call: int, *, after: bool) -> None:
    """End this process, as SIGKILL would, before or after the n-th renaming of a file or folder from now."""
    real, counter = os.replace, iter(range(1, 10_000))

    def replace(source: str | Path, target: str | Path) -> None:
        is_due = next(counter) == call
        if is_due and not after:
            os._exit(KILLED)
        real(source, target)
        if is_due:
            os._exit(KILLED)

    os.replace = replace  # type: ignore[assignment]
    os.rename = replace  # type: ignore[assignment]


def _run_killed(checkpoint: Path, target: Path, call: int, *, after: bool) -> int:
    """Prepare in a forked child; its exit code: KILLED, or 0 if it ended before its time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _kill_at(call, after=after)
            prepare_checkpoint(checkpoint, target, _SERIAL)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _finish(checkpoint: Path, target: Path) -> PrepareResult:
    return prepare_checkpoint(checkpoint, target, _SERIAL)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_again_at_every_file_boundary(
    after: bool, tmp_path: Path, checkpoint: Path, undisturbed: dict[str, bytes], tree_bytes: TreeBytes
) -> None:
    """At most three renamings finish a unit, its files' and the ledger's; every attempt dies at its fourth."""
    target, num_attempts, code = tmp_path / "model", 0, KILLED
    while code == KILLED and not target.exists():
        num_attempts += 1
        assert num_attempts <= 2 * NUM_UNITS
        code = _run_killed(checkpoint, target, 4, after=after)
    assert num_attempts >= 5  # that is: it did die on the way
    assert tree_bytes(target) == undisturbed
    # What a kill after publishing leaves behind goes with the next attempt, which finds the target in place.
    with pytest.raises(ArtifactError, match="target exists"):
        _finish(checkpoint, target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("call", [1, 5, 17, 22])
def test_one_kill_then_a_plain_run(
    call: int, tmp_path: Path, checkpoint: Path, undisturbed: dict[str, bytes], tree_bytes: TreeBytes
) -> None:
    target = tmp_path / "model"
    assert _run_killed(checkpoint, target, call, after=False) == KILLED
    assert not target.exists()
    result = _finish(checkpoint, target)
    assert (result.reused_files > 0) == (call > 1)
    assert tree_bytes(target) == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_finished_files_are_not_written_again(tmp_path: Path, checkpoint: Path) -> None:
    target, partial = tmp_path / "model", tmp_path / ".model.partial" / "model"
    assert _run_killed(checkpoint, target, 9, after=False) == KILLED
    finished = {path: path.stat().st_ino for path in partial.rglob("*.safetensors")}
    assert len(finished) >= 4
    result = _finish(checkpoint, target)
    assert result.reused_files == len(finished)
    kept = [(target / path.relative_to(partial)).stat().st_ino == inode for path, inode in finished.items()]
    assert all(kept)


def test_changed_source_starts_afresh(
    tmp_path: Path, checkpoint: Path, undisturbed: dict[str, bytes], tree_bytes: TreeBytes
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    target = tmp_path / "model"
    assert _run_killed(copy, target, 9, after=False) == KILLED
    os.utime(copy / "audio_vae" / "diffusion_pytorch_model.safetensors", ns=(1, 1))
    result = _finish(copy, target)
    assert result.reused_files == 0
    assert tree_bytes(target) == undisturbed


def test_other_options_start_afresh(tmp_path: Path, checkpoint: Path) -> None:
    target = tmp_path / "model"
    assert _run_killed(checkpoint, target, 9, after=False) == KILLED
    result = prepare_checkpoint(checkpoint, target, PrepareOptions(schedules=("base-2",)))
    assert result.reused_files == 0
    assert not (target / "adaln" / "base-3.t2va.safetensors").exists()


def test_leftovers_and_shortened_files_in_the_partial_folder_do_not_survive(
    tmp_path: Path, checkpoint: Path, undisturbed: dict[str, bytes], tree_bytes: TreeBytes
) -> None:
    target, partial = tmp_path / "model", tmp_path / ".model.partial" / "model"
    assert _run_killed(checkpoint, target, 9, after=False) == KILLED
    (partial / "weights" / "stranger.safetensors").write_bytes(b"x")
    (partial / "weights" / "vae-1.safetensors.writing").write_bytes(b"x")
    with (partial / "weights" / "text_encoder-1.safetensors").open("r+b") as file:
        file.truncate(5000)
    _finish(checkpoint, target)
    assert tree_bytes(target) == undisturbed


def test_damaged_ledger_starts_afresh(
    tmp_path: Path, checkpoint: Path, undisturbed: dict[str, bytes], tree_bytes: TreeBytes
) -> None:
    target = tmp_path / "model"
    assert _run_killed(checkpoint, target, 9, after=False) == KILLED
    (tmp_path / ".model.partial" / prepare.publish.LEDGER_NAME).write_text("{")
    assert _finish(checkpoint, target).reused_files == 0
    assert tree_bytes(target) == undisturbed
