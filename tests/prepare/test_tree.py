"""Layout by tensor names, partitions, and configurations that contradict each other or the tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.errors import ArtifactError, RequestError
from prepare.checkpoint import open_component
from prepare.families.minimax_h3.config_files import check_shifts, read_config
from prepare.families.minimax_h3.source import open_source
from prepare.families.minimax_h3.tree import check_class, detect_layout, open_tree
from prepare.family import PrepareOptions
from scripts.tiny_presets import preset
from tests.prepare.cases import case_path, says


@pytest.mark.parametrize("case_id", ["T16"])
def test_class_of_the_other_layout_is_refused(case_id: str) -> None:
    folder = case_path(case_id)
    names = open_component(folder).tensors
    layout = detect_layout(names, "transformer")
    assert layout == "native"
    with pytest.raises(ArtifactError) as refused:
        check_class(folder, layout, names)
    assert says(case_id, str(refused.value))


@pytest.mark.parametrize("case_id", ["T17"])
def test_pruned_checkpoint_is_refused(case_id: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        detect_layout(open_component(case_path(case_id)).tensors, "transformer")
    assert says(case_id, str(refused.value))


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["blocks.0.norm1.weight", "transformer_blocks.0.norm1.weight"], "mix two layouts"),
        (["video_patch_proj.weight", "proj_in.weight"], "mix two layouts"),
        (["model.layers.0.weight"], "not recognised"),
        ([], "not recognised"),
    ],
)
def test_unclear_layout_is_refused(names: list[str], match: str) -> None:
    with pytest.raises(ArtifactError, match=match):
        detect_layout(names, "transformer")


def test_both_layouts_give_the_same_configuration(
    native_checkpoint: Path, diffusers_checkpoint: Path
) -> None:
    trees = [
        open_tree(native_checkpoint),
        open_tree(native_checkpoint / "FL2VA"),
        open_tree(diffusers_checkpoint),
    ]
    assert [tree.layout for tree in trees] == ["native", "native", "diffusers"]
    for tree in trees:
        check_shifts(tree)
        assert read_config(tree) == preset("test").model


def test_qkv_of_native_shape_under_a_diffusers_name_is_refused(
    tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    """The header alone decides: 3 x 64 rows where 64 are published."""
    folder = Path(shutil.copytree(diffusers_checkpoint, tmp_path / "c"))
    for path in (folder / "transformer").glob("*.safetensors"):
        data = path.read_bytes()
        if b"transformer_blocks.1.attn.to_q.weight" in data:
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
            entry = header["transformer_blocks.1.attn.to_q.weight"]
            entry["shape"] = [192, 16]
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(
        ArtifactError, match=r"transformer_blocks\.1\.attn\.to_q\.weight is \[192, 16\], must be \[64, 48\]"
    ):
        open_source(folder, PrepareOptions())


Edit = Callable[[dict[str, Any]], object]


def _edit(root: Path, path: str, edit: Edit) -> None:
    file = root / path
    table = json.loads(file.read_text())
    edit(table)
    file.write_text(json.dumps(table))


NATIVE_EDITS: list[tuple[str, str, Edit, str]] = [
    (
        "ref2va",
        "model_index.json",
        lambda t: t["_minimax_h3"].update(partition="ref2va"),
        "partition cannot serve",
    ),
    ("schema", "model_index.json", lambda t: t["_minimax_h3"].update(schema_version=2), "schema_version"),
    ("no-block", "model_index.json", lambda t: t.pop("_minimax_h3"), "block is missing"),
    (
        "shift",
        "model_index.json",
        lambda t: t["_minimax_h3"]["sigma_shift_scales"].update(video=10.0),
        r"sigma_shift_scales\.video.*found 10\.0",
    ),
    ("hidden", "transformer/config.json", lambda t: t.update(hidden_size=64), "wrong shape"),
    ("layers", "transformer/config.json", lambda t: t.update(num_layers=4), "missing tensors: blocks.3"),
    ("fewer", "transformer/config.json", lambda t: t.update(num_layers=2), "unexpected tensors.*blocks.2"),
    ("no-ffn", "transformer/config.json", lambda t: t.pop("ffn_hidden_size"), "ffn_hidden_size"),
    ("audio-rate", "audio_vae/config.json", lambda t: t.update(sample_rate=44100), "two files disagree"),
    (
        "audio-width",
        "audio_vae/metadata.json",
        lambda t: t["metadata"]["kwargs"].pop("decoder_rates"),
        "decoder_rates",
    ),
    ("video-width", "video_vae/config.json", lambda t: t.update(latent_channels=8), "latent width differs"),
    ("no-vit", "video_vae/source/config.json", lambda t: t.pop("vit_decoder_kwargs"), "vit_decoder_kwargs"),
    ("text-width", "transformer/config.json", lambda t: t.update(text_dim=64), "do not fit together"),
]


@pytest.mark.parametrize(
    ("path", "edit", "match"), [row[1:] for row in NATIVE_EDITS], ids=[r[0] for r in NATIVE_EDITS]
)
def test_contradicting_native_configuration_is_refused(
    path: str, edit: Edit, match: str, tmp_path: Path, native_checkpoint: Path
) -> None:
    root = Path(shutil.copytree(native_checkpoint / "FL2VA", tmp_path / "FL2VA"))
    _edit(root, path, edit)
    with pytest.raises(ArtifactError, match=match):
        open_source(tmp_path, PrepareOptions())


DIFFUSERS_EDITS: list[tuple[str, str, Edit, str]] = [
    (
        "shift",
        "scheduler/scheduler_config.json",
        lambda t: t.update(shift=10.0),
        r"scheduler/.*shift.*found 10\.0",
    ),
    (
        "audio-shift",
        "audio_scheduler/scheduler_config.json",
        lambda t: t.pop("shift"),
        "audio_scheduler/.*None",
    ),
    (
        "class",
        "transformer/config.json",
        lambda t: t.update(_class_name="MiniMaxH3DiTModel"),
        "layout of the tensors",
    ),
    ("no-key", "transformer/config.json", lambda t: t.pop("hidden_size"), "hidden_size"),
    ("rope", "text_encoder/config.json", lambda t: t["text_config"].pop("rope_scaling"), "mrope_section"),
    ("theta", "text_encoder/config.json", lambda t: t["text_config"].pop("rope_theta"), "rope_theta"),
    (
        "layers",
        "text_encoder/config.json",
        lambda t: t["text_config"].update(num_hidden_layers=49),
        "needs 50",
    ),
    ("image-id", "text_encoder/config.json", lambda t: t.update(image_token_id=7), "image_token_id is 7"),
    (
        "vocabulary",
        "text_encoder/config.json",
        lambda t: t["text_config"].update(vocab_size=351),
        "embed_tokens",
    ),
]


@pytest.mark.parametrize(
    ("path", "edit", "match"), [row[1:] for row in DIFFUSERS_EDITS], ids=[r[0] for r in DIFFUSERS_EDITS]
)
def test_contradicting_diffusers_configuration_is_refused(
    path: str, edit: Edit, match: str, editable_checkpoint: Path
) -> None:
    _edit(editable_checkpoint, path, edit)
    with pytest.raises(ArtifactError, match=match):
        open_source(editable_checkpoint, PrepareOptions())


def test_newer_spelling_of_rotary_settings_is_understood(editable_checkpoint: Path) -> None:
    def respell(table: dict[str, Any]) -> None:
        text = table["text_config"]
        text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}

    _edit(editable_checkpoint, "text_encoder/config.json", respell)
    assert read_config(open_tree(editable_checkpoint)) == preset("test").model


def test_missing_component_is_refused(editable_checkpoint: Path) -> None:
    shutil.rmtree(editable_checkpoint / "audio_vae")
    with pytest.raises(ArtifactError, match="audio_vae: component folder is missing"):
        open_source(editable_checkpoint, PrepareOptions())


def test_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a MiniMax-H3 checkpoint"):
        open_tree(tmp_path)
    with pytest.raises(ArtifactError, match="does not exist"):
        open_tree(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (PrepareOptions(tasks=("ref2va",)), "unknown task; found ref2va; allowed: t2va, fl2va"),
        (PrepareOptions(schedules=("base-0",)), "unknown step schedule"),
        (PrepareOptions(schedules=("base-49", "uniform-8")), "'uniform-8'"),
    ],
)
def test_unknown_choice_is_refused(options: PrepareOptions, match: str, diffusers_checkpoint: Path) -> None:
    with pytest.raises(RequestError, match=match):
        open_source(diffusers_checkpoint, options)


def test_contract_without_gates_is_refused_by_their_names(editable_checkpoint: Path) -> None:
    shutil.copyfile(
        case_path("T18") / "fastvideo_inference.json", editable_checkpoint / "fastvideo_inference.json"
    )
    _edit(editable_checkpoint, "scheduler/scheduler_config.json", lambda t: t.update(shift=10.0))
    with pytest.raises(
        ArtifactError, match=r"missing tensors: transformer_blocks\.0\.attn\.to_gate_compress"
    ):
        open_source(editable_checkpoint, PrepareOptions())
