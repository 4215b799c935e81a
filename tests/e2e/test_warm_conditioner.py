"""What is warmed for a waiting request's conditioner before the models are there: the products that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loader.manifest import Manifest, read_manifest
from runtime.compute import Compute
from runtime.families.minimax_h3.family import MiniMaxH3
from runtime.families.minimax_h3.model.first_uses import multiply_first
from runtime.families.minimax_h3.products import end_products, refiner_products, text_products
from runtime.family import Prepared
from runtime.native_torch import NativeTorch
from runtime.ops.attention import attention
from runtime.torch_preload import find_torch
from tests.fakes.products import Products

REQUEST = {"prompt": "rain on a tin roof", "width": 64, "height": 64, "num_frames": 22, "seed": 11}


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


@pytest.fixture(scope="module")
def family(bundle: Path, manifest: Manifest) -> MiniMaxH3:
    return MiniMaxH3(manifest, bundle, "t2va", "base-3")


@pytest.fixture(scope="module")
def prepared(family: MiniMaxH3) -> Prepared:
    return family.prepare(family.parse(REQUEST))


def test_products_are_those_of_the_conditioner(family: MiniMaxH3, prepared: Prepared) -> None:
    with Products() as conditioner:
        family.warm_up_conditioner(prepared, Compute("cpu", attention, attention))
    with Products() as first:
        family.warm_up_libraries(prepared, "cpu")
    assert set(first.seen) == set(conditioner.seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_in_the_type_of_the_matrices(family: MiniMaxH3, dtype: torch.dtype) -> None:
    with Products() as products:
        multiply_first(family.capabilities.config, 3, dtype, "cpu")
    assert set(products.types) == {dtype}
    assert {rows for _, _, rows in products.seen} == {3}


def native_names(family: MiniMaxH3, prepared: Prepared, *items: str) -> list[str]:
    """What runs natively, in order."""
    from runtime.families.minimax_h3.native_operations import operations

    native = NativeTorch(find_torch(), "cpu")
    done = list(operations(native, items, family.capabilities.config, prepared.parts["sequence"]))
    native.close()
    return done


def test_native_operations_cover_the_same_products(family: MiniMaxH3, prepared: Prepared) -> None:
    config = family.capabilities.config
    done = native_names(family, prepared, "kernels", "operators", "attention")
    _, *blocks = refiner_products(config.transformer)
    shapes = [*text_products(config.text), *blocks]
    assert [name for name in done if "product" in name] == [f"product {w} x {i}" for w, i in shapes]
    assert [name for name in done if "attention" in name] == [
        "text attention", "refiner attention", "attention plan",
    ]  # fmt: skip
    assert done[:2] == ["memory and fill", "norm"]


def test_native_products_of_a_step_are_those_of_the_denoiser(family: MiniMaxH3, prepared: Prepared) -> None:
    transformer, sequence = family.capabilities.config.transformer, prepared.parts["sequence"]
    with Products() as denoiser:
        family.warm_up_denoiser(prepared, Compute("cpu", attention, attention), ("step",))
    done = native_names(family, prepared, "step")
    wide = {(w, i) for w, i, rows in denoiser.seen if rows == sequence.num_rows}
    assert {name for name in done if "block's" in name} == {f"block's product {w} x {i}" for w, i in wide}
    ends = {(w, i, rows) for w, i, rows in denoiser.seen if rows in (sequence.num_video, sequence.num_audio)}
    counts = {"video": sequence.num_video, "audio": sequence.num_audio}
    assert {(w, i, counts[stream]) for stream, w, i in end_products(transformer)} == ends
    assert {name for name in done if "float32" in name} == {f"float32 product {w} x {i}" for w, i, _ in ends}


def test_native_operations_are_for_stored_types_they_know(
    family: MiniMaxH3, prepared: Prepared, manifest: Manifest
) -> None:
    native = NativeTorch(find_torch(), "cpu")
    steps = list(family.native_operations(prepared, native, ("operators",)))
    kernels = list(family.native_operations(None, native, ("kernels", "operators", "step")))
    native.close()
    assert bool(kernels) == (manifest.model["dtype"] == "BF16")
    assert bool(steps) == (manifest.model["dtype"] == "BF16")
