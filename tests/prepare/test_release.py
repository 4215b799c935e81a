"""Distilled checkpoints and the reference partition: what is prepared, what a worker says to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from loader.errors import ArtifactError, CapabilityError, RequestError
from loader.manifest import read_manifest
from prepare.checkpoint import open_component
from prepare.families.minimax_h3.contract import CONTRACT_NAME
from prepare.families.minimax_h3.tree import open_tree
from prepare.family import PrepareOptions, open_source
from prepare.pipeline import prepare_checkpoint
from prepare.validate import validate_directory
from runtime.families.minimax_h3.capabilities import capabilities_of
from runtime.schedules import named_schedule, schedule_from_bits
from scripts.tiny_checkpoint import write_tiny_checkpoint

GATES = [f"transformer_blocks.{i}.attn.to_gate_compress.weight" for i in range(3)]


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fasth3")
    write_tiny_checkpoint(folder, "test", "diffusers", seed=5, variant="fasth3")
    return folder


@pytest.fixture(scope="module")
def distilled_bundle(tmp_path_factory: pytest.TempPathFactory, distilled: Path) -> Path:
    target = tmp_path_factory.mktemp("fasth3-out") / "model"
    prepare_checkpoint(distilled, target)
    return target


def _published(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def test_gates_go_into_their_blocks_groups(distilled: Path, distilled_bundle: Path) -> None:
    manifest = read_manifest(distilled_bundle)
    published = _published(distilled / "transformer")
    stored = load_file(distilled_bundle / "weights" / "transformer-1.safetensors")
    for i, name in enumerate(GATES):
        assert manifest.tensors[f"transformer/{name}"].group == f"transformer/blocks.{i}"
        assert torch.equal(stored[name], published[name])
    assert not any("refiner" in name for name in manifest.tensors if "gate" in name)
    assert validate_directory(distilled_bundle).problems == ()


def test_contract_decides_task_schedule_and_attention(distilled_bundle: Path) -> None:
    manifest = read_manifest(distilled_bundle)
    assert manifest.model["variant"] == "fasth3"
    assert manifest.model["tasks"] == ["t2va"]
    assert manifest.model["sparse_attention"] == {"kind": "vsa-h3", "sparsity": 0.8, "tile": 64}
    assert list(manifest.orders) == ["t2va/fasth3-8"]
    (record,) = manifest.schedules
    stored = schedule_from_bits(record.name, record.video_sigmas, record.audio_sigmas)
    assert stored.same_trajectory(named_schedule("fasth3-8"))
    assert CONTRACT_NAME in manifest.source["files"]  # type: ignore[operator]
    assert not any(name.startswith(("vae/encoder", "text_encoder/model.visual")) for name in manifest.tensors)


def test_worker_refuses_what_needs_sparse_attention(distilled_bundle: Path) -> None:
    with pytest.raises(CapabilityError, match=r"model\.variant: .*\(VSA\).*found 'fasth3'"):
        capabilities_of(read_manifest(distilled_bundle))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (PrepareOptions(tasks=("fl2va",)), "unknown task; found fl2va; allowed: t2va"),
        (PrepareOptions(schedules=("base-49",)), "one step schedule; found base-49; allowed: fasth3-8"),
        (PrepareOptions(schedules=("fasth3-8", "fasth3-4")), "found fasth3-4; allowed: fasth3-8"),
        (PrepareOptions(variant="turbo"), "unknown variant; found 'turbo'; allowed: auto, base, fasth3"),
    ],
)
def test_choices_against_the_contract_are_refused(
    options: PrepareOptions, match: str, distilled: Path
) -> None:
    with pytest.raises(RequestError, match=match):
        open_source(distilled, options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_backend", "FLASH_ATTN"),
        ("vsa_sparsity", 0.9),
        ("vsa_tile_size", 128),
        ("vsa_tile_size", None),
    ],
)
def test_contract_with_another_attention_is_refused(
    key: str, value: object, tmp_path: Path, distilled: Path
) -> None:
    root = Path(shutil.copytree(distilled, tmp_path / "c"))
    table = json.loads((root / CONTRACT_NAME).read_text())
    (root / CONTRACT_NAME).write_text(json.dumps({**table, key: value}))
    with pytest.raises(ArtifactError, match=key):
        open_source(root, PrepareOptions())


def test_gates_without_contract_or_as_base_are_refused(tmp_path: Path, distilled: Path) -> None:
    root = Path(shutil.copytree(distilled, tmp_path / "c"))
    (root / CONTRACT_NAME).unlink()
    with pytest.raises(ArtifactError, match=CONTRACT_NAME):
        open_source(root, PrepareOptions())
    (root / "scheduler" / "scheduler_config.json").write_text('{"shift": 12.0}')
    with pytest.raises(ArtifactError, match=rf"unexpected tensors.*{GATES[0]}"):
        open_source(root, PrepareOptions(variant="base"))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trees with both partitions, in both layouts."""
    folders = {}
    for layout in ("diffusers", "native"):
        folders[layout] = tmp_path_factory.mktemp(layout)
        for partition in ("fl2va", "ref2va"):
            write_tiny_checkpoint(folders[layout], "test", layout, seed=5, partition=partition)
    return folders


REF = PrepareOptions(schedules=("base-2",), partition="ref2va")


@pytest.fixture(scope="module")
def reference_bundle(tmp_path_factory: pytest.TempPathFactory, references: dict[str, Path]) -> Path:
    target = tmp_path_factory.mktemp("ref-out") / "model"
    prepare_checkpoint(references["diffusers"], target, REF)
    return target


def test_reference_partition_has_the_other_transformer_and_both_encoders(
    references: dict[str, Path], reference_bundle: Path
) -> None:
    manifest = read_manifest(reference_bundle)
    assert manifest.model["tasks"] == ["ref2va"]
    assert manifest.options["partition"] == "ref2va"
    stored = load_file(reference_bundle / "weights" / "transformer-1.safetensors")
    name = "transformer_blocks.0.ff.net.2.weight"
    assert torch.equal(stored[name], _published(references["diffusers"] / "transformer_ref")[name])
    assert not torch.equal(stored[name], _published(references["diffusers"] / "transformer")[name])
    order = manifest.order("ref2va", "base-2")
    assert order[:4] == ("vae/encoder", "audio_vae/encoder", "text_encoder/visual", "text_encoder/layers.0")
    assert set(order) == set(manifest.groups)
    assert validate_directory(reference_bundle).problems == ()


def test_both_layouts_of_the_reference_partition_give_the_same_files(
    tmp_path: Path, references: dict[str, Path], reference_bundle: Path
) -> None:
    prepare_checkpoint(references["native"], tmp_path / "native", REF)
    left, right = (
        {file.path: file.sha256 for file in read_manifest(root).files}
        for root in (reference_bundle, tmp_path / "native")
    )
    assert left == right


def test_reference_tables_have_rows_for_pictures_and_for_sound(
    references: dict[str, Path], reference_bundle: Path
) -> None:
    """Sound references sit at timestep 1: silu of the embedder's output there, through the audio rows' projection."""
    from runtime.families.minimax_h3.model.adaln import adaln_input, timestep_embedding

    tables = load_file(reference_bundle / "adaln" / "base-2.ref2va.safetensors")
    assert tables["condition.blocks"].shape == (3, 1, 6, 48)
    assert tables["condition.audio"].shape == (3, 1, 6, 48)
    weights = _published(references["diffusers"] / "transformer_ref")
    config = open_source(references["diffusers"], REF).model.transformer  # type: ignore[attr-defined]
    inputs = adaln_input(timestep_embedding(torch.ones(1), weights, config), torch.bfloat16).double()
    for layer in range(3):
        prefix = f"transformer_blocks.{layer}.adaln_proj.linear"
        rows = inputs @ weights[f"{prefix}.weight"].double().T + weights[f"{prefix}.bias"].double()
        audio = rows.view(1, 3, 6, 48)[:, 2]
        # One bfloat16 step: the table's input is the same up to its last float32 bit.
        torch.testing.assert_close(tables["condition.audio"][layer].double(), audio, rtol=2**-7, atol=2**-9)


def test_worker_refuses_the_reference_task_by_name(reference_bundle: Path) -> None:
    with pytest.raises(CapabilityError, match=r"model\.tasks: .*found ref2va; allowed: t2va or fl2va"):
        capabilities_of(read_manifest(reference_bundle))


def test_partition_that_is_not_there_is_refused(
    diffusers_checkpoint: Path, native_checkpoint: Path, references: dict[str, Path]
) -> None:
    with pytest.raises(
        ArtifactError, match="partition is missing; found transformer; allowed: transformer_ref"
    ):
        open_tree(diffusers_checkpoint, "ref2va")
    with pytest.raises(ArtifactError, match=r"not a MiniMax-H3 checkpoint.*Ref2VA/transformer"):
        open_tree(native_checkpoint, "ref2va")
    with pytest.raises(ArtifactError, match="partition cannot serve ref2va; found 'fl2va'"):
        open_tree(native_checkpoint / "FL2VA", "ref2va")
    with pytest.raises(ArtifactError, match="partition cannot serve t2va and fl2va; found 'ref2va'"):
        open_tree(references["native"] / "Ref2VA")
    with pytest.raises(RequestError, match="unknown partition; found 'other'; allowed: fl2va, ref2va"):
        open_source(diffusers_checkpoint, PrepareOptions(partition="other"))
    assert open_component(references["native"] / "Ref2VA" / "transformer").tensors


def test_sound_reference_tables_are_canonical_only(references: dict[str, Path]) -> None:
    with pytest.raises(CapabilityError, match="canonical only"):
        open_source(references["diffusers"], PrepareOptions(partition="ref2va", adaln="match"))
