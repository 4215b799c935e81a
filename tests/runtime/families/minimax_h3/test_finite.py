"""Non-finite and constant outputs are failures that name their stage (C61)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.model.finite import OutputCheck, require_finite


def _with(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.linspace(0, 1, 60, dtype=dtype).view(3, 4, 5)
    tensor[1, 2, 3] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=lambda v: f"C61-{v}")
def test_one_non_finite_value_is_found(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(InternalError, match=r"^denoising, step 8: non-finite output; found 1 of 60 values"):
        require_finite(_with(value, dtype), "denoising, step 8")


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(2, 3), id="C61-black"),
        pytest.param(torch.ones(2, 3), id="C61-white"),
        pytest.param(torch.full((4,), 7, dtype=torch.uint8), id="C61-uint8"),
    ],
)
def test_constant_output_is_a_failure(tensor: Tensor) -> None:
    with pytest.raises(InternalError, match=r"^video decoder: constant output"):
        require_finite(tensor, "video decoder")


def test_empty_output_is_a_failure() -> None:
    with pytest.raises(InternalError, match=r"^audio decoder: empty output; found \(2, 0\)"):
        require_finite(torch.empty(2, 0), "audio decoder")


def test_good_output_passes() -> None:
    require_finite(_with(3.0), "latents")
    require_finite(torch.arange(5, dtype=torch.uint8), "frames")


def test_one_constant_part_of_a_video_is_fine() -> None:
    check = OutputCheck("video decoder")

    check.add(torch.zeros(17, 3, 4, 4))
    check.add(torch.rand(22, 3, 4, 4))

    check.finish()


def test_parts_that_are_all_the_same_constant_are_a_failure() -> None:
    check = OutputCheck("video decoder")
    check.add(torch.zeros(17, 3, 4, 4))
    check.add(torch.zeros(22, 3, 4, 4))

    with pytest.raises(InternalError, match=r"^video decoder: constant output; found 0\.0"):
        check.finish()


def test_no_part_at_all_is_a_failure() -> None:
    with pytest.raises(InternalError, match=r"^video decoder: no output"):
        OutputCheck("video decoder").finish()
