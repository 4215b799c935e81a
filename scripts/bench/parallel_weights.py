"""Random weights of released size for one rank, made on the device: one DiT block serves as every block.

A block's time does not depend on its values, so 0.8 GB stand for 40 and a bench of the denoiser needs no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loader.torch_api import torch_dtype
from prepare.families.minimax_h3.recipe import build_recipe
from prepare.recipe import OutputTensor
from prepare.shards import cut_tensor
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.shards import cut_of

TABLE = "bench.t2va"


class RandomTransformerWeights:
    """A `runtime.weights.WeightSource` of `transformer/*` and the tables `adaln/bench.t2va/*`.

    Args:
        rank, size: whose shards; size 1 has everything whole.
        dtype: `"BF16"` or `"F32"`, as prepare stores matrices.
    """

    def __init__(self, config: H3Config, device: str, dtype: str, rank: int = 0, size: int = 1) -> None:
        self._config, self._device, self._dtype = config, device, torch_dtype(dtype)
        self._rank, self._size = rank, size
        groups = build_recipe(config, "diffusers", ("t2va",), dtype).groups
        self._groups = {group.name: group.tensors for group in groups if group.component == "transformer"}
        self._made: dict[str, dict[str, Tensor]] = {}

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        if group.startswith("adaln/"):
            return self._table(group.rpartition("/")[2])
        if not group.startswith("transformer/blocks."):
            return self._make(group)
        number = group.rpartition(".")[2]
        first = self._make("transformer/blocks.0")
        return {
            name.replace("transformer_blocks.0.", f"transformer_blocks.{number}."): t
            for name, t in first.items()
        }

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        raise KeyError(tensor)

    def is_ready(self, group: str) -> bool:
        return True

    def _make(self, group: str) -> dict[str, Tensor]:
        if group not in self._made:
            self._made[group] = {
                tensor.name: self._random(self._own(tensor)) for tensor in self._groups[group]
            }
        return self._made[group]

    def _own(self, tensor: OutputTensor) -> OutputTensor:
        cut = cut_of(self._config, tensor.name, self._rank, self._size)
        return tensor if cut is None else cut_tensor(tensor, cut)

    def _random(self, tensor: OutputTensor) -> Tensor:
        dtype = torch_dtype(tensor.spec.dtype)
        if len(tensor.spec.shape) == 1:
            return torch.ones(tensor.spec.shape, dtype=dtype, device=self._device)
        return torch.empty(tensor.spec.shape, dtype=dtype, device=self._device).normal_(0, 0.02)

    def _table(self, step: str) -> dict[str, Tensor]:
        if "table" not in self._made:
            c = self._config.transformer
            shapes = {"blocks": (c.num_layers, 3, 6, c.hidden_size), "final": (2, 2, c.hidden_size)}
            self._made["table"] = {
                name: torch.zeros(shape, dtype=self._dtype, device=self._device)
                for name, shape in shapes.items()
            }
        return {f"{step}.{name}": tensor for name, tensor in self._made["table"].items()}
