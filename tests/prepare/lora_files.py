"""Random adapters for the tiny checkpoint, and what merging them must give, in plain torch arithmetic."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from prepare.family import PrepareOptions, open_source
from prepare.file_plan import plan_weight_files
from prepare.repack import write_prepared_file
from prepare.scan import FiniteScan

BLOCK = "transformer_blocks.1"
HIDDEN, INNER, FFN = 48, 64, 96
RANK = 4


def random_pair(seed: int, rows: int, columns: int, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """(B [rows, rank], A [rank, columns]) float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) * 0.2, torch.randn(
        rank, columns, generator=generator
    ) * 0.2


def write_adapter(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> Path:
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path, metadata or None)
    return path


def prepared_transformer(checkpoint: Path, *lora: tuple[Path, float], **options: object) -> dict[str, Tensor]:
    """The transformer's prepared tensors by name, written to memory."""
    chosen = PrepareOptions(tasks=("t2va",), schedules=("base-1",), lora=lora, **options)  # type: ignore[arg-type]
    source = open_source(checkpoint, chosen)
    result: dict[str, Tensor] = {}
    for plan in plan_weight_files(source.recipe.groups, source.family):
        if plan.component == "transformer":
            file = io.BytesIO()
            write_prepared_file(plan, file, source.sources, FiniteScan(), lambda n: None, source.updates)
            result |= load(file.getvalue())
    return {name: value for name, value in result.items() if not name.startswith("__pad__")}


def is_nearest(found: Tensor, exact: Tensor) -> bool:
    """Whether every bfloat16 of `found` is a nearest one to the float64 `exact`.

    The allowance of 1e-12 of the value covers float64 sums taken in another order.
    """
    bits = found.contiguous().view(torch.int16)
    neighbours = [(bits + step).view(torch.bfloat16).double() for step in (-1, 1)]
    error = (found.double() - exact).abs()
    slack = exact.abs() * 1e-12
    return all(bool((error <= (other - exact).abs() + slack).all()) for other in neighbours)
