"""Decoded floats to the bytes that H.264 stores, and their way into shared memory."""

from __future__ import annotations

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.model.picture_units import DecodedUnit
from runtime.families.minimax_h3.model.video_vae_pixels import to_uint8, to_yuv420


def planes(frames: Tensor) -> list[np.ndarray]:
    """Y, U, V of `to_yuv420`, each [F, height, width]."""
    count, _, height, width = frames.shape
    flat = to_yuv420(frames).numpy()
    luma = height * width
    y, u, v = flat[:, :luma], flat[:, luma : luma * 5 // 4], flat[:, luma * 5 // 4 :]
    half = (count, height // 2, width // 2)
    return [y.reshape(count, height, width), u.reshape(half), v.reshape(half)]


# BT.709 bars, limited range, 8 bit, from the standard's equations
COLOURS = {
    "black": ((0, 0, 0), (16, 128, 128)), "white": ((1, 1, 1), (235, 128, 128)), "grey": ((0.5, 0.5, 0.5), (126, 128, 128)),
    "red": ((1, 0, 0), (63, 102, 240)), "green": ((0, 1, 0), (173, 42, 26)), "blue": ((0, 0, 1), (32, 240, 118)),
    "yellow": ((1, 1, 0), (219, 16, 138)), "cyan": ((0, 1, 1), (188, 154, 16)), "magenta": ((1, 0, 1), (78, 214, 230)),
}  # fmt: skip


@pytest.mark.parametrize("name", COLOURS)
def test_colours_have_the_values_of_the_standard(name: str) -> None:
    rgb, expected = COLOURS[name]
    frames = torch.tensor(rgb).view(1, 3, 1, 1).expand(2, 3, 4, 6)

    found = [np.unique(plane).tolist() for plane in planes(frames)]

    assert found == [[value] for value in expected]


@pytest.mark.parametrize(("columns", "chroma_limit"), [(1, 2), (8, 20)], ids=["level rows", "any"])
def test_the_converter_of_the_encoder_library_agrees(columns: int, chroma_limit: int) -> None:
    """swscale starts from rounded RGB, so a grey level of luma may differ. Its chroma lies between the pixels of a
    pair, ours on the left one: where colour changes along a row they must differ, elsewhere they must not."""
    generator = torch.Generator().manual_seed(3)
    frames = torch.nn.functional.interpolate(
        torch.rand(2, 3, 6, columns, generator=generator), (48, 64), mode="bicubic", align_corners=False
    ).clamp(0, 1)
    for index, rgb in enumerate(to_uint8(frames).numpy()):
        picture = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
            format="yuv420p", dst_colorspace=Colorspace.ITU709, src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG, interpolation=Interpolation.BICUBIC | Interpolation.ACCURATE_RND,
        )  # fmt: skip
        difference = np.abs(to_yuv420(frames)[index].numpy().astype(int) - picture.to_ndarray().reshape(-1))
        assert difference[: 48 * 64].max() <= 1
        assert difference.max() <= chroma_limit


def test_chroma_lies_on_the_left_pixel_of_each_pair() -> None:
    """One red column at an even place weighs a half in its own pair and a quarter in none other."""
    frames = torch.zeros(1, 3, 4, 8)
    frames[:, 0, :, 4] = 1.0
    v = planes(frames)[2][0, 0].astype(int) - 128

    assert v[2] == 56  # half of 112
    assert v[[0, 1, 3]].tolist() == [0, 0, 0]


def test_a_unit_lands_in_the_given_memory() -> None:
    frames = torch.rand(5, 3, 8, 12)
    unit = DecodedUnit(frames)
    target = bytearray(2000)

    assert unit.copy_into(memoryview(target)) is None

    assert (unit.num_frames, unit.layout) == (5, "yuv420p")
    assert target[: 5 * 144] == to_yuv420(frames).numpy().tobytes()
    assert not any(target[5 * 144 :])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_pixel_that_is_not_finite_fails_its_unit(bad: float) -> None:
    frames = torch.rand(2, 3, 4, 4)
    frames[1, 2, 3, 0] = bad
    unit = DecodedUnit(frames)
    with pytest.raises(InternalError, match="decoded video: non-finite output"):
        unit.copy_into(memoryview(bytearray(96)))
