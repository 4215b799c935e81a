"""Look at every weight once: NaN and infinity are refused, tensors of zeros only are reported.

A zero-filled page is what a torn or never finished download looks like. numpy, on bit patterns: no conversion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loader.errors import ArtifactError

if TYPE_CHECKING:
    import numpy as np

# Per dtype: all bits but the sign; an exponent of ones starts at the second value.
_MASKS = {"BF16": (0x7FFF, 0x7F80), "F16": (0x7FFF, 0x7C00), "F32": (0x7FFF_FFFF, 0x7F80_0000)}


@dataclass
class FiniteScan:
    """Collects what `check` saw, by tensor name (`component/name`)."""

    bad: dict[str, str] = field(default_factory=dict)
    _is_zero: dict[str, bool] = field(default_factory=dict)

    def check(self, name: str, dtype: str, words: np.ndarray) -> None:
        """One piece of a tensor: unsigned integers of the width of `dtype`."""
        magnitude_mask, infinity = _MASKS[dtype]
        largest = _largest_magnitude(words, magnitude_mask)
        if largest >= infinity:
            # A magnitude beyond infinity's pattern is NaN. Infinities beside a NaN are not told apart.
            self.bad[name] = "NaN" if largest > infinity else "inf"
        self._is_zero[name] = self._is_zero.get(name, True) and largest == 0

    def zero_tensors(self) -> list[str]:
        """Tensors of which every piece was zero."""
        return [name for name, is_zero in self._is_zero.items() if is_zero]

    def raise_if_bad(self) -> None:
        """Raises: ArtifactError: some value is not finite; names every such tensor seen so far."""
        if self.bad:
            raise ArtifactError(
                "weights are not finite",
                where="tensors",
                found=", ".join(f"{name} ({kind})" for name, kind in list(self.bad.items())),
                hint="the checkpoint is damaged; download it again and compare its digests",
            )


def _largest_magnitude(words: np.ndarray, mask: int) -> int:
    """Largest bit pattern without its sign, and no temporary array.

    As signed integers every positive number is above all negative ones, as unsigned ones it is the other way round.
    """
    if words.size == 0:
        return 0
    positive = int(words.view(words.dtype.str.replace("u", "i")).max())
    return max(positive, int(words.max()) & mask)


def zero_warnings(names: Iterable[str]) -> list[str]:
    """One warning per tensor."""
    return [f"{name}: every value is zero; an unfinished copy looks like this" for name in names]
