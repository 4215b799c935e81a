"""Prepared directories: the same bytes from both layouts and every time, readable by others, equal to the checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from loader.errors import ArtifactError
from loader.manifest import Manifest, read_manifest
from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
from prepare.progress import ProgressReport
from tests.prepare.conftest import OPTIONS

TreeBytes = Callable[[Path], dict[str, bytes]]


@pytest.fixture(scope="module")
def manifest(prepared: Path) -> Manifest:
    return read_manifest(prepared)


def _published(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.fixture(scope="module")
def checkpoint_tensors(diffusers_checkpoint: Path) -> dict[str, torch.Tensor]:
    """`component/name` -> tensor, read by the reference library."""
    return {
        f"{component}/{name}": value
        for component in ("transformer", "text_encoder", "vae", "audio_vae")
        for name, value in _published(diffusers_checkpoint / component).items()
    }


@pytest.fixture(scope="module")
def prepared_tensors(prepared: Path) -> dict[str, torch.Tensor]:
    """`file stem's component/name` -> tensor, read by the reference library; fillers included."""
    return {
        f"{path.stem.rpartition('-')[0]}/{name}": value
        for path in sorted((prepared / "weights").glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def test_both_layouts_and_every_run_give_the_same_bytes(
    tmp_path: Path, native_checkpoint: Path, diffusers_checkpoint: Path, prepared: Path, tree_bytes: TreeBytes
) -> None:
    prepare_checkpoint(native_checkpoint, tmp_path / "native", OPTIONS)
    prepare_checkpoint(diffusers_checkpoint, tmp_path / "again", OPTIONS)
    first, native, again = (
        tree_bytes(prepared),
        tree_bytes(tmp_path / "native"),
        tree_bytes(tmp_path / "again"),
    )
    assert again == first
    assert native.keys() == first.keys()
    assert [name for name, data in native.items() if first[name] != data] == ["manifest.json"]
    left, right = (json.loads(tree["manifest.json"]) for tree in (first, native))
    assert [key for key in left if left[key] != right[key]] == ["source"]
    assert (left["source"]["layout"], right["source"]["layout"]) == ("diffusers", "native")


def test_every_file_is_opened_by_the_reference_reader(prepared: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        if file.data_start is not None:
            with safe_open(prepared / file.path, "pt") as reader:
                assert reader.metadata()["format"] == "pt"
                assert len(list(reader.keys())) > 0


def test_plain_tensors_equal_the_checkpoints(
    checkpoint_tensors: dict[str, torch.Tensor], prepared_tensors: dict[str, torch.Tensor]
) -> None:
    same_name = [name for name in prepared_tensors if name in checkpoint_tensors]
    assert len(same_name) > 500
    for name in same_name:
        value, expected = prepared_tensors[name], stored(name, checkpoint_tensors[name])
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


def stored(name: str, value: torch.Tensor) -> torch.Tensor:
    """As the default options store it: the video decoder's block linears rounded once to float16."""
    is_block = name.startswith("vae/decoder.transformer_blocks.")
    return value.half() if is_block and (".attn." in name or ".ff." in name) else value


FUSED = {
    "attn.to_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def test_fused_tensors_are_their_parts_one_after_the_other(
    checkpoint_tensors: dict[str, torch.Tensor], prepared_tensors: dict[str, torch.Tensor]
) -> None:
    num_fused = 0
    for name, value in prepared_tensors.items():
        for fused, parts in FUSED.items():
            if f".{fused}." in name:
                wanted = [checkpoint_tensors[name.replace(fused, part)] for part in parts]
                assert torch.equal(value, stored(name, torch.cat(wanted)))
                num_fused += 1
    assert (
        num_fused == 3 + 2 + 2 * 2 + 50 * 2
    )  # DiT blocks, refiner blocks, VAE weights and biases, text layers


def test_nothing_else_is_written_and_nothing_needed_is_left_out(
    checkpoint_tensors: dict[str, torch.Tensor], prepared_tensors: dict[str, torch.Tensor]
) -> None:
    names = {name for name in prepared_tensors if "/__pad__." not in name}
    unfused = set()
    for name in names:
        fused = next((f for f in FUSED if f".{f}." in name), None)
        unfused |= {name.replace(fused, part) for part in FUSED[fused]} if fused else {name}
    unfused = {name.replace("text_encoder_embed/", "text_encoder/") for name in unfused}
    dropped = checkpoint_tensors.keys() - unfused
    assert unfused <= checkpoint_tensors.keys()
    prefixes = (
        "transformer/time_embedder.",
        "transformer/norm_out.linear.",
        "text_encoder/lm_head.",
        "text_encoder/model.language_model.norm.",
        "text_encoder/model.language_model.layers.50.",
        "text_encoder/model.language_model.layers.51.",
        "audio_vae/encoder.",
        "audio_vae/pre_block.",
        "audio_vae/mean_proj.",
        "audio_vae/logs_proj.",
    )
    assert all(name.startswith(prefixes) or ".adaln_proj." in name for name in dropped)


def test_manifest_pins_every_file_and_source(
    prepared: Path, diffusers_checkpoint: Path, manifest: Manifest
) -> None:
    for file in manifest.files:
        assert hashlib.sha256((prepared / file.path).read_bytes()).hexdigest() == file.sha256
    sources = json.loads((prepared / "manifest.json").read_bytes())["source"]["files"]
    assert "text_encoder/model.safetensors.index.json" in sources
    assert "tokenizer/tokenizer_config.json" in sources
    for name, state in sources.items():
        data = (diffusers_checkpoint / name).read_bytes()
        assert state == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    weights = {
        p.relative_to(diffusers_checkpoint).as_posix() for p in diffusers_checkpoint.rglob("*.safetensors")
    }
    assert weights <= sources.keys()


def test_orders_of_use(manifest: Manifest) -> None:
    t2va, fl2va = manifest.order("t2va", "base-3"), manifest.order("fl2va", "base-3")
    assert t2va[:2] == ("text_encoder/layers.0", "text_encoder/layers.1")
    assert t2va[49:] == (
        "text_encoder/layers.49",
        "transformer/prelude",
        "adaln/base-3.t2va/step.000",
        "transformer/blocks.0",
        "transformer/blocks.1",
        "transformer/blocks.2",
        "transformer/heads",
        "adaln/base-3.t2va/step.001",
        "adaln/base-3.t2va/step.002",
        "vae/decoder.prelude",
        "vae/decoder.blocks.0",
        "vae/decoder.blocks.1",
        "vae/decoder.heads",
        "audio_vae/decoder",
    )
    assert fl2va[:3] == ("vae/encoder", "text_encoder/visual", "text_encoder/layers.0")
    assert fl2va[53:55] == ("adaln/base-3.fl2va/condition", "adaln/base-3.fl2va/step.000")
    assert set(manifest.groups) == {*t2va, *fl2va}


def test_embedding_table_is_in_no_group(manifest: Manifest) -> None:
    name = "text_encoder_embed/model.language_model.embed_tokens.weight"
    assert [tensor.name for tensor in manifest.tensors.values() if tensor.group is None] == [name]


def test_text_only_directory_leaves_keyframe_networks_out(tmp_path: Path, native_checkpoint: Path) -> None:
    options = PrepareOptions(tasks=("t2va",), schedules=("base-2",))
    prepare_checkpoint(native_checkpoint, tmp_path / "t2va", options)
    manifest = read_manifest(tmp_path / "t2va")
    assert list(manifest.model["tasks"]) == ["t2va"]  # type: ignore[call-overload]
    assert not any("visual" in name or name.startswith("vae/encoder") for name in manifest.tensors)
    assert list(manifest.orders) == ["t2va/base-2"]


def test_float32_directory_widens_every_tensor_exactly(
    tmp_path: Path, native_checkpoint: Path, prepared: Path, manifest: Manifest
) -> None:
    options = PrepareOptions(schedules=("base-3",), dtype="float32")
    prepare_checkpoint(native_checkpoint, tmp_path / "wide", options)
    wide = read_manifest(tmp_path / "wide")
    assert wide.model["dtype"] == "F32"
    assert {tensor.dtype for tensor in wide.tensors.values()} == {"F32"}
    for path in sorted((prepared / "weights").iterdir()):
        narrow, widened = load_file(path), load_file(tmp_path / "wide" / "weights" / path.name)
        for name, value in narrow.items():
            if not name.startswith("__pad__."):
                assert torch.equal(widened[name].to(value.dtype), value)
                assert value.dtype == torch.float16 or torch.equal(widened[name], value.float())


def test_the_video_decoders_linears_can_stay_as_published(
    tmp_path: Path, native_checkpoint: Path, checkpoint_tensors: dict[str, torch.Tensor]
) -> None:
    options = PrepareOptions(schedules=("base-3",), vae_linears="float32")
    prepare_checkpoint(native_checkpoint, tmp_path / "wide", options)
    assert read_manifest(tmp_path / "wide").options["vae_linears"] == "float32"
    name = "decoder.transformer_blocks.0.ff.net.2.weight"
    found = load_file(tmp_path / "wide" / "weights" / "vae-1.safetensors")[name]
    assert torch.equal(found, checkpoint_tensors[f"vae/{name}"])


def test_a_linear_beyond_the_range_of_float16_is_refused(tmp_path: Path, diffusers_checkpoint: Path) -> None:
    checkpoint, name = tmp_path / "checkpoint", "decoder.transformer_blocks.0.ff.net.2.weight"
    shutil.copytree(diffusers_checkpoint, checkpoint)
    path = next(p for p in (checkpoint / "vae").glob("*.safetensors") if name in load_file(p))
    tensors = load_file(path)
    tensors[name][0, 0] = 7e4
    save_file(tensors, path)
    options = PrepareOptions(schedules=("base-3",))
    with pytest.raises(ArtifactError, match=r"not finite.*ff\.net\.2\.weight \(inf\)"):
        prepare_checkpoint(checkpoint, tmp_path / "out", options)
    prepare_checkpoint(
        checkpoint, tmp_path / "out", PrepareOptions(schedules=("base-3",), vae_linears="float32")
    )


def test_files_are_cut_at_group_borders_below_the_limit(
    tmp_path: Path, diffusers_checkpoint: Path, manifest: Manifest
) -> None:
    limit = 400_000  # the largest group has 0.34 MB
    prepare_checkpoint(
        diffusers_checkpoint, tmp_path / "cut", PrepareOptions(schedules=("base-3",), max_file_bytes=limit)
    )
    cut = read_manifest(tmp_path / "cut")
    parts = [file for file in cut.files if file.path.startswith("weights/text_encoder-")]
    assert len(parts) > 3
    assert all(file.data_bytes <= limit for file in parts)
    assert {n: (t.dtype, t.shape, t.head, t.tail) for n, t in cut.tensors.items()} == {
        n: (t.dtype, t.shape, t.head, t.tail) for n, t in manifest.tensors.items()
    }


def _overwrite_tensor(checkpoint: Path, folder: str, name: str, data: bytes) -> None:
    for path in (checkpoint / folder).glob("*.safetensors"):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        entry = json.loads(content[8 : 8 + size]).get(name)
        if entry is not None:
            with path.open("r+b") as file:
                file.seek(8 + size + entry["data_offsets"][0])
                file.write(data or bytes(entry["data_offsets"][1] - entry["data_offsets"][0]))


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("transformer", "transformer_blocks.1.attn.to_k.weight"),
        ("transformer", "transformer_blocks.2.adaln_proj.linear.weight"),
        ("transformer", "norm_out.linear.bias"),
        ("text_encoder", "model.language_model.layers.3.mlp.up_proj.weight"),
    ],
)
def test_nan_anywhere_stops_prepare_and_publishes_nothing(
    folder: str, name: str, editable_checkpoint: Path
) -> None:
    _overwrite_tensor(editable_checkpoint, folder, name, b"\xc0\x7f")
    target = editable_checkpoint.parent / "target"
    with pytest.raises(ArtifactError, match=f"{folder}/{name} \\(NaN\\)"):
        prepare_checkpoint(editable_checkpoint, target, OPTIONS)
    assert not target.exists()


def test_zero_tensor_is_a_warning(editable_checkpoint: Path) -> None:
    _overwrite_tensor(editable_checkpoint, "vae", "decoder.proj_out.bias", b"")
    result = prepare_checkpoint(editable_checkpoint, editable_checkpoint.parent / "target", OPTIONS)
    (warning,) = result.warnings
    assert warning.startswith("vae/decoder.proj_out.bias: every value is zero")


def test_result_and_progress_state_what_happened(tmp_path: Path, diffusers_checkpoint: Path) -> None:
    reports: list[ProgressReport] = []
    result = prepare_checkpoint(diffusers_checkpoint, tmp_path / "target", OPTIONS, report=reports.append)
    files = [path for path in (tmp_path / "target").rglob("*") if path.is_file()]
    assert result.num_files == len(files)
    assert result.num_bytes == sum(path.stat().st_size for path in files)
    assert result.manifest_sha256 == read_manifest(tmp_path / "target").sha256
    assert result.reused_files == 0
    assert reports[-1].done_bytes == reports[-1].total_bytes > 0
    assert [report.done_bytes for report in reports] == sorted(report.done_bytes for report in reports)
