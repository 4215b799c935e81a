"""Picking tensors out of a loaded group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from loader.errors import ArtifactError


def take(tensors: Mapping[str, Tensor], prefix: str, names: Sequence[str]) -> list[Tensor]:
    """`tensors[prefix + name]` for each name, in order.

    Raises: ArtifactError: names the missing tensors, all of them.
    """
    missing = [prefix + name for name in names if prefix + name not in tensors]
    if missing:
        raise ArtifactError("tensors of the group are missing", where="manifest.json", found=missing)
    return [tensors[prefix + name] for name in names]
