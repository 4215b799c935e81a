"""Feed-forward networks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from runtime.ops.linear import linear


def swiglu(x: Tensor, up_gate: Tensor, down: Tensor) -> Tensor:
    """`(up(x) * silu(gate(x))) @ down.T`, gate in the second half of the rows.

    Args:
        x: [S, D].
        up_gate: [2 F, D], rows [up; gate] (the Diffusers order).
        down: [D, F].
    Returns: [S, D].
    Rounding: silu, the product and each matrix product round once.
    """
    up, gate = linear(x, up_gate).chunk(2, dim=-1)  # each [S, F]
    return linear(up * functional.silu(gate), down)


def swiglu_gate_first(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`swiglu` with rows [gate; up] (the Qwen3 order). [S, D] -> [S, D]."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(functional.silu(gate) * up, down)
