"""The conditioner over ranks against the conditioner on one rank.

Tolerance 2e-5 of the largest value, in float32: shares are summed in another order than one matrix product sums them.
"""

from __future__ import annotations

import pytest
import torch

from runtime.families.minimax_h3.model.conditioner import encode_prompt
from runtime.families.minimax_h3.model.ranks_conditioner import SummedLayer
from runtime.families.minimax_h3.tokens import TokenStream
from tests.fakes.weights import DictWeights
from tests.runtime.parallel.thread_ranks import on_threads
from tests.runtime.parallel.tiny import embedding_table, random_groups, rank_weights, tiny_config


def encode_on(size: int, kv_heads: int, dtype: torch.dtype = torch.float32):
    """(rows on every rank, rows on one rank)."""
    config = tiny_config(kv_heads=kv_heads)
    groups = {
        name: {key: value.to(dtype) for key, value in members.items()}
        for name, members in random_groups(config, seed=3).items()
    }
    table = {name: rows.to(dtype) for name, rows in embedding_table(config, seed=4).items()}
    tokens = TokenStream(ids=tuple(range(5, 18)), tags=(1,) * 13, images=())

    def run(ranks, control):
        weights = rank_weights(config, groups, ranks.rank, size, table)
        return encode_prompt(config, weights, tokens, [], "cpu", layer=SummedLayer(ranks))

    with torch.inference_mode():
        alone = encode_prompt(config, DictWeights(groups, table), tokens, [], "cpu")
    return on_threads(size, run), alone


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 8), (4, 8), (8, 8), (7, 8), (3, 4)])
def test_rows_equal_those_of_one_rank(size: int, kv_heads: int) -> None:
    found, alone = encode_on(size, kv_heads)
    for rows in found:
        torch.testing.assert_close(rows, alone, rtol=0, atol=2e-5 * float(alone.abs().max()))
        assert torch.equal(rows, found[0]), "ranks disagree"


def test_a_fixed_number_of_ranks_repeats_bit_for_bit() -> None:
    first, _ = encode_on(4, 8, torch.bfloat16)
    second, _ = encode_on(4, 8, torch.bfloat16)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(rows, first[0]) for rows in first)
