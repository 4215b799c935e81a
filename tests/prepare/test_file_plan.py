"""Places of tensors and groups: aligned, contiguous, complete, cut at group borders."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loader.header import PAGE_BYTES, TENSOR_ALIGN_BYTES, parse_header
from prepare.file_plan import PlannedFile, plan_file, plan_weight_files
from prepare.recipe import OutputGroup, OutputTensor, TensorSpec


@st.composite
def group_lists(draw: Callable[..., int]) -> list[OutputGroup]:
    """Groups of one or two components with sizes around the alignments."""
    groups = []
    sizes = st.sampled_from([1, 2, 63, 64, 65, 128, 129, 1024, 2048, 2049, 5000])
    for component in ("a", "b")[: draw(st.integers(1, 2))]:
        for g in range(draw(st.integers(1, 4))):
            tensors = tuple(
                OutputTensor(f"g{g}.t{t}", TensorSpec("F32", (draw(sizes),)), ())
                for t in range(draw(st.integers(1, 5)))
            )
            groups.append(OutputGroup(f"{component}/g{g}", component, tensors, "denoise"))
    return groups


@given(group_lists(), st.integers(1, 40_000))
def test_invariants(groups: list[OutputGroup], limit: int) -> None:
    files = plan_weight_files(groups, "model", limit)
    placed_groups = [(file, placed) for file in files for placed in file.groups]
    assert [placed.group for _, placed in placed_groups] == groups
    for file in files:
        _check_file(file)
        if len(file.groups) > 1:
            assert file.data_bytes <= limit
    for component in {file.component for file in files}:
        own = [file.path for file in files if file.component == component]
        assert own == [f"weights/{component}-{number}.safetensors" for number in range(1, len(own) + 1)]


def _check_file(file: PlannedFile) -> None:
    assert [(p.begin, n.begin) for p, n in pairwise(file.tensors) if p.end != n.begin] == []
    assert all(placed.start % PAGE_BYTES == 0 for placed in file.groups)
    assert [p.end for p in file.groups] == [*(p.start for p in file.groups[1:]), file.data_bytes]
    outputs = [placed for placed in file.tensors if placed.output is not None]
    assert all(placed.begin % TENSOR_ALIGN_BYTES == 0 for placed in outputs)
    for placed in file.groups:
        inside = [p.output for p in outputs if placed.start <= p.begin and p.end <= placed.end]
        assert {t.name for t in inside if t is not None} == {t.name for t in placed.group.tensors}
    header = parse_header(file.header[8:], file.num_bytes, "x")
    assert header.data_start == len(file.header)
    assert len(file.header) % PAGE_BYTES == 0
    assert header.metadata["format"] == "pt"
    expected = [(p.output.name, p.output.spec.shape, p.begin) for p in outputs if p.output is not None]
    assert [
        (e.name, e.shape, e.begin) for e in header.tensors if not e.name.startswith("__pad__.")
    ] == expected


def test_small_tensors_go_to_the_end_of_their_group() -> None:
    shapes = {"bias": (96,), "weight": (64,), "scale": (3,), "other": (128,)}
    group = OutputGroup(
        "c/g", "c", tuple(OutputTensor(n, TensorSpec("F32", s), ()) for n, s in shapes.items()), "denoise"
    )
    file = plan_file("x", [group], {})
    names = [placed.output.name if placed.output else "pad" for placed in file.tensors]
    assert names == ["weight", "other", "bias", "pad", "scale"]


def test_aligned_sizes_need_no_filler() -> None:
    tensors = tuple(OutputTensor(f"t{i}", TensorSpec("BF16", (2688 * 2, 128)), ()) for i in range(3))
    groups = [OutputGroup(f"c/g{i}", "c", (tensor,), "denoise") for i, tensor in enumerate(tensors)]
    file = plan_file("x", groups, {})
    assert len(file.tensors) == 3
    assert file.data_bytes == sum(math.prod(t.spec.shape) * 2 for t in tensors)
