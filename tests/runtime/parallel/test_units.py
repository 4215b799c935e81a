"""Decode over ranks: order, tails, giving up. Frames are integers that tell which unit and tail made them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.parallel.units import UnitRelay
from runtime.pipeline import Cancelled
from tests.runtime.parallel.thread_ranks import on_threads


class Numbers:
    """Unit u has head 10 u and tail u + 1; finished frames are head + tail before, the last unit has one frame more."""

    device = torch.device("cpu")

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.decoded: list[int] = []

    def decode(self, unit: int) -> tuple[Tensor, Tensor]:
        self.decoded.append(unit)
        return torch.full((2, 3), 10.0 * unit), torch.full((2, 1), unit + 1.0)

    def join(self, head: Tensor, before: Tensor | None, tail: Tensor, unit: int) -> Tensor:
        frames = head if before is None else head + before
        return torch.cat([frames, tail], dim=1).byte() if unit == self.num_units - 1 else frames.byte()

    def frames_shape(self, unit: int) -> tuple[int, ...]:
        return (2, 4 if unit == self.num_units - 1 else 3)


def alone(num_units: int) -> list[Tensor]:
    numbers, before, frames = Numbers(num_units), None, []
    for unit in range(num_units):
        head, tail = numbers.decode(unit)
        frames.append(numbers.join(head, before, tail, unit))
        before = tail
    return frames


@pytest.mark.parametrize("num_units", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rank_0_gets_all_frames_in_order(size: int, num_units: int) -> None:
    def run(ranks, control):
        numbers = Numbers(num_units)
        with control.request():
            return list(UnitRelay(ranks, control, numbers).frames()), numbers.decoded

    (marker, *frames), _ = (results := on_threads(size, run))[0]
    assert marker is None
    for found, expected in zip(frames, alone(num_units), strict=True):
        assert torch.equal(found, expected)
    assert all(found == [] for found, _ in results[1:])
    assert [decoded for _, decoded in results] == [list(range(rank, num_units, size)) for rank in range(size)]


@pytest.mark.parametrize("taken", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("size", [2, 3])
def test_giving_up_leaves_all_ranks_at_a_border_and_the_next_request_runs(size: int, taken: int) -> None:
    def request(ranks, control, take):
        frames = UnitRelay(ranks, control, Numbers(7)).frames()
        with control.request():
            if not control.leads:
                return list(frames)
            assert next(frames) is None
            first = [next(frames) for _ in range(take)]
            if take == 7:
                assert next(frames, "end") == "end"
                return first
            frames.close()
            assert control.can_stop
            control.stop()
            raise Cancelled

    def run(ranks, control):
        with pytest.raises(Cancelled):
            request(ranks, control, taken)
        return request(ranks, control, 7)

    frames, *others = on_threads(size, run)
    assert all(torch.equal(a, b) for a, b in zip(frames, alone(7), strict=True))
    assert others == [[]] * (size - 1)


def test_commands_reach_all_ranks() -> None:
    command = {"op": "generate", "prompt": "ein Lärm – 雨", "sizes": [1, None, 2.5]}
    found = on_threads(3, lambda ranks, control: control.exchange(command if control.leads else None))
    assert found == [command] * 3
