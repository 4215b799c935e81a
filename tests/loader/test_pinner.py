"""The thread that pins slots, with a ring that is as slow as a test wants."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

import pytest

from loader.errors import InternalError
from loader.pinner import Pinner
from tests.fakes.driver import CONTEXT, FakeDriver


class SlowRing:
    """Each slot is pinned once `may_go` is set; odd ones may not be filled again."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.has_begun = threading.Event()
        self.begun: list[int] = []
        self.pinned: list[int] = []

    def pin(self, slot: int) -> bool:
        self.begun.append(slot)
        self.has_begun.set()
        if slot == 66:
            raise ValueError("no such slot")
        assert self.may_go.wait(30)
        self.pinned.append(slot)
        return slot % 2 == 0


def pinner_of(ring: Any) -> Pinner:
    return Pinner(FakeDriver(), CONTEXT, ring)


def taken(pinner: Pinner, count: int) -> list[tuple[bytes, int, bool]]:
    found: list[tuple[bytes, int, bool]] = []
    while len(found) < count:
        assert select.select([pinner.fd], [], [], 30)[0]
        found += pinner.take()
    return found


def test_records_come_back_in_order_with_what_the_ring_said() -> None:
    ring = SlowRing()
    ring.may_go.set()
    pinner = pinner_of(ring)
    for slot in (4, 1, 2):
        pinner.put(b"record %d" % slot, slot)
    assert pinner.pending == 3
    assert taken(pinner, 3) == [(b"record 4", 4, True), (b"record 1", 1, False), (b"record 2", 2, True)]
    assert pinner.pending == 0
    assert not select.select([pinner.fd], [], [], 0)[0]
    pinner.stop()


def test_stop_waits_for_the_slot_in_progress_and_leaves_the_rest() -> None:
    ring = SlowRing()
    pinner = pinner_of(ring)
    fds = pinner.fd, pinner._done
    for slot in range(3):
        pinner.put(b"", slot)
    assert ring.has_begun.wait(30)
    stopper = threading.Thread(target=pinner.stop)
    stopper.start()
    stopper.join(0.3)
    assert stopper.is_alive(), "a slot is being pinned: its memory must not go"
    ring.may_go.set()
    stopper.join(30)
    assert not stopper.is_alive()
    assert ring.begun == ring.pinned == [0]
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    pinner.stop()


def test_a_failure_is_raised_where_records_are_taken() -> None:
    pinner = pinner_of(SlowRing())
    pinner.put(b"", 66)
    with pytest.raises(InternalError, match="no such slot"):
        taken(pinner, 1)
    pinner.stop()
