"""The eager operators against the published models' own code, bit for bit in bf16 and in float32, and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kernels import reference

pytestmark = pytest.mark.oracle

HIDDEN, HEADS, HEAD_DIM, FFN, TIME, ROWS = 64, 3, 32, 80, 24, 11
EPS = 1e-5


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Random parameters: the default ones of a norm hide the order of its roundings."""
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_operators_compose_to_the_published_block(dtype: torch.dtype, seed: int) -> None:
    from diffusers.models.transformers.transformer_minimax_h3 import (
        MiniMaxH3RotaryPosEmbed,
        MiniMaxH3TransformerBlock,
    )

    generator = torch.Generator().manual_seed(seed)
    block = MiniMaxH3TransformerBlock(HIDDEN, HEADS, HEAD_DIM, FFN, TIME, EPS, EPS)
    fill(block, generator)
    block = block.to(dtype)
    x = torch.randn(1, ROWS, HIDDEN, generator=generator).to(dtype)
    temb = torch.randn(2, TIME, generator=generator).to(dtype)
    index = torch.randint(0, 6, (ROWS,), generator=generator)
    positions = torch.rand(ROWS, 3, generator=generator, dtype=torch.float64) * 40
    cos, sin = MiniMaxH3RotaryPosEmbed(rope_freq_dim=4)(positions)
    with torch.no_grad():
        expected = block(x, temb, index, (cos, sin))[0]
        actual = run_block(block, x[0], temb, index.int(), cos.to(dtype), sin.to(dtype))
    assert torch.equal(actual, expected)


def run_block(block: nn.Module, x: Tensor, temb: Tensor, index: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The published block with its own projections and attention call, everything else from `reference`."""
    table = torch.stack(block.adaln_proj(temb), dim=1)  # [6, 6, D]
    shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = table.unbind(1)
    n = reference.norm_modulate(x, block.norm1.weight, shift_attn, scale_attn, index, EPS)
    attn = block.attn
    qkv = torch.cat((attn.to_q(n), attn.to_k(n), attn.to_v(n)), dim=-1)
    half = cos.shape[-1] // 2
    tables = cos.view(ROWS, -1)[:, :half], sin.view(ROWS, -1)[:, :half]
    q, k, v = reference.qk_norm_rope(
        qkv, attn.norm_q.weight, attn.norm_k.weight, *tables, num_heads=HEADS, num_kv_heads=HEADS, eps=EPS
    )
    o = nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)))
    update = attn.to_out[0](o[0].transpose(0, 1).flatten(1))
    x, n = reference.gate_norm_modulate(
        x, update, gate_attn, block.norm2.weight, shift_mlp, scale_mlp, index, EPS
    )
    update = block.ff.net[2](reference.swiglu(block.ff.net[0].proj(n)))
    return reference.gate_residual(x, update, gate_mlp, index)


def test_final_norm_is_the_published_one(dtype: torch.dtype) -> None:
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AdaLayerNormOut

    generator = torch.Generator().manual_seed(3)
    module = MiniMaxH3AdaLayerNormOut(HIDDEN, TIME, EPS)
    fill(module, generator)
    module = module.to(dtype)
    x = torch.randn(1, ROWS, HIDDEN, generator=generator).to(dtype)
    temb = torch.randn(2, TIME, generator=generator).to(dtype)
    index = torch.randint(0, 2, (ROWS,), generator=generator)
    rows = torch.tensor([7, 0, 3], dtype=torch.int32)
    with torch.no_grad():
        expected = module(x, temb, index)[0][rows.long()].float()
        shift, scale = module.linear(nn.functional.silu(temb)).view(2, 2, HIDDEN).unbind(1)
        actual = reference.final_norm_modulate(
            x[0], module.norm.weight, shift, scale, rows, index[rows.long()].int(), EPS
        )
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


def test_encoder_operators_are_the_published_ones(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as published

    generator = torch.Generator().manual_seed(4)
    heads, kv_heads = 4, 2
    q_norm, k_norm = published.Qwen3VLTextRMSNorm(HEAD_DIM), published.Qwen3VLTextRMSNorm(HEAD_DIM)
    fill(q_norm, generator)
    fill(k_norm, generator)
    q_norm, k_norm = q_norm.to(dtype), k_norm.to(dtype)
    qkv = torch.randn(ROWS, (heads + 2 * kv_heads) * HEAD_DIM, generator=generator).to(dtype)
    angles = torch.rand(ROWS, HEAD_DIM // 2, generator=generator) * 6.28
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    with torch.no_grad():
        q, k, v = qkv.view(1, ROWS, -1, HEAD_DIM).transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
        wide = [torch.cat((t, t), dim=-1)[None] for t in (cos, sin)]
        expected = published.apply_rotary_pos_emb(q_norm(q), k_norm(k), *wide)
        actual = reference.qk_norm_rope(
            qkv, q_norm.weight, k_norm.weight, cos, sin, heads, kv_heads, 1e-6, round_before_weight=True
        )
    assert torch.equal(actual[0], expected[0][0].transpose(0, 1))
    assert torch.equal(actual[1], expected[1][0].transpose(0, 1))
    assert torch.equal(actual[2], v[0].transpose(0, 1))


def test_gate_first_swaps_the_halves(dtype: torch.dtype) -> None:
    buffer = torch.randn(ROWS, 2 * FFN, generator=torch.Generator().manual_seed(5)).to(dtype)
    swapped = torch.cat((buffer[:, FFN:], buffer[:, :FFN]), dim=-1)
    assert torch.equal(reference.swiglu(buffer, gate_first=True), reference.swiglu(swapped))


def test_the_two_norms_differ_in_bf16() -> None:
    generator = torch.Generator().manual_seed(6)
    x, weight = (
        torch.randn(64, 256, generator=generator).bfloat16(),
        torch.randn(256, generator=generator).bfloat16(),
    )
    once = reference.rms_norm(x, weight, EPS)
    twice = reference.rms_norm(x, weight, EPS, round_before_weight=True)
    assert 0.2 < (once != twice).float().mean() < 0.3


def test_position_zero_does_not_rotate(dtype: torch.dtype) -> None:
    qkv = torch.randn(ROWS, 3 * HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(7)).to(dtype)
    ones = torch.ones(HEAD_DIM, dtype=dtype)
    angle = torch.zeros(ROWS, 12)
    turned = reference.qk_norm_rope(
        qkv, ones, ones, angle.cos().to(dtype), angle.sin().to(dtype), HEADS, HEADS, EPS
    )
    plain = reference.qk_norm_rope(qkv, ones, ones, None, None, HEADS, HEADS, EPS)
    assert all(torch.equal(a, b) for a, b in zip(turned, plain, strict=True))


def test_index_out_of_range_is_an_error_on_the_cpu() -> None:
    x, table = torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(IndexError):
        reference.gate_residual(x, x, table, torch.tensor([0, 3], dtype=torch.int32))
