"""Which free slots of a ring the reader gets, and when.

A slot that is filled again soon after it was copied is still in the processor's last cache, and so is the copy engine's
next read. With slots of 16 MiB in 2 GiB, an H200 host moved 29 GB/s from memory-backed files to the device where the slot that
came back last was filled next, 22 in turn (`host_memory` of the benches); whole starts gained nothing that could be measured.
So the slot that came back last is given first, and the reader holds no more than it can fill.
"""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 4


def slots_to_keep(filling_bytes: int, slot_bytes: int) -> int:
    """How many free slots the reader wants to have: twice what its threads fill at a time, a part each."""
    return max(_LEAST, -(-2 * filling_bytes // slot_bytes))


class SlotStack:
    """Free slots on this side of the reader.

    Args:
        given: slots that the reader has at the start. keep: how many it should have at most from then on.
    """

    def __init__(self, given: int, keep: int) -> None:
        self.keep = keep
        self._given = given
        self._free: list[int] = []

    def reader_grew(self, filling_bytes: int, slot_bytes: int) -> None:
        """Its threads fill this much at a time from here on. A stack that keeps nothing back stays so."""
        self.keep = max(self.keep, slots_to_keep(filling_bytes, slot_bytes))

    def filled(self, count: int) -> None:
        """The reader has filled `count` of those that it was given."""
        self._given -= count

    def put(self, slots: Sequence[int]) -> None:
        """They may be filled again."""
        self._free += slots

    def take(self) -> list[int]:
        """What the reader gets now; the caller gives it to it."""
        count = min(self.keep - self._given, len(self._free))
        if count <= 0:
            return []
        self._given += count
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return taken
