"""Every kind of damage to a prepared directory is found, and all of it is listed with file and place."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loader.errors import ArtifactError
from loader.manifest import MANIFEST_NAME, encode_manifest, read_manifest
from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
from prepare.validate import require_valid, validate_directory, validation_bytes
from scripts.tiny_checkpoint import write_tiny_checkpoint

VAE = "weights/vae-1.safetensors"
TABLE = "adaln/base-3.t2va.safetensors"


def test_sound_directory_has_no_problem(prepared: Path) -> None:
    counted: list[int] = []
    report = validate_directory(prepared, read_manifest(prepared).sha256, counted.append)
    assert report.problems == ()
    assert report.num_files == len([path for path in prepared.rglob("*") if path.is_file()]) - 1
    assert report.num_bytes == validation_bytes(prepared)
    tokenizer = (prepared / "tokenizer" / "tokenizer.json").stat().st_size
    assert sum(counted) == report.num_bytes - tokenizer
    require_valid(report, prepared)


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def _flip_inside_tensor(root: Path) -> None:
    tensor = read_manifest(root).tensors["vae/encoder.conv_out.weight"]
    _flip(root / VAE, 4096 * 100 + tensor.offset % 4096)


def _truncate(root: Path) -> None:
    with (root / VAE).open("r+b") as file:
        file.truncate(10_000)


def _lengthen(root: Path) -> None:
    with (root / VAE).open("ab") as file:
        file.write(b"\0")


def _break_header(root: Path) -> None:
    _flip(root / VAE, 9)


def _other_tokenizer(root: Path) -> None:
    file = root / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b'"<d>"', b'"<e>"'))


DAMAGES: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("P02-flipped-bit", _flip_inside_tensor, [VAE, "SHA-256 differs for bytes"]),
    ("P03-flipped-first-byte", lambda r: _flip(r / TABLE, 4096), [TABLE, "SHA-256 of the first"]),
    (
        "P04-flipped-last-byte",
        lambda r: _flip(r / VAE, (r / VAE).stat().st_size - 1),
        [VAE, "SHA-256 of the last"],
    ),
    ("P05-truncated", _truncate, [VAE, "truncated", "10000"]),
    ("P12-empty", lambda r: (r / VAE).write_bytes(b""), [VAE, "truncated", "0 bytes"]),
    ("P07-missing", lambda r: (r / VAE).unlink(), [VAE, "missing"]),
    (
        "P14-extra",
        lambda r: (r / "weights" / "x.safetensors").write_bytes(b"x"),
        ["weights/x.safetensors", "not in the"],
    ),
    ("too-long", _lengthen, [VAE, "too long"]),
    ("header", _break_header, [VAE, "not JSON"]),
    ("tokenizer", _other_tokenizer, ["tokenizer/tokenizer.json", "SHA-256 differs", "not consecutive"]),
    ("folder-in-place", lambda r: ((r / VAE).unlink(), (r / VAE).mkdir()), [VAE]),
]


@pytest.mark.parametrize(("damage", "parts"), [row[1:] for row in DAMAGES], ids=[row[0] for row in DAMAGES])
def test_damage_is_found(damage: Callable[[Path], object], parts: list[str], editable_prepared: Path) -> None:
    damage(editable_prepared)
    report = validate_directory(editable_prepared)
    assert all(part in " | ".join(report.problems) for part in parts), report.problems
    with pytest.raises(ArtifactError):
        require_valid(report, editable_prepared)


def test_all_problems_are_listed_together(editable_prepared: Path) -> None:
    _truncate(editable_prepared)
    (editable_prepared / TABLE).unlink()
    _other_tokenizer(editable_prepared)
    report = validate_directory(editable_prepared)
    named = {
        name for name in (VAE, TABLE, "tokenizer/tokenizer.json") if any(name in p for p in report.problems)
    }
    assert named == {VAE, TABLE, "tokenizer/tokenizer.json"}


def test_tables_of_another_checkpoint_are_found(tmp_path: Path, editable_prepared: Path) -> None:
    """P11: same names, sizes and shapes, other weights."""
    write_tiny_checkpoint(tmp_path / "c", "test", "native", seed=6)
    prepare_checkpoint(tmp_path / "c", tmp_path / "other", PrepareOptions(schedules=("base-3",)))
    shutil.copyfile(tmp_path / "other" / TABLE, editable_prepared / TABLE)
    report = validate_directory(editable_prepared)
    assert any(TABLE in problem and "SHA-256" in problem for problem in report.problems)
    left, right = read_manifest(editable_prepared), read_manifest(tmp_path / "other")
    assert left.schedules[0].weights_sha256 != right.schedules[0].weights_sha256


def test_other_manifest_than_the_pinned_one_is_refused(prepared: Path) -> None:
    with pytest.raises(ArtifactError, match="digest differs"):
        validate_directory(prepared, "0" * 64)


def _rewrite(root: Path, edit: Callable[[dict[str, object]], object]) -> None:
    table = json.loads((root / MANIFEST_NAME).read_bytes())
    edit(table)
    (root / MANIFEST_NAME).write_bytes(encode_manifest(table))


def _rename_in_manifest(table: dict[str, object]) -> None:
    tensors = table["tensors"]
    assert isinstance(tensors, dict)
    tensors["vae/decoder.proj_out.other"] = tensors.pop("vae/decoder.proj_out.bias")


def _retype_in_manifest(table: dict[str, object]) -> None:
    tensors = table["tensors"]
    assert isinstance(tensors, dict)
    tensor = tensors["vae/decoder.proj_out.bias"]
    tensor["shape"] = [tensor["shape"][0], 1]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (_rename_in_manifest, "the header calls it decoder.proj_out.bias"),
        (_retype_in_manifest, "the header has"),
    ],
    ids=["P16-renamed", "reshaped"],
)
def test_manifest_that_contradicts_a_header_is_found(
    edit: Callable[[dict[str, object]], object], match: str, editable_prepared: Path
) -> None:
    _rewrite(editable_prepared, edit)
    report = validate_directory(editable_prepared)
    assert any(match in problem for problem in report.problems), report.problems


def test_table_entry_that_is_not_finite_is_found_even_with_matching_digests(editable_prepared: Path) -> None:
    path = editable_prepared / TABLE
    record = next(
        t
        for t in read_manifest(editable_prepared).tensors.values()
        if t.name.endswith("t2va/step.001.blocks")
    )
    data = bytearray(path.read_bytes())
    start = next(f.data_start for f in read_manifest(editable_prepared).files if f.path == TABLE)
    assert start is not None
    middle = start + record.offset + 2000
    data[middle : middle + 2] = b"\xc0\x7f"
    path.write_bytes(data)

    def repair(table: dict[str, object]) -> None:
        for file in table["files"]:  # type: ignore[attr-defined]
            if file["path"] == TABLE:
                file["sha256"] = hashlib.sha256(data).hexdigest()
                file["chunks"] = [hashlib.sha256(data[start:]).hexdigest()]

    _rewrite(editable_prepared, repair)
    report = validate_directory(editable_prepared)
    assert report.problems == (f"{TABLE}: {record.name}: table is not finite (NaN)",)


def test_schedule_without_its_order_is_found(editable_prepared: Path) -> None:
    _rewrite(editable_prepared, lambda table: table["orders"].pop("t2va/base-3"))  # type: ignore[attr-defined]
    (problem,) = validate_directory(editable_prepared).problems
    assert "no loading order t2va/base-3" in problem
