"""What a family's recipe says about a checkpoint: tensors expected, tensors written, order of use. Data, no I/O.

A prepared tensor is a concatenation of row ranges of published tensors. That is enough for fused projections, for
de-interleaved heads and for swapped halves, and it lets prepare stream any tensor in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loader.header import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Data type (safetensors name) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start` … `stop` - 1 (leading dimension) of one published tensor; of a matrix perhaps only `columns`."""

    component: str
    tensor: str
    start: int
    stop: int
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of a prepared file: its rows are the rows of `parts`, one after the other."""

    name: str
    spec: TensorSpec
    parts: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """Tensors that are waited for together, in order of use. `name` is None for tensors that are never streamed.

    shard: file series of its own within the component, see `prepare.shards`; empty: the shared one.
    """

    name: str | None
    component: str
    tensors: tuple[OutputTensor, ...]
    needed_by: str
    shard: str = ""


@dataclass(frozen=True)
class Recipe:
    """Everything prepare does with one checkpoint.

    published: component -> tensor -> spec, with the names of the checkpoint's own layout: all of them, no others.
    groups: prepared groups in file order; one file series per component.
    dropped: component -> tensors that no prepared file carries.
    fused: new name pattern -> published Diffusers names, for the manifest.
    """

    published: Mapping[str, Mapping[str, TensorSpec]]
    groups: tuple[OutputGroup, ...]
    dropped: Mapping[str, tuple[str, ...]]
    fused: Mapping[str, tuple[str, ...]]
