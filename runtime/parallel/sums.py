"""Sums over ranks that come out the same every time."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.parallel.ranks import Ranks, gather_parts


def sum_in_rank_order(ranks: Ranks, share: Tensor) -> Tensor:
    """Sum of every rank's share, rounded once to its dtype; the same bits on all ranks and in every run.

    Summed in float32 in rank order, where a library's all-reduce picks order and algorithm itself. It receives P-1
    shares instead of about two: for the conditioner's 10 MB that is nothing.
    """
    shares = gather_parts(ranks, share)  # [P, …]
    total = shares[0].to(torch.float32)
    for rank in range(1, ranks.size):
        total = total + shares[rank]
    return total.to(share.dtype)
