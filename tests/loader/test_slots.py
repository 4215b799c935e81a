"""Which slots the reader gets back, against a plain count of where each of them is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.plan_wire import ReadSettings
from loader.reader import AUTO, EDGES, PART_BYTES, RING, WHOLE
from loader.slots import SlotStack, slots_to_keep


@pytest.mark.parametrize(
    ("threads", "slot_bytes", "slots"),
    [
        (13, 4 * PART_BYTES, 7),
        (13, PART_BYTES, 26),
        (1, 4 * PART_BYTES, 4),
        (64, 4 * PART_BYTES, 32),
        (4, 4096, 8192),
    ],
)
def test_kept_slots_hold_two_parts_for_each_thread(threads: int, slot_bytes: int, slots: int) -> None:
    assert slots_to_keep(threads * PART_BYTES, slot_bytes) == slots
    assert slots * slot_bytes >= 2 * threads * PART_BYTES


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.data())
def test_no_slot_is_lost_or_given_twice(count: int, keep: int, data: st.DataObject) -> None:
    stack = SlotStack(count, keep)
    at_reader, being_copied, returned = list(range(count)), [], 0
    for _ in range(60):
        filled = data.draw(st.integers(0, len(at_reader)))
        being_copied += at_reader[:filled]
        del at_reader[:filled]
        stack.filled(filled)
        done = data.draw(st.integers(0, len(being_copied)))
        stack.put(being_copied[:done])
        returned += done
        del being_copied[:done]
        given_now = stack.take()
        assert not set(given_now) & {*at_reader, *being_copied}
        assert len(set(given_now)) == len(given_now)
        at_reader += given_now
        returned -= len(given_now)
        if given_now:
            assert len(at_reader) <= keep
        assert len(at_reader) >= min(
            keep, len(at_reader) + returned
        )  # the reader never starves beside free slots


def test_the_slot_that_came_back_last_goes_first() -> None:
    stack = SlotStack(8, 2)
    stack.filled(8)
    stack.put([0, 1, 2])
    assert stack.take() == [2, 1]
    assert stack.take() == []
    stack.filled(1)
    stack.put([2])
    assert stack.take() == [2]  # again, and slot 0 still waits
    stack.keep = 4
    assert stack.take() == [0]


def test_a_reader_that_grew_gets_more_and_never_less() -> None:
    stack = SlotStack(128, 7)
    stack.reader_grew(64 * PART_BYTES, 4 * PART_BYTES)
    assert stack.keep == 32
    everything = SlotStack(128, 128)
    everything.reader_grew(64 * PART_BYTES, 4 * PART_BYTES)
    assert everything.keep == 128


@pytest.mark.parametrize("verify", [EDGES, WHOLE, AUTO])
def test_every_thread_has_a_slot_to_hash_while_the_next_ones_are_read(verify: int) -> None:
    how = ReadSettings(RING, 13, verify, 16 << 20, 2 << 30, 16)
    slots = slots_to_keep(how.filling_bytes, how.slot_bytes)
    assert slots == (7 if verify == EDGES else 26)
