"""Modulation tables equal the projections they replace: bit for bit in `match`, correctly rounded in `canonical`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from loader.manifest import read_manifest
from prepare.families.minimax_h3.config_files import read_config
from prepare.families.minimax_h3.tables import canonical_input, plan_table
from prepare.families.minimax_h3.tree import open_tree
from prepare.family import PrepareOptions
from prepare.pipeline import prepare_checkpoint
from runtime.families.minimax_h3.config import TransformerConfig
from runtime.families.minimax_h3.model.adaln import adaln_input, timestep_embedding
from runtime.schedules import named_schedule
from scripts.tiny_checkpoint import write_tiny_checkpoint
from scripts.tiny_presets import preset

SCHEDULES = ("base-1", "base-4", "fasth3-8")
_KINDS = {"video": 0, "text": 1, "audio": 2}


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Odd widths that all differ, so that no two are confused."""
    small = preset("test")
    model = dataclasses.replace(
        small.model,
        transformer=dataclasses.replace(
            small.model.transformer,
            hidden_size=20,
            num_layers=2,
            time_embed_dim=13,
            time_embed_hidden_dim=22,
            freq_dim=10,
        ),
    )
    folder = tmp_path_factory.mktemp("odd")
    write_tiny_checkpoint(folder, dataclasses.replace(small, model=model), "diffusers", seed=11)
    return folder


def _prepare(checkpoint: Path, target: Path, dtype: str, mode: str) -> Path:
    options = PrepareOptions(schedules=SCHEDULES, dtype=dtype, adaln=mode)  # type: ignore[arg-type]
    prepare_checkpoint(checkpoint, target, options)
    return target


@pytest.fixture(scope="module")
def matched(checkpoint: Path, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _prepare(checkpoint, tmp_path_factory.mktemp("match") / "model", dtype, "match")


@pytest.fixture(scope="module")
def canonical(checkpoint: Path, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _prepare(checkpoint, tmp_path_factory.mktemp("canonical") / "model", dtype, "canonical")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path, dtype: str) -> Any:
    from diffusers import MiniMaxH3Transformer3DModel

    model = MiniMaxH3Transformer3DModel.from_pretrained(
        checkpoint / "transformer", torch_dtype=getattr(torch, dtype)
    )
    for parameter in model.parameters():
        # A mapped file is not aligned as torch's own memory is, and a float32 BLAS rounds one row by alignment.
        parameter.data = parameter.data.clone()
    return model


def _table(prepared: Path, schedule: str, task: str) -> dict[str, Tensor]:
    return load_file(prepared / "adaln" / f"{schedule}.{task}.safetensors")


def _plan(schedule: str, task: str, evaluation: int) -> tuple[list[float], dict[str, int]]:
    """Sorted distinct timesteps, and which of them each row kind has; from the rule, with numpy's float32."""
    named = named_schedule(schedule)
    video = np.float32(1) - np.array(named.video_sigmas[evaluation], np.float32)
    audio = np.float32(1) - np.array(named.audio_sigmas[evaluation], np.float32)
    steps = {"video": video, "text": video, "audio": audio}
    if task == "fl2va":
        steps["condition"] = max(video, np.float32(0.999))
    distinct = np.unique(np.array(list(steps.values()), np.float32))
    return distinct.tolist(), {kind: int(np.searchsorted(distinct, step)) for kind, step in steps.items()}


@pytest.mark.oracle
@pytest.mark.parametrize("task", ["t2va", "fl2va"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_match_equals_the_oracles_projections_bit_for_bit(
    schedule: str, task: str, matched: Path, oracle: Any
) -> None:
    table = _table(matched, schedule, task)
    (record,) = [s for s in read_manifest(matched).schedules if (s.name, s.task) == (schedule, task)]
    for e in range(record.evaluations):
        timesteps, index = _plan(schedule, task, e)
        with torch.no_grad():
            temb = oracle.time_embedder(oracle.time_proj(torch.tensor(timesteps)))
            for layer, block in enumerate(oracle.transformer_blocks):
                terms = torch.stack(block.adaln_proj(temb), dim=1).unflatten(
                    0, (len(timesteps), 3)
                )  # [M, 3, 6, D]
                for kind, tag in _KINDS.items():
                    assert torch.equal(table[f"step.{e:03d}.blocks"][layer, tag], terms[index[kind], tag])
                if task == "fl2va":
                    row = table["condition.blocks"][layer, record.condition_index[e]]
                    assert torch.equal(row, terms[index["condition"], 0])
            a = torch.nn.functional.silu(temb).to(oracle.norm_out.linear.weight.dtype)
            final = oracle.norm_out.linear(a).unflatten(-1, (2, -1))
        for stream, kind in enumerate(("video", "audio")):
            assert torch.equal(table[f"step.{e:03d}.final"][stream], final[index[kind]])


def _round_to_bfloat16(value: Fraction) -> float:
    """Nearest bfloat16 of an exact value, ties to even, by the definition."""
    if value == 0:
        return 0.0
    exponent = (
        math.frexp(float(abs(value)))[1] - 8
    )  # 8 significant bits; the values here are far from subnormal
    scaled = value / Fraction(2) ** exponent
    return float(round(scaled) * Fraction(2) ** exponent)  # round() of a Fraction is half-to-even


def _exact(a: Tensor, weight: Tensor, bias: Tensor, dtype: str) -> list[float]:
    """[out] exact sums of one row, rounded once to the stored type."""
    results = []
    for row, offset in zip(weight.double().tolist(), bias.double().tolist(), strict=True):
        products = [Fraction(x) * Fraction(w) for x, w in zip(a.double().tolist(), row, strict=True)]
        total = sum(products, Fraction(offset))
        rounded = _round_to_bfloat16(total) if dtype == "bfloat16" else float(np.float32(float(total)))
        results.append(rounded)
    return results


def _published(checkpoint: Path) -> dict[str, Tensor]:
    files = sorted((checkpoint / "transformer").glob("*.safetensors"))
    return {name: value for path in files for name, value in load_file(path).items()}


@pytest.mark.parametrize(("schedule", "task"), [("base-4", "fl2va"), ("fasth3-8", "t2va")])
def test_canonical_is_the_exact_sum_rounded_once(
    schedule: str, task: str, canonical: Path, checkpoint: Path, dtype: str
) -> None:
    weights, config = _published(checkpoint), read_config(open_tree(checkpoint)).transformer
    table = _table(canonical, schedule, task)
    stored = "BF16" if dtype == "bfloat16" else "F32"
    e, layer, D = 3, 1, config.hidden_size
    timesteps, index = _plan(schedule, task, e)
    inputs = canonical_input(timesteps, weights, config, stored)
    weight, bias = (
        weights[f"transformer_blocks.{layer}.adaln_proj.linear.{kind}"] for kind in ("weight", "bias")
    )
    for kind, tag in _KINDS.items():
        rows = slice(tag * 6 * D, (tag + 1) * 6 * D)
        expected = _exact(inputs[index[kind]], weight[rows], bias[rows], dtype)
        assert table[f"step.{e:03d}.blocks"][layer, tag].flatten().tolist() == expected
    if task == "fl2va":
        expected = _exact(inputs[index["condition"]], weight[: 6 * D], bias[: 6 * D], dtype)
        assert table["condition.blocks"][layer, 0].flatten().tolist() == expected
    final = _exact(
        inputs[index["audio"]], weights["norm_out.linear.weight"], weights["norm_out.linear.bias"], dtype
    )
    assert table[f"step.{e:03d}.final"][1].flatten().tolist() == final


def test_canonical_and_match_differ_by_rounding_only(canonical: Path, matched: Path, dtype: str) -> None:
    """One bfloat16 step is 2^-8 of the value; sums that cancel add an absolute part of the products' size."""
    tolerance = 2**-7 if dtype == "bfloat16" else 2**-20
    for schedule in SCHEDULES:
        left, right = _table(canonical, schedule, "t2va"), _table(matched, schedule, "t2va")
        for name, value in left.items():
            if not name.startswith("__pad__."):
                torch.testing.assert_close(value.float(), right[name].float(), rtol=tolerance, atol=tolerance)


def test_canonical_input_agrees_with_the_live_embedding() -> None:
    """Same function, other roundings: some float32 steps on values around one."""
    config = preset("test").model.transformer
    g = torch.Generator().manual_seed(3)
    shapes = {
        "linear_1.weight": (config.time_embed_hidden_dim, config.freq_dim),
        "linear_1.bias": (config.time_embed_hidden_dim,),
        "linear_2.weight": (config.time_embed_dim, config.time_embed_hidden_dim),
        "linear_2.bias": (config.time_embed_dim,),
    }
    weights = {f"time_embedder.{n}": torch.randn(s, generator=g) / s[-1] ** 0.5 for n, s in shapes.items()}
    timesteps = [0.0, 0.3, 0.7, 0.999]
    live = adaln_input(timestep_embedding(torch.tensor(timesteps), weights, config), torch.float32)
    torch.testing.assert_close(canonical_input(timesteps, weights, config, "F32"), live, rtol=1e-5, atol=1e-6)


def test_tables_do_not_depend_on_what_is_prepared_beside_them(
    checkpoint: Path, canonical: Path, dtype: str, tmp_path: Path
) -> None:
    options = PrepareOptions(tasks=("t2va",), schedules=("base-4",), dtype=dtype)  # type: ignore[arg-type]
    prepare_checkpoint(checkpoint, tmp_path / "alone", options)
    name = "adaln/base-4.t2va.safetensors"
    assert (tmp_path / "alone" / name).read_bytes() == (canonical / name).read_bytes()


def test_weights_digest_covers_the_published_projections_in_order(canonical: Path, checkpoint: Path) -> None:
    published = _published(checkpoint)
    linears = ["time_embedder.linear_1", "time_embedder.linear_2"]
    linears += [f"transformer_blocks.{i}.adaln_proj.linear" for i in range(2)] + ["norm_out.linear"]
    digest = hashlib.sha256()
    for linear in linears:
        for kind in ("weight", "bias"):
            digest.update(published[f"{linear}.{kind}"].view(torch.uint8).numpy().tobytes())
    assert {s.weights_sha256 for s in read_manifest(canonical).schedules} == {digest.hexdigest()}


def test_manifest_states_sigmas_and_condition_timesteps_as_bits(canonical: Path) -> None:
    schedules = {(s.name, s.task): s for s in read_manifest(canonical).schedules}
    assert set(schedules) == {(name, task) for name in SCHEDULES for task in ("fl2va", "t2va")}
    base = schedules["base-4", "fl2va"]
    assert (base.evaluations, base.mode) == (4, "canonical")
    assert (base.video_sigmas[0], base.video_sigmas[-1]) == ("3f800000", "00000000")
    assert base.condition_timesteps == (np.float32(0.999).view(np.uint32).item().to_bytes(4).hex(),)
    assert base.condition_index == (0, 0, 0, 0)
    assert schedules["base-4", "t2va"].condition_timesteps == ()


def test_match_states_where_it_was_computed_and_canonical_does_not(canonical: Path, matched: Path) -> None:
    options = [
        json.loads((folder / "manifest.json").read_bytes())["options"] for folder in (canonical, matched)
    ]
    assert "adaln_device" not in options[0]
    assert f"torch {torch.__version__}" in options[1]["adaln_device"]


def _config() -> TransformerConfig:
    return preset("test").model.transformer


@pytest.mark.parametrize(
    ("mode", "schedule", "rows", "index"),
    [
        ("canonical", "base-4", 1, (0, 0, 0, 0)),
        ("match", "base-4", 2, (0, 1, 1, 1)),  # the first plan has two timesteps, the others three
        ("match", "base-1", 1, (0,)),
    ],
)
def test_condition_rows(mode: str, schedule: str, rows: int, index: Sequence[int]) -> None:
    table = plan_table(named_schedule(schedule), "fl2va", _config(), "BF16", mode, has_keyframes=True)  # type: ignore[arg-type]
    assert len(table.condition_timesteps) == rows
    assert table.condition_index == tuple(index)


def test_released_table_has_the_stated_size() -> None:
    """49 steps of 50 x 3 x 6 x 5376 + 4 x 5376 bfloat16 values."""
    config = preset("full").model.transformer
    table = plan_table(named_schedule("base-49"), "t2va", config, "BF16", "canonical", has_keyframes=False)
    assert sum(p.end - p.begin for p in table.file.tensors if p.output) == 49 * (50 * 18 + 4) * 5376 * 2
    assert len(table.file.tensors) == 2 * 49  # and needs no filler
