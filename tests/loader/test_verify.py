"""The background pass finds what edges cannot."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from loader.errors import ArtifactError, CapabilityError, WorkerError
from loader.load_plan import plan_load
from loader.manifest import Manifest, read_manifest
from loader.plain_files import plan_files
from loader.verify import start_rehash
from tests.loader.prepared import SMALL_ORDER, Prepared


def test_good_files_pass(prepared: Prepared, manifest: Manifest) -> None:
    plan = plan_load(manifest, SMALL_ORDER)
    rehash = start_rehash(plan, prepared.directory, threads=2)
    rehash.wait()
    assert rehash.is_complete
    read = {mark.name[6:]: mark.bytes for mark in rehash.marks() if mark.name.startswith("group ")}
    names = ["weights/encoder-1.safetensors", "weights/embed-0.safetensors", "weights/dit-0.safetensors"]
    assert read == {f.path: f.data_bytes for f in manifest.files if f.path in names}
    rehash.close()
    assert rehash.failure is not None  # closed: nobody may take it for running


@pytest.mark.parametrize(
    ("file", "offset", "tensor"),
    [
        ("dit-0", 4000, "dit/proj.weight"),
        ("embed-0", 1300, "embed/table.weight"),
        ("encoder-1", 9000, "encoder/layers.1.w"),
    ],
)
def test_flipped_bit_is_found_and_named(
    tmp_path: Path, prepared: Prepared, file: str, offset: int, tensor: str
) -> None:
    shutil.copytree(prepared.directory, tmp_path / "m")
    path = tmp_path / f"m/weights/{file}.safetensors"
    data = bytearray(path.read_bytes())
    data[4096 + offset] ^= 0x10
    path.write_bytes(data)
    plan = plan_load(read_manifest(tmp_path / "m"), SMALL_ORDER)
    told: list[WorkerError] = []
    rehash = start_rehash(plan, tmp_path / "m", on_failure=told.append)
    with pytest.raises(ArtifactError, match=f"{file}.safetensors: .*{tensor}"):
        rehash.wait()
    rehash.close()
    assert told == [rehash.failure]


def test_closing_early_is_not_reported_as_damage(prepared: Prepared, manifest: Manifest) -> None:
    told: list[WorkerError] = []
    plan = plan_load(manifest, SMALL_ORDER)
    rehash = start_rehash(plan, prepared.directory, storage_gbps=1e-5, on_failure=told.append)
    rehash.close()
    assert not rehash.is_complete
    assert told == []


def test_files_without_digests_are_refused(prepared: Prepared) -> None:
    weights = prepared.directory / "weights"
    with pytest.raises(CapabilityError, match=r"verify: files have no digests.*dit-0\.safetensors.*embed-0"):
        start_rehash(plan_files(weights), weights)


def test_a_pass_that_cannot_begin_leaves_nothing(
    prepared: Prepared, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(CapabilityError, match=r"no background verification.*File too large"):
        start_rehash(plan_load(manifest, SMALL_ORDER), prepared.directory)
