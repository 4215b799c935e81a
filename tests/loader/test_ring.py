"""Pinning slots of a ring: one refusal is final where slots may leave it, and tried again where other processes pin them too."""

from __future__ import annotations

import mmap

import pytest

from loader.budget import RingChoice
from loader.driver import PinningRefused
from loader.ring import Ring
from tests.fakes.driver import FakeDriver

SLOTS, SLOT_BYTES = 8, 4096


class RefusingDriver(FakeDriver):
    """Refuses the next `refusals` registrations."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals, self.tries = refusals, 0
        self.use_context(self.retain_context(0))

    def host_register(self, address: int, size: int) -> None:
        self.tries += 1
        if self.refusals:
            self.refusals -= 1
            raise PinningRefused(f"refused {self.tries}")
        super().host_register(address, size)


def ring_of(driver: RefusingDriver, may_shrink: bool) -> Ring:
    memory = mmap.mmap(-1, SLOTS * SLOT_BYTES)
    return Ring(driver, memory, RingChoice(SLOTS, SLOT_BYTES, "test"), "register", may_shrink)


def test_a_shared_rings_slot_is_tried_again() -> None:
    driver = RefusingDriver(refusals=3)
    ring = ring_of(driver, may_shrink=False)
    assert all(ring.pin(slot) for slot in range(SLOTS))
    assert ring.refusal == ""
    assert ring.pinned_bytes == SLOTS * SLOT_BYTES
    assert driver.tries == SLOTS + 3
    ring.close()


@pytest.mark.parametrize(("may_shrink", "tries"), [(True, 1), (False, 4)])
def test_what_is_refused_for_good_is_not_asked_again(may_shrink: bool, tries: int) -> None:
    driver = RefusingDriver(refusals=1000)
    ring = ring_of(driver, may_shrink)
    kept = [ring.pin(slot) for slot in range(SLOTS)]
    assert driver.tries == tries
    assert ring.refusal == f"refused {tries}"
    assert ring.pinned_bytes == 0
    assert all(kept), "too little is pinned to let slots go"
    ring.close()
