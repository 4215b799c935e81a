"""Normalisations: values and, above all, where they round."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from runtime.ops.norms import layer_norm, rms_norm, rms_norm_rounded

SHAPES = pytest.mark.parametrize("shape", [(1, 8), (5, 48), (3, 4, 33), (2, 5376)], ids=str)


def inputs(shape, dtype, seed=0):
    torch.manual_seed(seed)
    return (3 * torch.randn(shape)).to(dtype), (1 + 0.3 * torch.randn(shape[-1])).to(dtype)


def normalised(x, eps):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


@SHAPES
def test_rms_norm_rounds_once_after_the_weight(shape):
    x, weight = inputs(shape, torch.bfloat16)

    exact = normalised(x, 1e-5) * weight.double()

    # Half the distance of bf16 neighbours (8 significant bits), 1 % more for the fp32 inside. Two roundings exceed it.
    half_step = 2.0 ** (exact.abs().frexp().exponent - 9).double()
    assert ((rms_norm(x, weight, 1e-5).double() - exact).abs() <= half_step * 1.01).all()


@SHAPES
def test_rms_norm_in_fp32_is_the_formula(shape):
    x, weight = inputs(shape, torch.float32)

    exact = normalised(x, 1e-5) * weight.double()

    # A few fp32 roundings of 2^-24 each.
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.oracle
@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounded_equals_transformers(shape, dtype):
    x, weight = inputs(shape, dtype)
    module = Qwen3VLTextRMSNorm(shape[-1], eps=1e-6).to(dtype)
    module.weight.data.copy_(weight)

    assert torch.equal(rms_norm_rounded(x, weight, 1e-6), module(x))


def test_the_two_rms_norms_differ_in_bf16():
    x, weight = inputs((64, 128), torch.bfloat16)

    assert not torch.equal(rms_norm(x, weight, 1e-6), rms_norm_rounded(x, weight, 1e-6))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_eps_is_inside_the_root(eps):
    x = torch.full((1, 4), 1e-2)

    expected = 1e-2 / (1e-4 + eps) ** 0.5

    for norm in (rms_norm, rms_norm_rounded):
        torch.testing.assert_close(norm(x, torch.ones(4), eps), torch.full((1, 4), expected))


@SHAPES
def test_layer_norm_is_the_formula(shape):
    x, weight = inputs(shape, torch.float32)
    bias = torch.randn(shape[-1])
    wide = x.double() - x.double().mean(-1, keepdim=True)

    exact = normalised(wide, 1e-6) * weight.double() + bias.double()

    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-6).double(), exact, rtol=1e-5, atol=1e-6)
