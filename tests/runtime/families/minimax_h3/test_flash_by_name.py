"""The conditioner's warm-up asks for flash attention without choosing a backend for the process."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import AttentionChoice, DenseAttention
from runtime.compute import Compute
from runtime.families.minimax_h3.model.flash_by_name import (
    FlashByName,
    flash_attention,
    is_taken,
    without_choosing,
)
from runtime.ops.attention import attention


def dense(backend: str) -> DenseAttention:
    return DenseAttention(AttentionChoice(backend, "test", rest=("math",)))  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_its_result_has_the_form_of_attention(causal: bool) -> None:
    """Grouped heads and strided views, on tensors without data."""
    fused = torch.empty(5, 4 + 2 * 2, 16, dtype=torch.bfloat16, device="meta")
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    out = flash_attention(q, k, v, causal=causal, scale=None)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


@pytest.mark.parametrize(
    "q",
    [
        pytest.param(torch.zeros(3, 2, 16, dtype=torch.bfloat16), id="cpu"),
        pytest.param(torch.zeros(3, 2, 16, device="meta"), id="float32"),
        pytest.param(torch.zeros(3, 2, 12, dtype=torch.bfloat16, device="meta"), id="odd heads"),
        pytest.param(torch.zeros(3, 2, 264, dtype=torch.bfloat16, device="meta"), id="wide heads"),
    ],
)
def test_what_the_kernel_does_not_take_is_left_to_the_choice(q: torch.Tensor) -> None:
    assert not is_taken(q)


def test_on_a_cpu_the_choice_runs() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 6, 2, 8, generator=generator).unbind()
    torch.testing.assert_close(
        FlashByName(dense("flash"))(q, k, v, causal=True, scale=0.3),
        attention(q, k, v, causal=True, scale=0.3),
        rtol=0,
        atol=1e-6,  # two kernels of torch, float32
    )


def test_only_a_chosen_flash_backend_is_replaced() -> None:
    compute = Compute("cuda", dense("cudnn"), dense("flash"))
    beside = without_choosing(compute)
    assert isinstance(beside.short_attention, FlashByName)
    assert (beside.attention, beside.device) == (compute.attention, compute.device)
    for short in (attention, dense("math")):
        assert without_choosing(Compute("cpu", attention, short)).short_attention is short


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_kernel_that_the_choice_runs(causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(27, 64 + 16, 128, device="cuda", generator=generator).bfloat16()
    q, k, v = fused[:, :64], fused[:, 64:72], fused[:, 72:]
    short = dense("flash")
    assert is_taken(q)
    assert torch.equal(FlashByName(short)(q, k, v, causal=causal), short(q, k, v, causal=causal))
