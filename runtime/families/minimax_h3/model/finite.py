"""Checks that a stage produced something: no NaN, no infinity, not one value everywhere (C61)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loader.errors import InternalError


class OutputCheck:
    """Check of one output that arrives in parts, such as the units of a video.

    A part may be constant (a fade to black is), the whole may not.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.low = math.inf
        self.high = -math.inf

    def add(self, part: Tensor) -> None:
        """Look at `part`, any shape and dtype; one reduction and one device synchronisation.

        Raises: InternalError: `part` is empty or holds NaN or infinity; names the stage.
        """
        if part.numel() == 0:
            raise InternalError("empty output", where=self.stage, found=tuple(part.shape))
        low, high = (float(bound) for bound in torch.aminmax(part.detach()))  # NaN propagates to both
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = int(part.numel() - torch.isfinite(part).sum())
            raise InternalError(
                "non-finite output",
                where=self.stage,
                found=f"{bad} of {part.numel()} values",
                expected="finite values",
            )
        self.low, self.high = min(self.low, low), max(self.high, high)

    def finish(self) -> None:
        """Raises: InternalError: nothing was added, or all parts together hold a single value; names the stage."""
        if self.low > self.high:
            raise InternalError("no output", where=self.stage)
        if self.low == self.high:
            raise InternalError(
                "constant output", where=self.stage, found=self.low, expected="more than one value"
            )


def require_finite_bounds(low: float, high: float, stage: str) -> None:
    """Raise InternalError naming `stage` unless its least and greatest value are finite; NaN propagates to both."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InternalError(
            "non-finite output",
            where=stage,
            found=f"values from {low} to {high}",
            expected="finite values",
        )


def require_finite(tensor: Tensor, stage: str) -> None:
    """Raise InternalError naming `stage` unless `tensor` is finite, not empty and not constant."""
    check = OutputCheck(stage)
    check.add(tensor)
    check.finish()
