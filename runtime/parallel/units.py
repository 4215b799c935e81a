"""Decode in temporal units on all ranks; rank 0 hands their frames out in order.

Unit u belongs to rank u mod P; a round is P units. A unit fades into the tail of the unit before it, which travels
from rank to rank; finished frames travel to rank 0. Rank 0 hands out one round while the next is being decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from runtime.parallel.control import Control
from runtime.parallel.ranks import Ranks, Work
from runtime.parallel.ulysses import Arriving


class UnitDecoder(Protocol):
    """What is decoded. Frames are uint8, so that a quarter of the bytes travels."""

    device: torch.device

    @property
    def num_units(self) -> int: ...

    def decode(self, unit: int) -> tuple[Tensor, Tensor]:
        """(head, tail) of a unit; needs no other unit. Tails have one shape."""
        ...

    def join(self, head: Tensor, before: Tensor | None, tail: Tensor, unit: int) -> Tensor:
        """Finished frames of a unit, given the tail before it (None for unit 0): `frames_shape`, uint8."""
        ...

    def frames_shape(self, unit: int) -> tuple[int, ...]: ...


class UnitRelay:
    """One video's decode on one rank.

    The first value that rank 0 is handed is None, as soon as all ranks decode their first unit: what it does before it
    asks for more runs beside the decode. All ranks iterate to the end.
    """

    def __init__(self, ranks: Ranks, control: Control, decoder: UnitDecoder) -> None:
        self._ranks, self._control, self._decoder = ranks, control, decoder
        self._sending: list[tuple[Tensor, Work]] = []
        self._tail: Tensor | None = None  # of this rank's last unit
        self._before: Arriving | None = None  # on rank 0: the last tail of the round before

    def frames(self) -> Iterator[Tensor | None]:
        """On rank 0 None, then frames unit by unit in order; on the others nothing. Raises: Cancelled, InternalError."""
        ready: list[Tensor | None] = [None]
        for round_index in range(-(-self._decoder.num_units // self._ranks.size)):
            is_given_up = False
            with self._control.section(f"decode round {round_index}"):
                arriving = self._round(round_index)
                if self._control.leads:
                    try:
                        yield from ready
                    except GeneratorExit:  # the others finish the round, so this rank must too
                        is_given_up = True
                    ready = [frames.get() for frames in arriving]
            if is_given_up:
                return
        with self._control.section("last frames"):
            self._wait_for_sent()
        if self._control.leads:
            yield from ready

    def _round(self, round_index: int) -> list[Arriving]:
        """Decode this rank's unit; on rank 0, the frames of all units of the round. Order in every pair of ranks: tail,
        then frames."""
        ranks, first = self._ranks, round_index * self._ranks.size
        units = range(first, min(first + ranks.size, self._decoder.num_units))
        mine = first + ranks.rank
        frames = self._unit(mine) if mine in units else None
        if ranks.rank != 0:
            if frames is not None:
                self._send(frames.contiguous(), 0)
            return []
        assert frames is not None, "rank 0 has a unit in every round"
        self._before = None
        if ranks.size > 1 and units.stop < self._decoder.num_units:
            self._before = self._receive_tail(ranks.size - 1)
        return [Arriving(frames), *(self._receive_frames(unit, unit - first) for unit in units[1:])]

    def _unit(self, unit: int) -> Tensor:
        """Finished frames of one unit; its tail is on its way to the next unit's rank."""
        ranks = self._ranks
        head, tail = self._decoder.decode(unit)
        tail, before = tail.contiguous(), self._tail  # with one rank the unit before was this rank's
        self._tail = tail
        self._wait_for_sent()
        if unit and ranks.size > 1:
            arriving = self._receive_tail(ranks.rank - 1) if ranks.rank else self._before
            assert arriving is not None, "rank 0 asked for it in the round before"
            before = arriving.get()
        if ranks.size > 1 and unit + 1 < self._decoder.num_units:
            self._send(tail, (ranks.rank + 1) % ranks.size)
        return self._decoder.join(head, before, tail, unit)

    def _receive_tail(self, source: int) -> Arriving:
        assert self._tail is not None, "all tails have the shape of this rank's own"
        tail = torch.empty_like(self._tail)
        return Arriving(tail, self._ranks.receive(tail, source))

    def _receive_frames(self, unit: int, source: int) -> Arriving:
        frames = torch.empty(self._decoder.frames_shape(unit), dtype=torch.uint8, device=self._decoder.device)
        return Arriving(frames, self._ranks.receive(frames, source))

    def _send(self, tensor: Tensor, target: int) -> None:
        self._sending.append((tensor, self._ranks.send(tensor, target)))

    def _wait_for_sent(self) -> None:
        for _, work in self._sending:
            work.wait()
        self._sending.clear()
