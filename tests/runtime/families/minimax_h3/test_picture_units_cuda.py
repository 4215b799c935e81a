"""Decoded units on a CUDA device: asynchronous copies into memory that encoder processes read."""

from __future__ import annotations

import pytest
import torch

from loader.errors import InternalError
from runtime.families.minimax_h3.model.picture_units import DecodedUnit
from runtime.families.minimax_h3.model.video_vae_pixels import to_yuv420
from runtime.media.picture_memory import PictureMemory

pytestmark = pytest.mark.gpu


def test_bytes_arrive_in_pinned_shared_memory_as_on_the_cpu() -> None:
    frames = torch.rand(17, 3, 96, 128)
    memory = PictureMemory()
    memory.resize(17 * 96 * 128 * 3 // 2, 2, pin=True)
    assert memory.pinned, memory.refusal
    slot = memory.acquire(0)
    assert slot is not None

    arrived = DecodedUnit(frames.cuda()).copy_into(slot.view)
    assert arrived is not None
    arrived()

    found = torch.frombuffer(slot.view, dtype=torch.uint8, count=17 * 96 * 128 * 3 // 2).clone()
    difference = (found.int() - to_yuv420(frames).flatten().int()).abs()
    # the device may contract a product and a sum, so a value on a half can round the other way
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-3
    memory.release(slot)
    del slot, arrived
    memory.close()


def test_pixels_that_are_not_finite_fail_when_they_have_arrived() -> None:
    frames = torch.rand(2, 3, 4, 4, device="cuda")
    frames[0, 1, 2, 3] = float("nan")
    arrived = DecodedUnit(frames).copy_into(memoryview(bytearray(48)))
    assert arrived is not None
    with pytest.raises(InternalError, match="non-finite output"):
        arrived()
