"""Adapters merged into prepared weights, in every spelling, against W + scale * (alpha / rank) * (B @ A) in torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loader.errors import ArtifactError, RequestError
from loader.manifest import read_manifest
from prepare.adapters import parse_adapter
from prepare.cli import prepare_main
from prepare.family import PrepareOptions, open_source
from prepare.validate import validate_directory
from runtime.families.minimax_h3.capabilities import capabilities_of
from tests.prepare.lora_files import (
    BLOCK,
    FFN,
    HIDDEN,
    INNER,
    RANK,
    is_nearest,
    prepared_transformer,
    random_pair,
    write_adapter,
)

B_OUT, A_OUT = random_pair(1, HIDDEN, INNER)
B_UP, A_UP = random_pair(2, 2 * FFN, HIDDEN)
PAIRS = {part: random_pair(10 + i, INNER, HIDDEN) for i, part in enumerate("qkv")}
REFINER = "token_refiner.refiner_blocks.0"


@pytest.fixture(scope="module")
def plain(diffusers_checkpoint: Path) -> dict[str, Tensor]:
    return prepared_transformer(diffusers_checkpoint)


@pytest.fixture(scope="module")
def checkpoints(diffusers_checkpoint: Path, native_checkpoint: Path) -> dict[str, Path]:
    return {"diffusers": diffusers_checkpoint, "native": native_checkpoint}


def _expected(plain: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Changed tensors in float64: the adapter of `SPELLINGS`, its factors times `factor`."""
    qkv = torch.cat([b.double() @ a.double() for b, a in PAIRS.values()])
    changes = {
        f"{BLOCK}.attn.to_qkv.weight": qkv,
        f"{BLOCK}.attn.to_out.0.weight": B_OUT.double() @ A_OUT.double(),
        f"{REFINER}.ff.net.0.proj.weight": B_UP.double() @ A_UP.double(),
    }
    return {name: plain[name].double() + factor * change for name, change in changes.items()}


def _modules() -> dict[str, tuple[Tensor, Tensor]]:
    return {
        **{f"{BLOCK}.attn.to_{part}": pair for part, pair in PAIRS.items()},
        f"{BLOCK}.attn.to_out.0": (B_OUT, A_OUT),
        f"{REFINER}.ff.net.0.proj": (B_UP, A_UP),
    }


def _peft(prefix: str, alpha: float | None = None) -> dict[str, Tensor]:
    tensors = {}
    for module, (b, a) in _modules().items():
        tensors[f"{prefix}{module}.lora_A.weight"] = a
        tensors[f"{prefix}{module}.lora_B.weight"] = b
        if alpha is not None:
            tensors[f"{prefix}{module}.alpha"] = torch.tensor(alpha)
    return tensors


def _kohya(alpha: float) -> dict[str, Tensor]:
    tensors = {}
    for module, (b, a) in _modules().items():
        flat = f"lora_unet_{module.replace('.', '_')}"
        tensors |= {
            f"{flat}.lora_down.weight": a,
            f"{flat}.lora_up.weight": b,
            f"{flat}.alpha": torch.tensor(alpha),
        }
    return tensors


def _shared_qkv() -> tuple[Tensor, Tensor]:
    """One pair of rank 3 * RANK whose product is q, k and v of `PAIRS`, one after the other."""
    return torch.block_diag(*(b for b, _ in PAIRS.values())), torch.cat([a for _, a in PAIRS.values()])


def _fused() -> dict[str, Tensor]:
    b, a = _shared_qkv()
    rest = {key: value for key, value in _peft("").items() if ".to_q" not in key and ".to_k" not in key}
    rest = {key: value for key, value in rest.items() if ".to_v" not in key}
    return {**rest, f"{BLOCK}.attn.to_qkv.lora_A.weight": a, f"{BLOCK}.attn.to_qkv.lora_B.weight": b}


def _native() -> dict[str, Tensor]:
    """Native names: q, k, v rows interleaved per head, the gated matrix [gate; up]."""
    b, a = _shared_qkv()
    interleaved = b.view(3, 2, 32, -1).transpose(0, 1).reshape(3 * INNER, -1)
    halves = torch.cat([B_UP[FFN:], B_UP[:FFN]])
    pairs = {
        "blocks.1.attn.qkv_proj": (interleaved, a),
        "blocks.1.attn.out_proj": (B_OUT, A_OUT),
        "token_refiner.blocks.0.mlp.fc1": (halves, A_UP),
    }
    return {f"{m}.lora_{x}.weight": t for m, (up, down) in pairs.items() for x, t in (("B", up), ("A", down))}


SPELLINGS: dict[str, tuple[Callable[[], dict[str, Tensor]], dict[str, str], float]] = {
    "peft": (lambda: _peft("base_model.model."), {}, 1.0),
    "diffusers": (lambda: _peft("transformer."), {}, 1.0),
    "diffusers-alpha": (lambda: _peft("transformer.", alpha=2.0), {}, 2.0 / RANK),
    "diffusers-header": (
        lambda: _peft("transformer."),
        {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 6, "transformer.r": RANK})},
        6.0 / RANK,
    ),
    "kohya": (lambda: _kohya(3.0), {}, 3.0 / RANK),
    "fused": (_fused, {}, 1.0),
    "native": (_native, {}, 1.0),
}


@pytest.mark.parametrize("layout", ["diffusers", "native"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_changes_the_same_weights(
    spelling: str, layout: str, tmp_path: Path, checkpoints: dict[str, Path], plain: dict[str, Tensor]
) -> None:
    make, metadata, factor = SPELLINGS[spelling]
    path = write_adapter(tmp_path / "a.safetensors", make(), **metadata)
    merged = prepared_transformer(checkpoints[layout], (path, 0.5))
    expected = _expected(plain, 0.5 * factor)
    assert merged.keys() == plain.keys()
    for name, value in plain.items():
        if name in expected:
            assert merged[name].dtype == value.dtype
            assert is_nearest(merged[name], expected[name])
            assert not torch.equal(merged[name], value)
        else:
            assert torch.equal(merged[name], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_half_precision_are_multiplied_exactly(
    dtype: torch.dtype, tmp_path: Path, diffusers_checkpoint: Path, plain: dict[str, Tensor]
) -> None:
    module = f"{BLOCK}.ff.net.2"
    b, a = (factor.to(dtype) for factor in random_pair(3, HIDDEN, FFN))
    path = write_adapter(
        tmp_path / "a.safetensors", {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    )
    merged = prepared_transformer(diffusers_checkpoint, (path, 1.0))[f"{module}.weight"]
    assert is_nearest(merged, plain[f"{module}.weight"].double() + b.double() @ a.double())


def test_float32_directory_keeps_more_of_the_sum(
    tmp_path: Path, diffusers_checkpoint: Path, plain: dict[str, Tensor]
) -> None:
    path = write_adapter(tmp_path / "a.safetensors", _peft("transformer."))
    merged = prepared_transformer(diffusers_checkpoint, (path, 1.0), dtype="float32")
    for name, exact in _expected(plain, 1.0).items():
        assert torch.equal(merged[name], exact.float()), name


def test_adapters_add_up_and_order_does_not_matter(
    tmp_path: Path, diffusers_checkpoint: Path, plain: dict[str, Tensor]
) -> None:
    first = write_adapter(tmp_path / "a.safetensors", _peft("transformer."))
    second = write_adapter(tmp_path / "b.safetensors", _kohya(1.0))
    merged = prepared_transformer(diffusers_checkpoint, (first, 1.0), (second, -2.0))
    again = prepared_transformer(diffusers_checkpoint, (second, -2.0), (first, 1.0))
    for name, exact in _expected(plain, 1.0 - 2.0 / RANK).items():
        assert is_nearest(merged[name], exact)
        assert torch.equal(merged[name], again[name])


def _bundle(gates: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"{BLOCK}.attn.to_out.0.lora_A.weight": A_OUT,
        f"{BLOCK}.attn.to_out.0.lora_B.weight": B_OUT,
        f"{BLOCK}.norm1.diff": torch.randn(HIDDEN, generator=generator),
        "proj_in.diff_b": torch.randn(HIDDEN, generator=generator),
        f"{BLOCK}.ff.net.2.diff": torch.randn(HIDDEN, FFN, generator=generator),
    }
    if gates:
        for i in range(3):
            name = f"transformer_blocks.{i}.attn.to_gate_compress.set_weight"
            tensors[name] = torch.randn(INNER, HIDDEN, generator=generator).to(torch.bfloat16)
    counts = {"low_rank_tensors": "2", "diff_tensors": "3", "set_weight_tensors": "3" if gates else "0"}
    return tensors, {"format": "fastvideo-lora-v2", **counts}


def test_bundle_adds_differences_to_weights_norms_and_biases(
    tmp_path: Path, diffusers_checkpoint: Path, plain: dict[str, Tensor]
) -> None:
    tensors, metadata = _bundle(gates=False)
    path = write_adapter(tmp_path / "adapter_model.safetensors", tensors, **metadata)
    merged = prepared_transformer(diffusers_checkpoint, (path, 1.0))
    out = plain[f"{BLOCK}.attn.to_out.0.weight"].double() + B_OUT.double() @ A_OUT.double()
    assert is_nearest(merged[f"{BLOCK}.attn.to_out.0.weight"], out)
    for name, key in ((f"{BLOCK}.norm1.weight", f"{BLOCK}.norm1.diff"), (f"{BLOCK}.ff.net.2.weight",) * 2):
        key = key.replace(".weight", ".diff")
        assert is_nearest(merged[name], plain[name].double() + tensors[key].double())
    bias = plain["proj_in.bias"].double() + tensors["proj_in.diff_b"].double()
    assert torch.equal(merged["proj_in.bias"], bias.float())


@pytest.mark.parametrize("layout", ["diffusers", "native"])
def test_bundle_with_gates_makes_a_four_step_model(
    layout: str, tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    tensors, metadata = _bundle(gates=True)
    path = write_adapter(tmp_path / "adapter_model.safetensors", tensors, **metadata)
    source = open_source(checkpoints[layout], PrepareOptions(lora=((path, 1.0),)))
    assert (source.variant, list(source.tasks)) == ("fasth3", ["t2va"])
    assert [table.schedule.name for table in source.tables] == ["fasth3-4"]
    assert source.facts == {"sparse_attention": {"kind": "vsa-h3", "sparsity": 0.9, "tile": 64}}
    merged = prepared_transformer(checkpoints[layout], (path, 1.0))
    for i in range(3):
        name = f"transformer_blocks.{i}.attn.to_gate_compress"
        assert torch.equal(merged[f"{name}.weight"], tensors[f"{name}.set_weight"])


def _without(key: str) -> dict[str, Tensor]:
    tensors = _peft("transformer.")
    del tensors[key]
    return tensors


def _plus(**more: Tensor) -> dict[str, Tensor]:
    return {**_peft("transformer."), **{key.replace("__", "."): value for key, value in more.items()}}


def _pair(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    b, a = random_pair(4, rows, columns)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


ONE = torch.ones(2, 2)
REFUSED: dict[str, tuple[dict[str, Tensor], dict[str, str], str]] = {
    "unknown-key": (_plus(strange__key=ONE), {}, r"1 adapter keys are not understood; found strange\.key"),
    "dora": (
        _plus(transformer__x__lora_magnitude_vector=ONE),
        {},
        "keys are not understood; found transformer.x.lora_magnitude_vector",
    ),
    "other-model": (
        {"transformer.single_blocks.0.lora_A.weight": ONE, "transformer.single_blocks.0.lora_B.weight": ONE},
        {},
        "2 adapter keys name nothing in this checkpoint; found transformer.single_blocks.0",
    ),
    "text-encoder": (_plus(text_encoder__x__lora_A__weight=ONE), {}, "name nothing in this checkpoint"),
    "half": (
        _without(f"transformer.{BLOCK}.attn.to_q.lora_B.weight"),
        {},
        f"one factor of a pair is missing; found transformer.{BLOCK}.attn.to_q.lora_A",
    ),
    "shape": (_pair(f"{BLOCK}.attn.to_q", INNER + 1, HIDDEN), {}, r"another shape; found B \[65, 4\]"),
    "shape-of-a-projection": (
        _pair(f"{BLOCK}.adaln_proj.linear", 860, 24),
        {},
        r"adaln_proj\.linear: adapter tensors have another shape; found B \[860, 4\].*matrix \[864, 24\]",
    ),
    "set-weight-outside-a-bundle": (
        _plus(**{f"{BLOCK.replace('.', '__')}__attn__to_gate_compress__set_weight": ONE}),
        {},
        "not understood",
    ),
    "counts": (
        _bundle(gates=False)[0],
        {**_bundle(gates=False)[1], "diff_tensors": "4"},
        "diff_tensors says '4', the file has 3",
    ),
    "some-gates": (
        {k: v for k, v in _bundle(gates=True)[0].items() if "blocks.2" not in k},
        {**_bundle(gates=True)[1], "set_weight_tensors": "2"},
        "missing tensors: transformer_blocks.2.attn.to_gate_compress.weight",
    ),
    "integers": (
        _plus(proj_in__diff_b=torch.ones(HIDDEN, dtype=torch.int32)),
        {},
        "wrong type; found proj_in",
    ),
    "rslora": (
        _peft("transformer."),
        {"lora_adapter_metadata": json.dumps({"transformer.use_rslora": True})},
        "cannot be merged; found use_rslora",
    ),
    "infinite": (
        {f"{BLOCK}.norm1.diff": torch.full((HIDDEN,), float("inf"))},
        {},
        rf"not finite.*{BLOCK}\.norm1\.weight \(not finite once merged\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_whole_is_refused_by_name(
    case: str, tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    tensors, metadata, match = REFUSED[case]
    path = write_adapter(tmp_path / "a.safetensors", tensors, **metadata)
    with pytest.raises(ArtifactError, match=match):
        prepared_transformer(diffusers_checkpoint, (path, 1.0))


def test_replaced_gates_cannot_be_scaled(tmp_path: Path, diffusers_checkpoint: Path) -> None:
    tensors, metadata = _bundle(gates=True)
    path = write_adapter(tmp_path / "a.safetensors", tensors, **metadata)
    with pytest.raises(RequestError, match=r"cannot be scaled; found 0\.5"):
        open_source(diffusers_checkpoint, PrepareOptions(lora=((path, 0.5),)))
    with pytest.raises(RequestError, match="more than one adapter replaces gates"):
        open_source(diffusers_checkpoint, PrepareOptions(lora=((path, 1.0), (path, 1.0))))


def test_merged_adapter_is_recorded_with_its_digest(
    tmp_path: Path, diffusers_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_adapter(tmp_path / "turbo.safetensors", _kohya(2.0))
    options = ["--schedule", "base-2", "--task", "t2va", "--lora", f"{path}:0.75"]
    assert prepare_main([str(diffusers_checkpoint), str(tmp_path / "out"), *options]) == 0
    assert validate_directory(tmp_path / "out").problems == ()
    manifest = read_manifest(tmp_path / "out")
    assert manifest.options["lora"] == [{"name": "turbo.safetensors", "scale": 0.75}]
    (record,) = manifest.source["adapters"]  # type: ignore[misc, attr-defined]
    assert record == {
        "name": "turbo.safetensors",
        "format": "kohya",
        "scale": 0.75,
        "size": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert capabilities_of(manifest).tasks == ("t2va",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.safetensors", ("a.safetensors", 1.0)),
        ("a.safetensors:0.5", ("a.safetensors", 0.5)),
        ("/x:y/a.safetensors:-1e-1", ("/x:y/a.safetensors", -0.1)),
        ("/x/a:b.safetensors", ("/x/a:b.safetensors", 1.0)),
    ],
)
def test_scale_follows_the_last_colon(text: str, expected: tuple[str, float]) -> None:
    assert parse_adapter(text) == (Path(expected[0]), expected[1])


@pytest.mark.parametrize("text", ["a:0", "a:inf", "a:nan"])
def test_scale_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not a usable scale"):
        parse_adapter(text)
