"""Weights that are not finite are refused by name; tensors of zeros are reported by name."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.errors import ArtifactError
from prepare.checkpoint import SourceTensor, open_component
from prepare.file_plan import plan_file
from prepare.recipe import OutputGroup, OutputTensor, Rows, TensorSpec
from prepare.repack import PIECE_BYTES, write_prepared_file
from prepare.scan import FiniteScan, zero_warnings
from tests.prepare.cases import CASES, as_component, says


def _repack(folder: Path, name: str = "proj_in.weight") -> FiniteScan:
    """Repack one tensor of a component as prepare would."""
    component = open_component(folder)
    tensor = component.tensors[name]
    spec = TensorSpec(tensor.dtype, tensor.shape)
    output = OutputTensor(name, spec, (Rows("transformer", name, 0, tensor.shape[0]),))
    plan = plan_file(
        "weights/x.safetensors", [OutputGroup("transformer/x", "transformer", (output,), "denoise")], {}
    )
    scan = FiniteScan()
    write_prepared_file(plan, io.BytesIO(), {"transformer": component.tensors}, scan, lambda num_bytes: None)
    return scan


@pytest.mark.parametrize("case_id", ["W27", "W28"])
def test_weight_that_is_not_finite_is_refused(case_id: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as refused:
        _repack(as_component(case_id, tmp_path / "transformer"))
    assert says(case_id, str(refused.value))
    assert "transformer/proj_in.weight" in str(refused.value)


@pytest.mark.parametrize("case_id", ["W29"])
def test_weight_of_zeros_is_reported(case_id: str, tmp_path: Path) -> None:
    scan = _repack(as_component(case_id, tmp_path / "transformer"))
    assert scan.zero_tensors() == ["transformer/proj_in.weight"]
    (warning,) = zero_warnings(scan.zero_tensors())
    assert warning.startswith("transformer/proj_in.weight: every value is zero")


@pytest.mark.parametrize("case_id", ["W49"])
def test_preallocated_file_is_reported(case_id: str, tmp_path: Path) -> None:
    """A sound header over a body that was never written: larger than one read, so every piece has to be seen."""
    assert "policy" in CASES[case_id]["expect"]
    folder = tmp_path / "transformer"
    folder.mkdir()
    num_rows = PIECE_BYTES // 512 + 3
    size = num_rows * 1024
    text = (
        f'{{"proj_in.weight":{{"dtype":"BF16","shape":[{num_rows},512],"data_offsets":[0,{size}]}}}}'.encode()
    )
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    assert _repack(folder).zero_tensors() == ["transformer/proj_in.weight"]
    with path.open("r+b") as file:
        file.seek(8 + len(text) + size - 2)
        file.write(b"\x80\x3f")  # the last value becomes 1
    assert _repack(folder).zero_tensors() == []


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_float32_agrees_with_the_definition(values: list[float]) -> None:
    scan = FiniteScan()
    scan.check("x", "F32", np.array(values, np.float32).view(np.uint32))
    assert bool(scan.bad) == any(not math.isfinite(value) for value in values)
    assert scan.zero_tensors() == (["x"] if all(value == 0 for value in values) else [])


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40))
def test_bfloat16_agrees_with_the_definition(bits: list[int]) -> None:
    scan = FiniteScan()
    words = np.array(bits, np.uint16)
    scan.check("x", "BF16", words)
    values = (words.astype(np.uint32) << 16).view(np.float32)
    assert bool(scan.bad) == (not np.isfinite(values).all())
    if scan.bad:
        assert scan.bad["x"] == ("NaN" if np.isnan(values).any() else "inf")


def test_one_piece_that_is_not_zero_is_enough() -> None:
    scan = FiniteScan()
    for words in ([0, 0], [0, 1], [0x8000, 0]):
        scan.check("x", "BF16", np.array(words, np.uint16))
    scan.check("y", "BF16", np.array([0x8000], np.uint16))
    assert scan.zero_tensors() == ["y"]


def test_all_bad_tensors_of_a_file_are_named(tmp_path: Path) -> None:
    scan = FiniteScan()
    scan.check("a", "BF16", np.array([0x7F80], np.uint16))
    scan.check("b", "F32", np.array([0x7FC00000], np.uint32))
    with pytest.raises(ArtifactError, match=r"a \(inf\), b \(NaN\)"):
        scan.raise_if_bad()


def test_shrunken_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(10))
    source = SourceTensor(path, "F32", (4,), 0, 16)
    output = OutputTensor("a", TensorSpec("F32", (4,)), (Rows("c", "a", 0, 4),))
    plan = plan_file("x", [OutputGroup("c/g", "c", (output,), "denoise")], {})
    with pytest.raises(ArtifactError, match="became shorter"):
        write_prepared_file(plan, io.BytesIO(), {"c": {"a": source}}, FiniteScan(), lambda num_bytes: None)
