"""What is warmed before the first evaluation has the sizes of the request, and changes nothing that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loader.errors import RequestError
from loader.manifest import Manifest, read_manifest
from runtime.compute import Compute
from runtime.families.minimax_h3.family import MiniMaxH3
from runtime.families.minimax_h3.model.job import JobInput
from runtime.families.minimax_h3.model.warm_denoiser import (
    ITEMS,
    check_items,
    warm_denoiser,
)
from runtime.families.minimax_h3.products import activation_bytes, block_products
from runtime.ops.attention import attention
from scripts.tiny_presets import preset
from tests.fakes.products import Products

REQUEST = {"prompt": "rain on a tin roof", "width": 64, "height": 64, "num_frames": 22, "seed": 11}


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


@pytest.fixture(scope="module")
def given(bundle: Path, manifest: Manifest) -> JobInput:
    family = MiniMaxH3(manifest, bundle, "t2va", "base-3")
    return family._job_input(family.prepare(family.parse(REQUEST)))


def run(given: JobInput, manifest: Manifest, items: set[str]) -> tuple[list[Any], list[tuple[int, int, int]]]:
    """Shapes that attention saw, and the products."""
    shapes: list[Any] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        shapes.append(tuple(q.shape))
        return attention(q, k, v, **options)

    with Products() as products:
        warm_denoiser(given, manifest, Compute("cpu", recorded, attention), items)
    return shapes, products.seen


def test_products_are_those_of_a_block_at_the_request_s_rows(given: JobInput, manifest: Manifest) -> None:
    prefix = "transformer/transformer_blocks.0."
    names = ("attn.to_qkv", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
    stored = [tuple(manifest.tensors[f"{prefix}{name}.weight"].shape) for name in names]
    assert list(block_products(given.config.transformer)) == stored
    shapes, products = run(given, manifest, {"products"})
    assert shapes == []
    assert products == [(*shape, given.sequence.num_rows) for shape in stored]


def test_step_covers_everything_that_an_evaluation_multiplies(given: JobInput, manifest: Manifest) -> None:
    config, sequence = given.config.transformer, given.sequence
    shapes, products = run(given, manifest, {"step"})
    heads, width = config.num_attention_heads, config.attention_head_dim
    assert shapes == [(sequence.num_rows, heads, width)]
    D, rows = config.hidden_size, sequence.num_rows
    embed = [(D, config.video_row_dim, sequence.num_video), (D, config.audio_in_channels, sequence.num_audio)]
    heads_out = [(columns, out, count) for out, columns, count in embed]
    assert products == [*embed, *((*shape, rows) for shape in block_products(config)), *heads_out]


def test_nothing_runs_unless_asked_for(given: JobInput, manifest: Manifest) -> None:
    assert run(given, manifest, set()) == ([], [])
    assert run(given, manifest, {"memory"}) == ([], [])


def test_unknown_item_is_refused_by_name() -> None:
    check_items(ITEMS)
    with pytest.raises(RequestError, match=r"warm_up: unknown warm-up; found \['plan'\]; allowed: "):
        check_items({"memory", "plan"})


def test_memory_of_a_released_evaluation() -> None:
    """(3 x 14,336 + 4 x 5,376) bf16 values a row, 2.9 GB at 22,726 rows."""
    config = preset("full").model.transformer
    assert activation_bytes(config, 22_726, torch.bfloat16.itemsize) == 22_726 * 2 * 64_512
