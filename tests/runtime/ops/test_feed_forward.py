"""Linear and gated feed-forward layers, against the published modules."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention import FeedForward
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextMLP

from runtime.ops.feed_forward import swiglu, swiglu_gate_first
from runtime.ops.linear import linear

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.oracle
@DTYPES
@torch.inference_mode()
def test_swiglu_equals_diffusers(dtype):
    torch.manual_seed(0)
    module = FeedForward(24, inner_dim=40, activation_fn="swiglu", bias=False).to(dtype)
    x = torch.randn(7, 24).to(dtype)

    assert torch.equal(swiglu(x, module.net[0].proj.weight, module.net[2].weight), module(x))


@pytest.mark.oracle
@torch.inference_mode()
def test_swiglu_gate_first_equals_transformers():
    torch.manual_seed(0)
    module = Qwen3VLTextMLP(Qwen3VLTextConfig(hidden_size=24, intermediate_size=40)).bfloat16()
    x = torch.randn(7, 24).bfloat16()
    gate_up = torch.cat((module.gate_proj.weight, module.up_proj.weight))

    found = swiglu_gate_first(x, gate_up, module.down_proj.weight)

    # The oracle multiplies two matrices; another shape may sum in another order and move the last bf16 bit.
    torch.testing.assert_close(found, module(x), rtol=2**-7, atol=2**-9)


def test_the_two_orders_are_the_same_function_of_swapped_halves():
    torch.manual_seed(1)
    x, up_gate, down = torch.randn(5, 8), torch.randn(24, 8), torch.randn(8, 12)

    assert torch.equal(swiglu(x, up_gate, down), swiglu_gate_first(x, up_gate.roll(12, 0), down))
    assert not torch.equal(swiglu(x, up_gate, down), swiglu_gate_first(x, up_gate, down))


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_linear_works_in_the_dtype_of_the_weight(into):
    torch.manual_seed(2)
    other = torch.bfloat16 if into == torch.float32 else torch.float32
    x, weight, bias = torch.randn(3, 4, 6).to(other), torch.randn(5, 6).to(into), torch.randn(5).to(into)

    found = linear(x, weight, bias)

    assert found.dtype == into
    assert torch.equal(
        found, x.to(into) @ weight.T + bias if into == torch.float32 else linear(x.to(into), weight, bias)
    )
