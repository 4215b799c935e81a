"""A WeightSource over dictionaries, for tests of numerical code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class DictWeights:
    """`groups`: group name → {tensor name: tensor}; `tables`: gathered tensors by `component/name`.

    Records the order in which groups were asked for in `asked`.
    """

    def __init__(
        self, groups: Mapping[str, Mapping[str, Tensor]], tables: Mapping[str, Tensor] | None = None
    ) -> None:
        self.groups = groups
        self.tables = tables or {}
        self.asked: list[str] = []

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        self.asked.append(group)
        return self.groups[group]

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        return self.tables[tensor][torch.tensor(list(rows), dtype=torch.long)]

    def is_ready(self, group: str) -> bool:
        return group in self.groups
