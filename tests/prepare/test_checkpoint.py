"""Opening published trees: shards, indexes and headers account for each other, or the tree is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loader.errors import ArtifactError
from prepare.accounting import check_tensors
from prepare.checkpoint import ComponentFiles, open_component
from prepare.recipe import TensorSpec
from tests.prepare.cases import CASES, as_component, case_path, says

GOOD = {
    "proj_in.weight": TensorSpec("BF16", (8, 4)),
    "proj_in.bias": TensorSpec("BF16", (8,)),
    "transformer_blocks.0.attn.to_q.weight": TensorSpec("BF16", (8, 8)),
    "transformer_blocks.0.adaln_proj.linear.weight": TensorSpec("BF16", (16, 8)),
    "transformer_blocks.0.adaln_proj.linear.bias": TensorSpec("BF16", (16,)),
}


def _open_and_account(folder: Path) -> ComponentFiles:
    component = open_component(folder)
    check_tensors({"transformer": component.tensors}, {"transformer": GOOD})
    return component


@pytest.mark.parametrize("case_id", ["T01", "T15"])
def test_good_tree_is_accepted(case_id: str) -> None:
    component = _open_and_account(case_path(case_id))
    assert len(component.tensors) == CASES[case_id]["expect"]["tensors"]
    assert [path.name for path in component.weight_files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert component.notes == ()


@pytest.mark.parametrize(
    "case_id", ["T02", "T03", "T04", "T05", "T06", "T07", "T08", "T09", "T11", "T12", "T13", "T14"]
)
def test_bad_tree_is_refused(case_id: str, tmp_path: Path) -> None:
    folder = case_path(case_id)
    if case_id == "T03":  # the copy of the inputs holds a placeholder where the case has a link to nothing
        folder = Path(shutil.copytree(folder, tmp_path / "tree"))
        (folder / "model-00002-of-00002.safetensors").unlink()
        (folder / "model-00002-of-00002.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(ArtifactError) as refused:
        _open_and_account(folder)
    assert says(case_id, str(refused.value)), refused.value


@pytest.mark.parametrize("case_id", ["T10"])
def test_wrong_total_size_is_noted_with_both_numbers(case_id: str) -> None:
    (note,) = _open_and_account(case_path(case_id)).notes
    assert "4592" in note
    assert "496" in note


@pytest.mark.parametrize("case_id", ["W34"])
def test_file_without_tensors_is_noted(case_id: str, tmp_path: Path) -> None:
    component = open_component(as_component(case_id, tmp_path / "transformer"))
    assert component.tensors == {}
    assert component.notes == ("transformer/model.safetensors: holds no tensor",)


def test_every_kind_of_index_difference_is_named_at_once(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(case_path("T01"), tmp_path / "transformer"))
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    weight_map = table["weight_map"]
    weight_map["ghost.weight"] = "model-00001-of-00002.safetensors"
    weight_map["proj_in.bias"] = "model-00002-of-00002.safetensors"
    del weight_map["transformer_blocks.0.adaln_proj.linear.bias"]
    index.write_text(json.dumps(table))
    with pytest.raises(ArtifactError) as refused:
        open_component(folder)
    for part in ("ghost.weight", "proj_in.bias (index: model-00002", "adaln_proj.linear.bias"):
        assert part in str(refused.value)


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(case_path("T01"), tmp_path / "transformer"))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ArtifactError, match="without an index"):
        open_component(folder)


def test_two_indexes_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(case_path("T01"), tmp_path / "transformer"))
    shutil.copyfile(folder / "model.safetensors.index.json", folder / "other.safetensors.index.json")
    with pytest.raises(ArtifactError, match="more than one index"):
        open_component(folder)


def test_weight_file_beside_the_index_is_ignored_with_a_note(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(case_path("T01"), tmp_path / "transformer"))
    shutil.copyfile(folder / "model-00001-of-00002.safetensors", folder / "consolidated.safetensors")
    component = open_component(folder)
    assert component.notes == (
        "transformer/consolidated.safetensors: weight file is not in the index; ignored",
    )
    assert len(component.tensors) == 5


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs = Path(shutil.copytree(case_path("T01"), tmp_path / "blobs"))
    folder = tmp_path / "transformer"
    folder.mkdir()
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(Path("../blobs") / blob.name)
    assert len(_open_and_account(folder).tensors) == 5


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "outside"),
        ('{"weight_map": {"a": ".."}}', "outside"),
        ('{"weight_map": {"a": "sub/file.safetensors"}}', "outside"),
    ],
)
def test_malformed_index_is_refused(content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ArtifactError, match=match):
        open_component(tmp_path)


def test_empty_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no safetensors file"):
        open_component(tmp_path)
    with pytest.raises(ArtifactError, match="folder is missing"):
        open_component(tmp_path / "nowhere")
