"""Matrix products with stored weights."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T (+ bias)`: [..., in] x [out, in] -> [..., out], in the dtype of `weight`.

    `x` is rounded to that dtype first, so a bf16 stream can enter one of the float32 heads and a float32 input a
    bf16 matrix. TF32 must be off for the float32 matrices (torch's default).
    """
    return functional.linear(x.to(weight.dtype), weight, bias)
