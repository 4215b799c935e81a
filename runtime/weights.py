"""How numerical code gets its weights: by group, waiting only for that group. No torch import.

`loader.stream.WeightStream` is the implementation of a worker; tests may pass a plain dictionary wrapped in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class WeightSource(Protocol):
    """Weights of one prepared directory while they arrive."""

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        """Wait until `group` is in place and return its tensors by their name inside the file (no component prefix).

        The tensors are views of the component's arena: read only, alive as long as any of them.
        Raises: the failure that stopped the load.
        """
        ...

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        """[len(rows), ...] of a tensor that is not streamed (`component/name`), gathered from storage in order."""
        ...

    def is_ready(self, group: str) -> bool:
        """Whether `tensors(group)` would return without waiting."""
        ...
