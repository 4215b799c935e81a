"""alpha / rank of low-rank factors: from the file's scalars, its header, or `adapter_config.json` beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader.errors import ArtifactError
from prepare.checkpoint import SourceTensor, read_json
from prepare.merge import to_float64

CONFIG_NAME = "adapter_config.json"
_HEADER_KEY = "lora_adapter_metadata"
_REFUSED = ("alpha_pattern", "rank_pattern", "use_dora", "use_rslora")  # other factors than alpha / rank


def declared_alpha(path: Path, metadata: Mapping[str, str]) -> float | None:
    """`lora_alpha` for all modules, or None where neither the header nor a configuration beside the file has one.

    Raises: ArtifactError: not readable, or settings under which alpha / rank is not the factor.
    """
    where = f"{path.name}: {_HEADER_KEY}"
    if _HEADER_KEY in metadata:
        try:
            table = json.loads(metadata[_HEADER_KEY])
        except ValueError as error:
            raise ArtifactError("not JSON", where=where, found=str(error)) from error
        if not isinstance(table, dict):
            raise ArtifactError("not an object", where=where, found=type(table).__name__)
        return _alpha({key.rpartition(".")[2]: value for key, value in table.items()}, where)
    config = path.with_name(CONFIG_NAME)
    return _alpha(read_json(config, CONFIG_NAME), CONFIG_NAME) if config.is_file() else None


def adapter_scale(path: Path, stored: SourceTensor | None, declared: float | None, rank: int) -> float:
    """alpha / rank of one module. stored: its own `.alpha` scalar, which wins. Neither: 1."""
    if stored is None and declared is None:
        return 1.0
    alpha = _scalar(path, stored) if stored is not None else declared
    if rank < 1 or alpha is None or not math.isfinite(alpha):
        raise ArtifactError("unusable alpha or rank", where=path.name, found=f"alpha {alpha}, rank {rank}")
    return alpha / rank


def _alpha(table: Mapping[str, Any], where: str) -> float | None:
    odd = [key for key in _REFUSED if table.get(key)]
    if odd:
        raise ArtifactError("adapter settings that cannot be merged", where=where, found=", ".join(odd))
    alpha = table.get("lora_alpha")
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float)):
        raise ArtifactError("not a number", where=f"{where}: lora_alpha", found=repr(alpha))
    return None if alpha is None else float(alpha)


def _scalar(path: Path, tensor: SourceTensor) -> float:
    if tensor.shape not in ((), (1,)):
        raise ArtifactError("alpha is not a scalar", where=path.name, found=list(tensor.shape))
    with path.open("rb") as file:
        file.seek(tensor.offset)
        return float(to_float64(memoryview(file.read(tensor.num_bytes)), tensor.dtype)[0])
