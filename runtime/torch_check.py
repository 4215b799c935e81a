"""Does torch compute what it should? A handful of operators against recorded results, after a trimmed import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_operators() -> tuple[str, ...]:
    """Run the operators that the models are made of on a few numbers, a few milliseconds in all.

    The inputs are such that results are exact in float32 on any machine, whatever the order of summation.
    Returns: one line for each operator that fails or whose result is not the recorded one.
    """
    import torch

    problems = []
    with torch.inference_mode():
        for name, (run, recorded) in _recorded_results().items():
            try:
                found: object = run().flatten().tolist()
            except (RuntimeError, AttributeError, ImportError, TypeError) as error:
                found = f"{type(error).__name__}: {error}"
            if found != recorded:
                problems.append(f"{name} gives {found}, recorded {recorded}")
    return tuple(problems)


def _recorded_results() -> dict[str, tuple[Callable[[], torch.Tensor], list[float]]]:
    """Operator → call, its result."""
    import torch
    import torch.nn.functional as F

    a = torch.tensor([[1.0, 2.0], [3.0, -4.0]])  # [2, 2]
    same = torch.ones(1, 1, 2, 2)  # equal scores: attention averages
    return {
        "linear": (lambda: F.linear(a, a, a[0]), [6.0, -3.0, -4.0, 27.0]),
        "matmul": (lambda: a @ a.clone(), [7.0, -6.0, -9.0, 22.0]),
        "bfloat16": (lambda: torch.mul(a.bfloat16(), a.bfloat16()).float(), [1.0, 4.0, 9.0, 16.0]),
        "attention": (
            lambda: F.scaled_dot_product_attention(same, same, a[None, None]),
            [2.0, -1.0, 2.0, -1.0],
        ),
        "layer_norm": (lambda: F.layer_norm(a, (2,), eps=0.0), [-1.0, 1.0, 1.0, -1.0]),
        "rms_norm": (lambda: F.rms_norm(same[0, 0] * 4, (2,), a[0], 0.0), [1.0, 2.0, 1.0, 2.0]),
        "relu": (a.relu, [1.0, 2.0, 3.0, 0.0]),
        "silu": (lambda: F.silu(a * 0), [0.0, 0.0, 0.0, 0.0]),
        "softmax": (lambda: torch.softmax(a * 0, -1), [0.5, 0.5, 0.5, 0.5]),
        "embedding": (lambda: F.embedding(torch.tensor([1, 0]), a), [3.0, -4.0, 1.0, 2.0]),
        "conv1d": (lambda: F.conv1d(a[None], a[None]), [30.0]),
        "conv3d": (lambda: F.conv3d(a[None, None, None], torch.ones(1, 1, 1, 2, 2)), [2.0]),
        "cat": (lambda: torch.cat([a[0], a.sum(0)]), [1.0, 2.0, 4.0, -2.0]),
        "where": (lambda: torch.where(a > 1, a, a.new_zeros(())), [0.0, 2.0, 3.0, 0.0]),
        "interpolate": (lambda: F.interpolate(a[None], scale_factor=2.0)[0, 1], [3.0, 3.0, -4.0, -4.0]),
        "generator": (
            lambda: torch.randint(1000, (3,), generator=torch.Generator().manual_seed(7)),
            [615, 892, 721],
        ),
    }
