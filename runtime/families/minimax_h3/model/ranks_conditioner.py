"""Conditioner layers cut over ranks: each has some key heads with their query heads, and some feed-forward columns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.families.minimax_h3.config import TextConfig
from runtime.families.minimax_h3.model.conditioner import (
    TextLayerWeights,
    attention_sum,
    feed_forward_sum,
)
from runtime.ops.attention import Attention
from runtime.ops.rotary import RotaryTable
from runtime.parallel.ranks import Ranks
from runtime.parallel.sums import sum_in_rank_order


@dataclass(frozen=True)
class SummedLayer:
    """The form of `conditioner.layer_forward`; every rank has all rows, before and after.

    The shares are summed in rank order, so a fixed number of ranks gives the same bits on all ranks and in every run.
    """

    ranks: Ranks

    def __call__(
        self, x: Tensor, w: TextLayerWeights, config: TextConfig, rope: RotaryTable, attention: Attention
    ) -> Tensor:
        x = x + sum_in_rank_order(self.ranks, attention_sum(x, w, config, rope, attention))
        return x + sum_in_rank_order(self.ranks, feed_forward_sum(x, w, config))
