"""Expected tensors against found tensors: every missing, unexpected, misshapen or wrongly typed one, by component."""

from __future__ import annotations

from collections.abc import Mapping

from loader.errors import ArtifactError
from prepare.checkpoint import SourceTensor, list_names
from prepare.recipe import TensorSpec

_SHOWN = 100  # names listed per kind; a wrong layout would list thousands
_QUANTISED = ("F8_", "U8", "I8", "U4", "I4", "F4")


def check_tensors(
    found: Mapping[str, Mapping[str, SourceTensor]], expected: Mapping[str, Mapping[str, TensorSpec]]
) -> None:
    """Compare all components at once.

    Raises: ArtifactError: any difference; lists all of them with component, tensor, found and expected value.
    """
    problems = [
        f"{component}: {problem}"
        for component, specs in expected.items()
        for problem in differences(found[component], specs)
    ]
    if problems:
        raise ArtifactError(
            "checkpoint does not fit its configuration", where="tensors", found="; ".join(problems)
        )


def differences(found: Mapping[str, SourceTensor], expected: Mapping[str, TensorSpec]) -> list[str]:
    """One line per kind of difference, in words."""
    kinds: dict[str, list[str]] = {
        "missing tensors": [name for name in expected if name not in found],
        "unexpected tensors (unknown to this model)": [name for name in found if name not in expected],
        "wrong shape": [],
        "wrong dtype": [],
    }
    for name, spec in expected.items():
        tensor = found.get(name)
        if tensor is None:
            continue
        if tensor.shape != spec.shape:
            kinds["wrong shape"].append(f"{name} is {list(tensor.shape)}, must be {list(spec.shape)}")
        if tensor.dtype != spec.dtype:
            remark = (
                " (quantised checkpoints are not supported)" if tensor.dtype.startswith(_QUANTISED) else ""
            )
            kinds["wrong dtype"].append(f"{name} is {tensor.dtype}, must be {spec.dtype}{remark}")
    return [f"{kind}: {list_names(names, _SHOWN)}" for kind, names in kinds.items() if names]
