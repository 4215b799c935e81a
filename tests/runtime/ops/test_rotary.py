"""Rotary embedding: the rotation itself, and the rounding points of the published models."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb, apply_rotary_pos_emb_vision

from runtime.ops.rotary import RotaryTable, inverse_frequencies, rotary_table, rotate, rotate_wide

# Rows, heads, head dim, pairs.
SIZES = pytest.mark.parametrize(
    ("rows", "heads", "dim", "pairs"), [(1, 1, 8, 4), (7, 3, 32, 9), (5, 2, 128, 48)]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def inputs(rows, heads, dim, pairs, dtype=torch.float32):
    torch.manual_seed(rows)
    return torch.randn(rows, heads, dim).to(dtype), rotary_table(30 * torch.randn(rows, pairs))


def doubled(table: RotaryTable):
    return tuple(torch.cat((part, part), dim=-1) for part in table)


@SIZES
def test_pairs_are_turned_by_their_angle_and_the_rest_passes(rows, heads, dim, pairs):
    x, table = inputs(rows, heads, dim, pairs)

    found = rotate(x, table)

    turn = torch.complex(table.cos.double(), table.sin.double())[:, None]
    pair = torch.complex(x[..., :pairs].double(), x[..., pairs : 2 * pairs].double()) * turn
    expected = torch.cat((pair.real, pair.imag, x[..., 2 * pairs :].double()), dim=-1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(found[..., 2 * pairs :], x[..., 2 * pairs :])
    assert found.is_contiguous()


@pytest.mark.oracle
@DTYPES
@SIZES
def test_rotate_equals_diffusers(rows, heads, dim, pairs, dtype):
    x, table = inputs(rows, heads, dim, pairs, dtype)

    expected = _apply_rotary_emb(x[None], *doubled(table))[0]

    assert torch.equal(rotate(x, table.to(dtype)), expected)


@pytest.mark.oracle
@DTYPES
def test_rotate_equals_the_text_layers_of_transformers(dtype):
    x, table = inputs(6, 2, 16, 8, dtype)
    cos, sin = doubled(table.to(dtype))

    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)

    assert torch.equal(rotate(x, table.to(dtype)), expected)


@pytest.mark.oracle
@DTYPES
def test_rotate_wide_equals_the_vision_tower_of_transformers(dtype):
    x, table = inputs(6, 2, 16, 8, dtype)

    expected, _ = apply_rotary_pos_emb_vision(x, x, *doubled(table))

    assert torch.equal(rotate_wide(x, table), expected)


def test_rotate_wide_rounds_once():
    x, table = inputs(64, 2, 16, 8, torch.bfloat16)

    assert torch.equal(rotate_wide(x, table), rotate(x.float(), table).bfloat16())
    assert not torch.equal(rotate_wide(x, table), rotate(x, table.to(torch.bfloat16)))


@pytest.mark.parametrize(("count", "theta"), [(16, 1e4), (18, 1e4), (64, 5e6), (3, 100.0)])
def test_inverse_frequencies_are_powers_of_theta(count, theta):
    expected = [math.pow(theta, -k / count) for k in range(count)]

    torch.testing.assert_close(
        inverse_frequencies(count, theta), torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0
    )
