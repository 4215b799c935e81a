"""One prepare per target, enough disk space, and a target that is complete or absent."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loader.errors import ArtifactError, CapabilityError
from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
from prepare.publish import open_staging
from tests.prepare.conftest import OPTIONS

TreeBytes = Callable[[Path], dict[str, bytes]]

_HOLDER = """
import sys
from pathlib import Path
from prepare.publish import open_staging
with open_staging(Path(sys.argv[1]), "key", replace=False):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_second_prepare_of_a_target_is_refused_while_the_first_runs(
    tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    target = tmp_path / "model"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CapabilityError, match=f"process {holder.pid}"):
            prepare_checkpoint(diffusers_checkpoint, target, OPTIONS)
        with open_staging(tmp_path / "other", "key", replace=False):
            pass  # another target is free
        holder.kill()
    # The lock of a killed process is gone with it.
    prepare_checkpoint(diffusers_checkpoint, target, OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.partial", "model"]


def test_missing_disk_space_is_refused_before_the_first_byte(
    tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    target = tmp_path / "model"
    with pytest.raises(
        CapabilityError, match=r"not enough free disk space; found 1000000 bytes free; allowed: at least"
    ):
        prepare_checkpoint(diffusers_checkpoint, target, OPTIONS, free_bytes=lambda folder: 1_000_000)
    assert not target.exists()
    assert not any((tmp_path / ".model.partial").rglob("*.safetensors*"))


def test_enough_space_is_what_the_directory_needs(
    tmp_path: Path, diffusers_checkpoint: Path, prepared: Path
) -> None:
    size = sum(path.stat().st_size for path in prepared.rglob("*") if path.is_file())
    prepare_checkpoint(
        diffusers_checkpoint, tmp_path / "model", OPTIONS, free_bytes=lambda folder: size + (8 << 20)
    )


def test_disk_that_fills_up_is_reported_and_the_next_attempt_continues(
    tmp_path: Path, diffusers_checkpoint: Path, prepared: Path, tree_bytes: TreeBytes
) -> None:
    """The limit on file sizes stands for the disk: writing beyond it fails with an error number, as a full disk does."""
    target = tmp_path / "model"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_200_000, 2_200_000))  # all but the video VAE fit
            prepare_checkpoint(
                diffusers_checkpoint, target, PrepareOptions(schedules=OPTIONS.schedules, workers=1)
            )
        except CapabilityError as error:
            code = 50 if "disk is full" in str(error) else 51
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 50
    assert not target.exists()
    assert prepare_checkpoint(diffusers_checkpoint, target, OPTIONS).reused_files >= 2
    assert tree_bytes(target) == tree_bytes(prepared)


def test_existing_prepared_directory_is_replaced_only_on_demand(
    tmp_path: Path, editable_prepared: Path, diffusers_checkpoint: Path, prepared: Path, tree_bytes: TreeBytes
) -> None:
    (editable_prepared / "weights" / "vae-1.safetensors").write_bytes(b"old")
    with pytest.raises(ArtifactError, match="--replace"):
        prepare_checkpoint(diffusers_checkpoint, editable_prepared, OPTIONS)
    old = (editable_prepared / "weights" / "vae-1.safetensors").open("rb")
    with old:
        prepare_checkpoint(diffusers_checkpoint, editable_prepared, OPTIONS, replace_target=True)
        assert old.read() == b"old"  # who has the old files open keeps them
    assert tree_bytes(editable_prepared) == tree_bytes(prepared)
    assert [path.name for path in tmp_path.iterdir()] == [editable_prepared.name]


def test_empty_target_folder_is_filled(tmp_path: Path, diffusers_checkpoint: Path) -> None:
    (tmp_path / "model").mkdir()
    prepare_checkpoint(diffusers_checkpoint, tmp_path / "model", OPTIONS)
    assert (tmp_path / "model" / "manifest.json").is_file()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_something_else_in_the_targets_place_is_never_touched(
    kind: str, tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    target = tmp_path / "model"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to("elsewhere")
    else:
        target.mkdir()
        (target / "holiday.jpg").write_text("mine")
    with pytest.raises(ArtifactError, match="target exists and is not"):
        prepare_checkpoint(diffusers_checkpoint, target, OPTIONS, replace_target=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {"model", *(["elsewhere"] if kind == "link" else [])}
    )
