"""The default attention against a written-out softmax in float64."""

from __future__ import annotations

import pytest
import torch

from runtime.ops.attention import attention


def inputs(rows, heads, groups, dim, dtype=torch.float32):
    torch.manual_seed(rows + heads)
    return tuple(torch.randn(rows, count, dim).to(dtype) for count in (heads, groups, groups))


def written_out(q, k, v, *, causal, scale):
    per_group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(per_group, dim=1) for x in (k, v))
    scores = torch.einsum("shk,thk->hst", q.double(), k) * scale
    if causal:
        later = torch.arange(len(q))[None, :] > torch.arange(len(q))[:, None]
        scores = scores.masked_fill(later, float("-inf"))
    return torch.einsum("hst,thk->shk", scores.softmax(-1), v)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (4, 2), (8, 1)])
@pytest.mark.parametrize("rows", [1, 2, 19])
def test_attention_is_softmax_of_scaled_products(rows, heads, groups, causal):
    q, k, v = inputs(rows, heads, groups, 16)

    found = attention(q, k, v, causal=causal)

    assert found.shape == q.shape
    expected = written_out(q, k, v, causal=causal, scale=16**-0.5)
    # fp32 sums over 16 channels and at most 19 rows.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_scale_replaces_the_default():
    q, k, v = inputs(9, 2, 2, 8)

    expected = written_out(q, k, v, causal=False, scale=0.05)

    torch.testing.assert_close(attention(q, k, v, scale=0.05).double(), expected, rtol=0, atol=2e-6)


def test_strided_views_of_a_fused_product_are_accepted():
    torch.manual_seed(0)
    q, k, v = torch.randn(11, 3, 2, 8).unbind(1)

    assert torch.equal(attention(q, k, v), attention(q.contiguous(), k.contiguous(), v.contiguous()))


def test_bf16_in_bf16_out():
    q, k, v = inputs(13, 2, 2, 16, torch.bfloat16)

    found = attention(q, k, v)

    assert found.dtype == torch.bfloat16
    expected = written_out(q, k, v, causal=False, scale=0.25)
    # Probabilities and the result round to 8 bits; values stay below 4.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-2)
