"""Attention over one packed sequence, behind one signature.

Model code calls an `Attention` that it was given. Sparse attention, sequence parallelism and other backends are
further callables of the same signature; nothing in a model file chooses between them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Attention(Protocol):
    """softmax(scale * q k^T) v over all rows, or over rows up to one's own if `causal`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        """[S, H, K] x [S, G, K] x [S, G, K] -> [S, H, K], dtype of `q`.

        G divides H: query head h reads key head h * G // H. `scale` defaults to 1 / sqrt(K).
        """
        ...


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """The `Attention` of torch: its scaled dot product, whichever backend torch picks."""
    is_grouped = k.shape[1] != q.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # each [1, H or G, S, K]
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=is_grouped
    )
    return out[0].transpose(0, 1)
