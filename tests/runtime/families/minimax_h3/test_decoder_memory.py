"""The batch of tiles follows from free memory, and the bound that it is computed with holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.families.minimax_h3.model.decoder_memory import fitting_tiles, free_memory, tile_bytes
from runtime.families.minimax_h3.model.video_decoder_network import COMPUTE_DTYPES, DecoderNetwork, Precision
from scripts.tiny_presets import preset
from tests.fakes.h3_vae import video_oracle, video_parts
from tests.fakes.peak_bytes import PeakBytes

FULL = preset("full").model.video_vae
GRID = (7, 16, 16)
WIDE = (768, 1344)


@pytest.mark.parametrize("precision", COMPUTE_DTYPES)
@pytest.mark.parametrize("overrides", [{}, {"decoder_ffn_mult": 4}], ids=["narrow", "released ratio"])
def test_a_forward_stays_below_the_bound(precision: Precision, overrides: dict[str, Any]) -> None:
    config, weights = video_parts(
        video_oracle(0, block_out_channels=(4, 4, 4, 4), norm_num_groups=2, **overrides)
    )
    network = DecoderNetwork(config, weights, torch.device("cpu"), precision)
    grid = (7, 6, 8)
    network.forward(torch.randn(1, 4, *grid))  # weights and tables are there already

    peaks = []
    for tiles in (1, 4):
        latents = torch.randn(tiles, 4, *grid)
        with torch.inference_mode(), PeakBytes() as memory:
            network.forward(latents)
        peaks.append(memory.peak)

    bound = tile_bytes(config, grid, COMPUTE_DTYPES[precision].itemsize)
    grown = (peaks[1] - peaks[0]) / 3
    assert 0.25 * bound < grown < bound


@pytest.mark.parametrize(
    ("free_gib", "batch"), [(200, 28), (16, 28), (8, 14), (6, 10), (4, 2), (1, 1), (0, 1)]
)
def test_batches_are_equal_and_fit(free_gib: int, batch: int) -> None:
    """28 tiles at 1344x768: two batches of 14, three of 10 (the last has 8), fourteen of 2, or one by one."""
    assert fitting_tiles(FULL, GRID, 2, 28, WIDE, free_gib << 30) == batch


def test_more_memory_never_means_a_smaller_batch() -> None:
    batches = [fitting_tiles(FULL, GRID, 2, 28, WIDE, free << 28) for free in range(0, 120)]
    assert batches == sorted(batches)
    assert batches[0] == 1
    assert batches[-1] == 28


def test_float32_takes_more_than_the_fast_path() -> None:
    assert tile_bytes(FULL, GRID, 4) > 1.3 * tile_bytes(FULL, GRID, 2)


def test_only_a_cuda_device_is_asked() -> None:
    assert free_memory(torch.device("cpu")) is None
