"""Rows of a tensor that ranks hold in parts: put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.parallel.ranks import Ranks


def gather_rows(ranks: Ranks, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """All ranks' rows in rank order: [counts[rank], …] -> [sum(counts), …], new memory.

    The collective moves equal parts; what fills a shorter one up is sent unread and dropped here.
    """
    most = max(counts)
    part = rows.contiguous()
    if len(rows) < most:
        part = rows.new_zeros((most, *rows.shape[1:]))
        part[: len(rows)] = rows
    out = rows.new_empty((ranks.size, most, *rows.shape[1:]))
    ranks.all_gather(out, part).wait()
    return torch.cat([out[rank, :count] for rank, count in enumerate(counts)])
