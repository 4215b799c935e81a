"""Adapters on modulation projections and the time embedder: tables are those of the merged weights, in every spelling."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from loader.errors import ArtifactError
from loader.manifest import read_manifest
from prepare.checkpoint import open_component
from prepare.families.minimax_h3.native import native_name
from prepare.family import PrepareOptions, open_source
from prepare.pipeline import prepare_checkpoint
from prepare.scan import FiniteScan
from prepare.validate import validate_directory
from runtime.schedules import named_schedule
from tests.prepare.lora_files import is_nearest, random_pair, write_adapter

D, T, TH, FREQ, LAYERS = (
    48,
    24,
    48,
    16,
    3,
)  # of the tiny checkpoint: hidden, time embedding, its hidden, features
MODULES = {
    "time_embedder.linear_1": (TH, FREQ),
    "time_embedder.linear_2": (T, TH),
    **{f"transformer_blocks.{i}.adaln_proj.linear": (18 * D, T) for i in range(LAYERS)},
    "norm_out.linear": (2 * D, T),
}
Factors = Mapping[str, tuple[Tensor, Tensor]]
Mode = Literal["canonical", "match"]


def factors(seed: int, rank: int, modules: Mapping[str, tuple[int, int]] = MODULES) -> Factors:
    return {name: random_pair(seed + i, *shape, rank) for i, (name, shape) in enumerate(modules.items())}


def peft(pairs: Factors, alpha: float | None, prefix: str = "transformer.") -> dict[str, Tensor]:
    tensors = {}
    for module, (b, a) in pairs.items():
        tensors |= {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}
        if alpha is not None:
            tensors[f"{prefix}{module}.alpha"] = torch.tensor(alpha)
    return tensors


def kohya(
    pairs: Factors, alpha: float | None, rename: Callable[[str], str] = lambda name: name
) -> dict[str, Tensor]:
    tensors = {}
    for module, (b, a) in pairs.items():
        flat = f"lora_unet_{rename(module).replace('.', '_')}"
        tensors |= {f"{flat}.lora_down.weight": a, f"{flat}.lora_up.weight": b}
        if alpha is not None:
            tensors[f"{flat}.alpha"] = torch.tensor(alpha)
    return tensors


def kohya_native(pairs: Factors, alpha: float | None) -> dict[str, Tensor]:
    return kohya(
        pairs, alpha, lambda module: native_name("transformer", f"{module}.weight").removesuffix(".weight")
    )


def native(pairs: Factors, alpha: float | None) -> dict[str, Tensor]:
    renamed = {native_name("transformer", f"{m}.weight").removesuffix(".weight"): p for m, p in pairs.items()}
    return peft(renamed, alpha, "")


SPELLINGS: dict[str, Callable[[Factors, float | None], dict[str, Tensor]]] = {
    "peft": peft,
    "kohya": kohya,
    "kohya-native": kohya_native,
    "native": native,
}


def published(checkpoint: Path) -> dict[str, Tensor]:
    """The projections and the time embedder of a Diffusers tree."""
    files = sorted((checkpoint / "transformer").glob("*.safetensors"))
    stored = {name: value for path in files for name, value in load_file(path).items()}
    return {
        f"{module}.{kind}": stored[f"{module}.{kind}"] for module in MODULES for kind in ("weight", "bias")
    }


def merged(weights: Mapping[str, Tensor], pairs: Factors, factor: float) -> dict[str, Tensor]:
    """W + factor * (B @ A) in torch's float64, rounded once to the stored type."""
    result = dict(weights)
    for module, (b, a) in pairs.items():
        name = f"{module}.weight"
        exact = weights[name].double() + factor * (b.double() @ a.double())
        result[name] = nearest(exact, weights[name].dtype)
    return result


def nearest(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding of float64; torch's own goes through float32, which can round twice."""
    rounded = exact.to(dtype)
    if dtype == torch.bfloat16 and not is_nearest(rounded, exact):
        bits = rounded.view(torch.int16)
        choices = torch.stack([(bits + step).view(torch.bfloat16) for step in (-1, 0, 1)])
        best = (choices.double() - exact).abs().argmin(0, keepdim=True)
        rounded = choices.gather(0, best)[0]
    return rounded


def tables(
    folder: Path,
    checkpoint: Path,
    *lora: tuple[Path, float],
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    mode: Mode = "canonical",
    replaced: Mapping[str, Tensor] | None = None,
    workers: int = 1,
) -> tuple[dict[str, Tensor], str]:
    """Tensors of the tables of base-2 and the digest of what they came from.

    replaced: published tensors to read from another file, as if the checkpoint held them.
    """
    options = PrepareOptions(tasks=("fl2va",), schedules=("base-2",), lora=lora, dtype=dtype, adaln=mode)
    source = open_source(checkpoint, options)
    folder.mkdir()
    if replaced is not None:
        save_file(dict(replaced), folder / "model.safetensors")
        own = {**source.sources["transformer"], **open_component(folder).tensors}
        source = replace(source, sources={**source.sources, "transformer": own})
    with ExitStack() as stack:
        paths = [folder / table.file.path.replace("/", "-") for table in source.tables]
        files = [stack.enter_context(path.open("w+b")) for path in paths]
        _, digest = source.write_tables(files, options, FiniteScan(), lambda n: None, workers)
    return {name: value for path in paths for name, value in load_file(path).items()}, digest


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("layout", ["diffusers", "native"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_tables_of_the_merged_weights(
    spelling: str, layout: str, tmp_path: Path, diffusers_checkpoint: Path, native_checkpoint: Path
) -> None:
    pairs = factors(20, rank=3)
    path = write_adapter(tmp_path / "a.safetensors", SPELLINGS[spelling](pairs, 6.0))
    tree = {"diffusers": diffusers_checkpoint, "native": native_checkpoint}[layout]
    found, digest = tables(tmp_path / "found", tree, (path, -0.5))
    weights = merged(published(diffusers_checkpoint), pairs, -0.5 * 6.0 / 3)
    expected, _ = tables(tmp_path / "expected", diffusers_checkpoint, replaced=weights)
    assert_same(found, expected)
    plain, plain_digest = tables(tmp_path / "plain", diffusers_checkpoint)
    assert not any(torch.equal(plain[name], value) for name, value in found.items() if "__pad__" not in name)
    assert digest != plain_digest


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    rank=st.integers(1, 5),
    scale=st.floats(0.01, 2.0).map(lambda value: round(value, 3)),
    alpha=st.none() | st.integers(1, 9).map(float),
    chosen=st.sets(st.sampled_from(sorted(MODULES)), min_size=1),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    mode=st.sampled_from(["canonical", "match"]),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spelling=st.sampled_from(sorted(SPELLINGS)),
)
def test_tables_are_a_pure_function_of_the_merged_weights(
    seed: int,
    rank: int,
    scale: float,
    alpha: float | None,
    chosen: set[str],
    dtype: Literal["bfloat16", "float32"],
    mode: Mode,
    stored: torch.dtype,
    spelling: str,
    tmp_path_factory: pytest.TempPathFactory,
    diffusers_checkpoint: Path,
) -> None:
    """Only float32 directories keep more than the published type of a merged matrix, so both sides widen first."""
    folder = tmp_path_factory.mktemp("property")
    modules = {name: MODULES[name] for name in sorted(chosen)}
    pairs = {name: (b.to(stored), a.to(stored)) for name, (b, a) in factors(seed, rank, modules).items()}
    path = write_adapter(folder / "a.safetensors", SPELLINGS[spelling](pairs, alpha))
    found, _ = tables(folder / "found", diffusers_checkpoint, (path, scale), dtype=dtype, mode=mode)
    weights = published(diffusers_checkpoint)
    if dtype == "float32":
        weights = {name: value.float() for name, value in weights.items()}
    weights = merged(weights, pairs, scale * (1.0 if alpha is None else alpha / rank))
    expected, _ = tables(
        folder / "expected", diffusers_checkpoint, dtype=dtype, mode=mode, replaced=weights, workers=2
    )
    assert_same(found, expected)


def test_digest_names_the_merged_projections_and_not_the_spelling(
    tmp_path: Path, diffusers_checkpoint: Path, native_checkpoint: Path
) -> None:
    """Same changes, same digest: whatever the names, the layout and the order of adapters; other changes, another."""
    first, second = factors(1, rank=2), factors(50, rank=4)
    paths = {
        name: write_adapter(tmp_path / f"{name}.safetensors", make(pairs, 3.0))
        for name, make, pairs in (("a", peft, first), ("b", kohya, first), ("c", native, second))
    }
    attention = write_adapter(
        tmp_path / "d.safetensors", peft({"transformer_blocks.0.attn.to_q": random_pair(9, 64, D)}, 3.0)
    )
    runs = {
        "a+c": (diffusers_checkpoint, (paths["a"], 1.0), (paths["c"], 0.5)),
        "c+b": (native_checkpoint, (paths["c"], 0.5), (paths["b"], 1.0)),
        "scaled": (diffusers_checkpoint, (paths["a"], 1.0), (paths["c"], 0.25)),
        "plain": (diffusers_checkpoint,),
        "attention": (diffusers_checkpoint, (attention, 1.0)),
    }
    digests = {name: tables(tmp_path / name, *arguments)[1] for name, arguments in runs.items()}  # type: ignore[arg-type]
    assert digests["a+c"] == digests["c+b"]
    assert digests["plain"] == digests["attention"]
    assert len(set(digests.values())) == 3


def test_bundle_differences_reach_the_tables(tmp_path: Path, diffusers_checkpoint: Path) -> None:
    """`.diff` and `.diff_b`, the form of the distilled release's bundle."""
    generator = torch.Generator().manual_seed(3)
    names = ["time_embedder.linear_1", "transformer_blocks.2.adaln_proj.linear", "norm_out.linear"]
    tensors, weights = {}, published(diffusers_checkpoint)
    for module in names:
        for suffix, kind in ((".diff", "weight"), (".diff_b", "bias")):
            change = torch.randn(weights[f"{module}.{kind}"].shape, generator=generator) * 0.1
            tensors[module + suffix] = change
            exact = weights[f"{module}.{kind}"].double() + change.double()
            weights[f"{module}.{kind}"] = nearest(exact, weights[f"{module}.{kind}"].dtype)
    counts = {"low_rank_tensors": "0", "diff_tensors": "6", "set_weight_tensors": "0"}
    path = write_adapter(
        tmp_path / "adapter_model.safetensors", tensors, format="fastvideo-lora-v2", **counts
    )
    found, _ = tables(tmp_path / "found", diffusers_checkpoint, (path, 1.0))
    expected, _ = tables(tmp_path / "expected", diffusers_checkpoint, replaced=weights)
    assert_same(found, expected)


def test_projection_that_is_not_finite_once_merged_is_named(
    tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    b, a = random_pair(1, 18 * D, T)
    b[5] = float("inf")
    path = write_adapter(
        tmp_path / "a.safetensors", peft({"transformer_blocks.1.adaln_proj.linear": (b, a)}, None)
    )
    with pytest.raises(
        ArtifactError, match=r"not finite.*blocks\.1\.adaln_proj\.linear\.weight \(not finite"
    ):
        tables(tmp_path / "out", diffusers_checkpoint, (path, 1.0))


def test_prepared_directory_with_merged_projections_is_sound(
    tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    path = write_adapter(tmp_path / "turbo.safetensors", kohya(factors(4, rank=2), 2.0))
    options = PrepareOptions(tasks=("t2va",), schedules=("base-1",), lora=((path, 0.5),))
    prepare_checkpoint(diffusers_checkpoint, tmp_path / "model", options)
    assert validate_directory(tmp_path / "model").problems == ()
    manifest = read_manifest(tmp_path / "model")
    (record,) = manifest.source["adapters"]  # type: ignore[misc, attr-defined]
    assert record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:peft")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:accelerate")
@pytest.mark.parametrize("seed", [0, 1])
def test_tables_are_the_oracles_projections_with_pefts_merge(
    seed: int, tmp_path: Path, diffusers_checkpoint: Path
) -> None:
    """peft merges in float32 and diffusers projects in float32: some float32 steps of sums of about one."""
    peft_library = pytest.importorskip("peft")
    diffusers = pytest.importorskip("diffusers")
    folder = diffusers_checkpoint / "transformer"
    model = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
    torch.manual_seed(seed)
    config = peft_library.LoraConfig(
        r=2 + seed, lora_alpha=5, target_modules=list(MODULES), init_lora_weights=False
    )
    adapted = peft_library.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    assert len(load_file(path)) == 2 * len(MODULES)
    found, _ = tables(tmp_path / "out", diffusers_checkpoint, (path, 1.0), dtype="float32", mode="match")
    oracle = adapted.merge_and_unload()
    for e in range(2):
        _compare_step(found, oracle, e)


def _compare_step(found: Mapping[str, Tensor], oracle: Any, e: int) -> None:
    """One evaluation against the model's own modules. Row kinds: video, text (video's timestep), audio; keyframe."""
    schedule = named_schedule("base-2")
    video, audio = schedule.video_timesteps[e], schedule.audio_timesteps[e]
    condition = schedule.condition_timestep(e, 0.999)
    with torch.no_grad():
        temb = oracle.time_embedder(oracle.time_proj(torch.tensor([video, audio, condition])))
        for layer, block in enumerate(oracle.transformer_blocks):
            terms = torch.stack(block.adaln_proj(temb), dim=1).unflatten(0, (3, 3))  # [M, 3, 6, D]
            expected = torch.stack((terms[0, 0], terms[0, 1], terms[1, 2]))
            torch.testing.assert_close(found[f"step.{e:03d}.blocks"][layer], expected, rtol=2e-5, atol=2e-5)
            rows = found["condition.blocks"][layer]
            assert any(torch.allclose(row, terms[2, 0], rtol=2e-5, atol=2e-5) for row in rows)
        final = oracle.norm_out.linear(torch.nn.functional.silu(temb)).unflatten(-1, (2, -1))
    torch.testing.assert_close(found[f"step.{e:03d}.final"], final[:2], rtol=2e-5, atol=2e-5)
