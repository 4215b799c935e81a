"""Hidden rows between two blocks, whose last gated residual may still be owed.

A block's last operation and the next block's first one read and write the same rows. A fused block therefore returns
what there is to add, and whoever comes next adds it in the pass that it makes anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PendingSum:
    """The rows `rows + gate[index] * update`.

    rows, update: [S, D]. gate: [R, D]. index: [S] int32. add: computes it from these four, in this order.
    """

    rows: Tensor
    update: Tensor
    gate: Tensor
    index: Tensor
    add: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


Hidden = Tensor | PendingSum


def settled(x: Hidden) -> Tensor:
    """The rows themselves, [S, D]; what is owed is added now."""
    return x if isinstance(x, Tensor) else x.add(x.rows, x.update, x.gate, x.index)
