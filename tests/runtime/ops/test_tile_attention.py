"""Attention inside tiles: against the formula, on strided views, and which backend is chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loader.errors import CapabilityError
from runtime.ops.tile_attention import TileAttention

CPU = torch.device("cpu")


def by_the_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhk,bjhk->bhqj", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqj,bjhk->bqhk", scores.softmax(-1), v)


@pytest.mark.parametrize(("batch", "tokens", "heads", "dim"), [(1, 5, 1, 8), (3, 17, 4, 16)])
def test_every_tile_attends_to_itself(batch: int, tokens: int, heads: int, dim: int) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(batch, tokens, 3, heads, dim, dtype=torch.float64)
    q, k, v = qkv.unbind(2)  # as the decoder has them: views of one product
    found = TileAttention(CPU, torch.float64)(q, k, v)
    torch.testing.assert_close(found, by_the_formula(q, k, v), rtol=0, atol=1e-12)


def test_the_cpu_leaves_the_choice_to_torch_and_refuses_cudnn() -> None:
    assert TileAttention(CPU, torch.float16).backend == "torch"
    with pytest.raises(CapabilityError, match="cudnn"):
        TileAttention(CPU, torch.float16, "cudnn")


def test_backend_that_tiles_cannot_run_on_is_refused_by_name() -> None:
    with pytest.raises(CapabilityError, match=r"'flash3'; allowed: \['auto', 'cudnn', 'flash'\]"):
        TileAttention(CPU, torch.float16, "flash3")


@pytest.mark.gpu
def test_backends_agree_at_the_released_shape() -> None:
    """Two roundings of float16 probabilities and sums in another order: 2^-9 of values up to about 1."""
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 1797, 3, 32, 64, dtype=torch.float16, device="cuda").unbind(2)
    device = torch.device("cuda")
    chosen = TileAttention(device, torch.float16)
    assert chosen.backend == "cudnn"
    flash = TileAttention(device, torch.float16, "flash")(q, k, v)
    torch.testing.assert_close(chosen(q, k, v), flash, rtol=0, atol=2**-9)
