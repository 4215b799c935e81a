"""The host ring as the uploader sees it: addresses of slots, pinned one by one after their first fill.

Registering a whole ring at once would hold up other driver calls, and registering untouched pages makes the driver
fault them in one by one. A slot is never unregistered or unmapped while a copy from it may be in flight.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import TYPE_CHECKING

from loader.driver import Driver, PinningRefused, address_of

if TYPE_CHECKING:
    from loader.budget import RingChoice

_ENOUGH_PINNED = 256 << 20
_TRIES_IN_SHARED_RING, _TRY_AGAIN_S = 4, 0.002


class Ring:
    """Slots in `memory`.

    Args:
        pinning: "register", "pinned" (by the driver itself) or "pageable".
        may_shrink: whether slots may leave it; no in a ring that others need as well: each could drop the others' slots.
    """

    def __init__(
        self,
        driver: Driver,
        memory: mmap.mmap | memoryview,
        choice: RingChoice,
        pinning: str,
        may_shrink: bool = True,
    ) -> None:
        self._may_shrink = may_shrink
        self.pinning = pinning
        self.choice = choice
        self.refusal = ""
        self._driver = driver
        self._memory: mmap.mmap | memoryview | None = memory
        self._base = address_of(memory)
        self._registered: set[int] = set()

    @property
    def pinned_bytes(self) -> int:
        if self.pinning == "pinned":
            return self.choice.bytes
        return len(self._registered) * self.choice.slot_bytes

    def address(self, slot: int) -> int:
        return self._base + slot * self.choice.slot_bytes

    def is_pinned(self, slot: int) -> bool:
        """Whether nothing is left to do before a copy from `slot`; also where nothing is pinned slot by slot."""
        return self.pinning != "register" or slot in self._registered

    def pin(self, slot: int) -> bool:
        """Pin a slot that was just filled for the first time; nothing for others.

        Returns: whether the slot may be used again. After a refusal, slots that are not pinned leave the ring as long
        as 256 MiB of pinned ones remain; below that they stay and are copied as pageable memory, as all do if none may
        leave.
        """
        if self.is_pinned(slot):
            return True
        if not self.refusal and self._register(slot):
            return True
        return not self._may_shrink or self.pinned_bytes < min(_ENOUGH_PINNED, self.choice.bytes // 2)

    def _register(self, slot: int) -> bool:
        """Pages of a shared ring may be moved by the kernel while another process pins them: that passes."""
        for tries_left in reversed(range(1 if self._may_shrink else _TRIES_IN_SHARED_RING)):
            try:
                self._driver.host_register(self.address(slot), self.choice.slot_bytes)
            except PinningRefused as error:
                if tries_left:
                    time.sleep(_TRY_AGAIN_S)
                else:
                    self.refusal = str(error)
            else:
                self._registered.add(slot)
                return True
        return False

    def close(self) -> None:
        """Unpin and unmap. No copy may be in flight. May be called again."""
        for slot in sorted(self._registered):
            self._driver.host_unregister(self.address(slot))
        self._registered.clear()
        self._memory = None

    def abandon(self) -> None:
        """Keep the memory mapped until the process ends: the context is broken and copies may still be in flight."""
        if self._memory is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        self._registered.clear()
