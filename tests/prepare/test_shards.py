"""Shards for several ranks: every byte has its place, shards put together are the whole, both layouts agree."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from loader.errors import CapabilityError, RequestError
from loader.manifest import read_manifest
from prepare.cli import prepare_main, validate_main
from prepare.recipe import OutputGroup, OutputTensor, Rows, TensorSpec
from prepare.shards import cut_tensor, shard_groups, shard_orders
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.shards import check_ranks, cut_of
from runtime.parallel.prepared import prepared_ranks, rank_manifest
from runtime.parallel.split import Cut
from scripts.tiny_checkpoint import write_tiny_checkpoint

OPTIONS = ["--schedule", "base-2", "--task", "t2va", "--json"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prepared for one rank, and for one and two from both layouts."""
    root = tmp_path_factory.mktemp("shards")
    for layout in ("diffusers", "native"):
        write_tiny_checkpoint(root / layout, "test", layout, seed=1)
    runs = {
        "plain": ("diffusers", []),
        "diffusers": ("diffusers", ["--ranks", "2", "--ranks", "1"]),
        "native": ("native", ["--ranks", "1", "--ranks", "2"]),
    }
    for name, (layout, ranks) in runs.items():
        source = root / layout / "FL2VA" if (root / layout / "FL2VA").exists() else root / layout
        assert prepare_main([str(source), str(root / name / "out"), *OPTIONS, *ranks]) == 0
    return {name: root / name / "out" for name in runs}


def tensors_of(bundle: Path) -> dict[str, Tensor]:
    """All tensors by their full name in the manifest."""
    manifest = read_manifest(bundle)
    files = [load_file(bundle / file.path) if file.data_start else {} for file in manifest.files]
    return {name: files[t.file][manifest.local_name(name)] for name, t in manifest.tensors.items()}


def test_shards_are_parts_of_the_whole_and_everything_else_is_stored_once(bundles: dict[str, Path]) -> None:
    plain, sharded = tensors_of(bundles["plain"]), tensors_of(bundles["diffusers"])
    config = H3Config.from_dict(read_manifest(bundles["plain"]).config)
    expected: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        component, _, local = name.partition("/")
        cuts = [cut_of(config, local, rank, 2) for rank in range(2)]
        if cuts[0] is None:
            expected[name] = tensor
            continue
        expected[f"{component}/whole/{local}"] = tensor
        for rank, cut in enumerate(cuts):
            assert cut is not None
            parts = (
                [tensor[:, cut.columns.start : cut.columns.stop]]
                if cut.columns is not None
                else [tensor[rows.start : rows.stop] for rows in cut.rows or ()]
            )
            expected[f"{component}/rank-{rank}-of-2/{local}"] = torch.cat(parts)
    assert sharded.keys() == expected.keys()
    assert any("rank-1-of-2" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(sharded[name], tensor), name


def test_both_layouts_give_the_same_bytes(bundles: dict[str, Path]) -> None:
    files = [
        {file.path: file.sha256 for file in read_manifest(bundles[name]).files}
        for name in ("diffusers", "native")
    ]
    assert files[0] == files[1]


def test_the_directory_is_sound_and_names_its_ranks(
    bundles: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate_main([str(bundles["diffusers"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    manifest = read_manifest(bundles["diffusers"])
    assert manifest.options["ranks"] == [1, 2]
    assert prepared_ranks(manifest.orders) == (2,)
    assert list(manifest.orders) == ["t2va/base-2", "t2va/base-2/rank-0-of-2", "t2va/base-2/rank-1-of-2"]


def test_every_rank_gets_all_its_parts_in_order_of_use(bundles: dict[str, Path]) -> None:
    plain = read_manifest(bundles["plain"]).orders["t2va/base-2"]
    whole = read_manifest(bundles["diffusers"])
    for rank in range(2):
        view = rank_manifest(whole, rank, 2)
        (order,) = view.orders.values()
        assert list(view.orders) == ["t2va/base-2"]
        mark = f"/rank-{rank}-of-2/"
        assert list(dict.fromkeys(group.replace(mark, "/") for group in order)) == list(plain)
        assert {f"transformer{mark}blocks.0", f"text_encoder{mark}layers.0"} <= set(order)
        assert not [group for group in order if "/whole/" in group]
        assert not [group for group in order if "/rank-" in group and mark not in group]
    with pytest.raises(CapabilityError, match=r"found 4; allowed: \(2,\)"):
        rank_manifest(whole, 0, 4)


@pytest.mark.parametrize(("ranks", "error"), [("0", RequestError), ("4", CapabilityError)])
def test_impossible_ranks_are_refused(
    bundles: dict[str, Path], tmp_path: Path, ranks: str, error: type[RequestError | CapabilityError]
) -> None:
    source = bundles["diffusers"].parents[1] / "diffusers"
    target = tmp_path / "out"
    assert prepare_main([str(source), str(target), *OPTIONS, "--ranks", ranks]) == error.exit_code
    assert not target.exists()


def test_a_number_of_ranks_that_needs_a_tensor_whole_shares_it() -> None:
    tensor = OutputTensor("w", TensorSpec("F32", (8, 4)), (Rows("c", "w", 0, 8),))
    groups = [OutputGroup("c/block", "c", (tensor,), "denoise"), OutputGroup(None, "c", (), "denoise")]

    def cut(name: str, rank: int, size: int) -> Cut | None:
        return Cut(rows=(range(4 * rank, 4 * rank + 4),)) if size == 2 else None

    found = shard_groups(groups, (2, 8), cut)
    assert [group.name for group in found] == [
        None,
        "c/whole/block",
        "c/rank-0-of-2/block",
        "c/rank-1-of-2/block",
    ]
    orders = shard_orders({"t/s": ("c/block", "adaln/x")}, found, (2, 8), cut)
    assert len(orders) == 10
    assert orders["t/s/rank-1-of-2"] == ("c/rank-1-of-2/block", "adaln/x")
    assert orders["t/s/rank-7-of-8"] == ("c/whole/block", "adaln/x")


def test_rows_of_a_cut_follow_the_parts_they_lie_in() -> None:
    parts = (Rows("c", "k", 10, 16), Rows("c", "q", 0, 4))
    tensor = OutputTensor("w", TensorSpec("BF16", (10, 3)), parts)
    found = cut_tensor(tensor, Cut(rows=(range(4, 8), range(9, 10))))
    assert found.parts == (Rows("c", "k", 14, 16), Rows("c", "q", 0, 2), Rows("c", "q", 3, 4))
    assert found.spec.shape == (5, 3)
    columns = cut_tensor(tensor, Cut(columns=range(1, 3)))
    assert columns.spec.shape == (10, 2)
    assert [part.columns for part in columns.parts] == [(1, 3), (1, 3)]


def test_ranks_that_do_not_divide_the_heads_are_listed(bundles: dict[str, Path]) -> None:
    config = H3Config.from_dict(read_manifest(bundles["plain"]).config)
    with pytest.raises(CapabilityError, match=r"2 heads do not divide.*found 3; allowed: \[1, 2\]"):
        check_ranks(config, 3)
    assert partial(cut_of, config)("transformer_blocks.0.attn.to_qkv.weight", 0, 1) is None
