"""Expected against found tensors: everything wrong is listed, with what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from loader.errors import ArtifactError
from prepare.accounting import check_tensors, differences
from prepare.checkpoint import SourceTensor, open_component
from prepare.recipe import TensorSpec
from tests.prepare.cases import as_component, says

EXPECTED = {"proj_in.weight": TensorSpec("BF16", (8, 4))}


@pytest.mark.parametrize("case_id", ["W25", "W26", "W45"])
def test_wrong_tensor_is_refused(case_id: str, tmp_path: Path) -> None:
    component = open_component(as_component(case_id, tmp_path / "transformer"))
    with pytest.raises(ArtifactError) as refused:
        check_tensors({"transformer": component.tensors}, {"transformer": EXPECTED})
    assert says(case_id, str(refused.value))
    str(refused.value).encode("utf-8")  # a message can always be printed


def _found(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, SourceTensor]:
    return {name: SourceTensor(Path("x"), dtype, shape, 0, 0) for name, (dtype, shape) in tensors.items()}


def test_all_problems_of_all_components_are_in_one_message() -> None:
    spec = TensorSpec("BF16", (2, 3))
    expected = {"transformer": {"a": spec, "b": spec, "c": spec}, "vae": {"d": spec}}
    found = {
        "transformer": _found(b=("F16", (2, 3)), c=("BF16", (3, 2)), x=("BF16", (1,))),
        "vae": _found(d=("F32", (6,))),
    }
    with pytest.raises(ArtifactError) as refused:
        check_tensors(found, expected)
    assert refused.value.found == (
        "transformer: missing tensors: a; "
        "transformer: unexpected tensors (unknown to this model): x; "
        "transformer: wrong shape: c is [3, 2], must be [2, 3]; "
        "transformer: wrong dtype: b is F16, must be BF16; "
        "vae: wrong shape: d is [6], must be [2, 3]; "
        "vae: wrong dtype: d is F32, must be BF16"
    )


def test_quantised_types_are_named_as_such() -> None:
    (line,) = differences(_found(**{"proj_in.weight": ("F8_E4M3", (8, 4))}), EXPECTED)
    assert line.endswith("proj_in.weight is F8_E4M3, must be BF16 (quantised checkpoints are not supported)")


def test_equal_sets_have_no_difference() -> None:
    assert differences(_found(**{"proj_in.weight": ("BF16", (8, 4))}), EXPECTED) == []
