"""Manifest reading: what is refused, what is kept, and that only ArtifactError ever comes out."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.errors import ArtifactError
from loader.manifest import encode_manifest, local_name, parse_manifest, read_manifest
from tests.loader.prepared import Prepared, write_prepared


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return write_prepared(tmp_path_factory.mktemp("prepared"))


def test_good_manifest_is_read_back(shared: Prepared) -> None:
    data = (shared.directory / "manifest.json").read_bytes()
    manifest = read_manifest(shared.directory, hashlib.sha256(data).hexdigest())
    raw: Any = shared.manifest
    assert manifest.sha256 == hashlib.sha256(data).hexdigest()
    assert manifest.order("t2va", "base") == tuple(raw["orders"]["t2va/base"])
    assert {name: (t.dtype, list(t.shape), t.offset) for name, t in manifest.tensors.items()} == {
        name: (t["dtype"], t["shape"], t["offset"]) for name, t in raw["tensors"].items()
    }
    assert [f.path for f in manifest.files] == [f["path"] for f in raw["files"]]
    assert manifest.local_name("dit/proj.weight") == "proj.weight"


def test_encoding_is_canonical() -> None:
    assert encode_manifest({"b": [1, 2], "a": {"é": None}}) == '{"a":{"é":null},"b":[1,2]}\n'.encode()


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1, 2}, "\ud800"], ids=["nan", "inf", "set", "surrogate"]
)
def test_encoding_refuses_what_json_cannot_hold(value: object) -> None:
    with pytest.raises(ArtifactError):
        encode_manifest({"a": value})


def test_other_digest_is_refused(shared: Prepared) -> None:
    with pytest.raises(ArtifactError, match="digest differs"):
        read_manifest(shared.directory, "0" * 64)


def test_unknown_order_names_what_is_prepared(shared: Prepared) -> None:
    with pytest.raises(ArtifactError, match=r"found fl2va/base; allowed: t2va/base"):
        read_manifest(shared.directory).order("fl2va", "base")


def test_missing_manifest_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_manifest(tmp_path)


def _set(*path: str | int, value: object) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return change


def _drop(*path: str | int) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        del manifest[path[-1]]

    return change


W = "encoder/layers.0.w"
DAMAGE: dict[str, tuple[Callable[[Any], None], str]] = {
    "format_major": (_set("format", value="coldframe-manifest/3"), "unknown format"),
    "format_other": (_set("format", value="other/1"), "unknown format"),
    "field_missing": (_drop("config"), "config: field is missing"),
    "path_parent": (_set("files", 0, "path", value="weights/../../x"), "outside the directory"),
    "path_absolute": (_set("files", 0, "path", value="/etc/passwd"), "absolute"),
    "path_backslash": (_set("files", 0, "path", value="a\\b"), "outside the directory"),
    "path_twice": (_set("files", 0, "path", value="weights/dit-0.safetensors"), "duplicate file"),
    "kernel_path": (_set("kernels", value=[{"path": "../k.cubin"}]), "outside the directory"),
    "size_float": (_set("files", 0, "size", value=1.0), "size"),
    "size_bool": (_set("files", 0, "size", value=True), "size"),
    "size_negative": (_set("files", 0, "size", value=-1), "size"),
    "size_huge": (_set("files", 0, "size", value=2**63), "size"),
    "size_smaller": (_set("files", 1, "size", value=8192), "chunks"),
    "data_start_odd": (_set("files", 0, "data_start", value=4097), "data_start"),
    "digest_short": (_set("files", 0, "sha256", value="ab"), "sha256"),
    "digest_upper": (_set("files", 0, "sha256", value="A" * 64), "sha256"),
    "chunk_list_short": (_set("files", 0, "chunks", value=[]), "chunks"),
    "chunk_bytes_odd": (_set("files", 0, "chunk_bytes", value=1000), "chunk_bytes"),
    "chunk_bytes_zero": (_set("files", 0, "chunk_bytes", value=0), "chunk_bytes"),
    "plain_file_with_chunks": (_set("files", 0, "data_start", value=None), "chunk_bytes"),
    "dtype_unknown": (_set("tensors", W, "dtype", value="F12"), "dtype"),
    "shape_wrong": (_set("tensors", W, "shape", value=[40, 65]), "bytes"),
    "shape_overflow": (_set("tensors", W, "shape", value=[2**62, 2**62]), "bytes"),
    "shape_negative": (_set("tensors", W, "shape", value=[-40, -64]), "shape"),
    "offset_unaligned": (_set("tensors", W, "offset", value=8), "offset"),
    "offset_past_end": (_set("tensors", W, "offset", value=2**40), "offset"),
    "tensor_file": (_set("tensors", W, "file", value=99), "file"),
    "tensor_other_component": (_set("tensors", W, "file", value=3), "group"),
    "tensor_outside_group": (_set("tensors", W, "group", value="encoder/layers.1"), "group"),
    "tensor_group_unknown": (_set("tensors", W, "group", value="encoder/nothing"), "group"),
    "tensors_overlap": (_set("tensors", "dit/scale", "offset", value=0), "tensors overlap"),
    "table_other_component": (
        _set("tensors", "embed/table.weight", "file", value=0),
        "offset|another component",
    ),
    "group_unaligned": (_set("groups", 2, "start", value=8), "start"),
    "group_reversed": (_set("groups", 2, "end", value=0), "start"),
    "group_past_end": (_set("groups", 2, "end", value=2**40), "start"),
    "group_prefix": (_set("groups", 0, "component", value="dit"), "name"),
    "groups_overlap": (_set("groups", 2, "start", value=0), "groups overlap"),
    "group_twice": (lambda m: m["groups"].append(m["groups"][0]), "duplicate group"),
    "component_bytes": (_set("components", "dit", "bytes", value=5), "rounded up"),
    "component_file_twice": (_set("components", "dit", "files", value=[3, 3]), "distinct"),
    "component_shares_file": (
        lambda m: m["components"].update(other=copy.deepcopy(m["components"]["dit"])),
        "belongs to two components",
    ),
    "order_unknown_group": (_set("orders", "t2va/base", value=["dit/nothing"]), "known groups"),
    "order_repeats": (_set("orders", "t2va/base", value=["dit/prelude"] * 2), "known groups"),
    "order_not_a_list": (_set("orders", "t2va/base", value="dit/prelude"), "list of group names"),
    "tensors_a_list": (_set("tensors", value=[]), "an object"),
}


@pytest.mark.parametrize("path", ["weights/\ud800.x", "weights/\udc80", "weights/a\0b"])
def test_a_path_that_is_no_text_is_refused(shared: Prepared, path: str) -> None:
    """As another writer's JSON may escape it."""
    manifest = copy.deepcopy(shared.manifest)
    _set("files", 0, "path", value=path)(manifest)
    with pytest.raises(ArtifactError) as caught:
        parse_manifest(json.dumps(manifest).encode(), shared.directory, "")
    assert str(caught.value) == f"manifest.json: path is no text that names a file; found {path!r}"


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_and_named(shared: Prepared, name: str) -> None:
    change, message = DAMAGE[name]
    manifest = copy.deepcopy(shared.manifest)
    change(manifest)
    with pytest.raises(ArtifactError, match=message):
        parse_manifest(encode_manifest(manifest), shared.directory, "")


SCHEDULE: dict[str, object] = {
    "name": "base",
    "task": "t2va",
    "path": "weights/dit-0.safetensors",
    "mode": "canonical",
    "evaluations": 1,
    "video_sigmas": ["3f800000", "00000000"],
    "audio_sigmas": ["3f800000", "00000000"],
    "condition_timesteps": [],
    "condition_index": [],
    "weights_sha256": "0" * 64,
}


def test_schedule_is_read(shared: Prepared) -> None:
    data = encode_manifest({**shared.manifest, "schedules": [SCHEDULE]})
    (schedule,) = parse_manifest(data, shared.directory, "").schedules
    assert (schedule.evaluations, schedule.video_sigmas) == (1, ("3f800000", "00000000"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "other"),
        ("video_sigmas", ["3f800000"]),
        ("audio_sigmas", ["3F800000", "0"]),
        ("path", "adaln/none"),
    ],
)
def test_bad_schedule_is_refused(shared: Prepared, field: str, value: object) -> None:
    data = encode_manifest({**shared.manifest, "schedules": [{**SCHEDULE, field: value}]})
    with pytest.raises(ArtifactError, match=r"schedule|sigmas|mode"):
        parse_manifest(data, shared.directory, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"\xff\xfe{\x00}\x00", "not JSON"),
        (b'{"a":NaN}', "not JSON"),
        (b'{"format":"coldframe-manifest/1","format":"coldframe-manifest/1"}', "duplicate key 'format'"),
        (b'{"a":' + b"[" * 100_000, "not"),
        (b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=["empty", "list", "bom", "utf16", "nan", "duplicate", "deep", "digits"],
)
def test_bad_text_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse_manifest(text, tmp_path, "")


def test_truncated_manifest_is_refused_at_every_length(shared: Prepared) -> None:
    data = encode_manifest(shared.manifest)
    for length in range(0, len(data) - 1, 97):
        with pytest.raises(ArtifactError):
            parse_manifest(data[:length], shared.directory, "")


def test_link_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "m")
    victim = prepared.directory / "weights/dit-0.safetensors"
    victim.rename(tmp_path / "elsewhere")
    victim.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="link leads outside"):
        read_manifest(prepared.directory)


def test_link_inside_the_directory_is_kept(tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "m")
    victim = prepared.directory / "weights/dit-0.safetensors"
    victim.rename(prepared.directory / "weights/blob")
    victim.symlink_to("blob")
    assert read_manifest(prepared.directory).files[3].path == "weights/dit-0.safetensors"


def test_directory_reached_through_a_link_is_fine(tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "m")
    (tmp_path / "alias").symlink_to(prepared.directory)
    assert read_manifest(tmp_path / "alias").files


def test_random_damage_raises_only_artifact_errors(shared: Prepared) -> None:
    values = [None, True, -1, 0, 1.5, 2**70, "", "x", [], [0], {}, "0" * 64, [[]], {"a": 1}]
    rng = random.Random(7)
    refused = 0
    for _ in range(200):
        manifest: Any = json.loads(encode_manifest(shared.manifest))
        node = manifest
        while True:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
                node[key] = rng.choice(values)
                break
            node = node[key]
        try:
            parse_manifest(encode_manifest(manifest), shared.directory, "")
        except ArtifactError:
            refused += 1
    assert refused > 120


@pytest.mark.parametrize(
    ("tensor", "group", "expected"),
    [
        ("dit/blocks.0.w", "dit/blocks.0", "blocks.0.w"),
        ("embed/a.b", None, "a.b"),
        ("adaln/base-49.t2va/step.000.blocks", "adaln/base-49.t2va/step.000", "step.000.blocks"),
        ("adaln/step.000.blocks", "adaln/base-49.t2va/step.000", "step.000.blocks"),
    ],
)
def test_local_name_drops_component_and_folder(tensor: str, group: str | None, expected: str) -> None:
    assert local_name(tensor, group) == expected
