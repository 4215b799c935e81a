"""Pins slots on a thread of its own, so that copies from pinned ones need not wait.

The ring is full when the context comes. Pinning 2 GiB takes 0.125 s on an H200 host, and a link of 52 GB/s copies 6.5 GB in
that time; slots that are pinned and copied are filled and copied again meanwhile, in another order than that of the plan.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from loader.errors import InternalError, WorkerError
from loader.reader import SimpleQueue

TYPE_CHECKING = False  # the typing module costs as much as everything else on the way to the first copy
if TYPE_CHECKING:
    from loader.driver import Driver
    from loader.ring import Ring


class Pinner:
    """Pins the slots of full records, first come, first served; begins at once.

    Args:
        context: what is pinned belongs to it.
    Attributes:
        fd: readable as long as `take` has something. seconds: spent in the driver so far. pending: records that were put
            and not taken.
    Raises: InternalError: this process gets no further pipe or thread; nothing is left then.
    """

    def __init__(self, driver: Driver, context: int, ring: Ring) -> None:
        self.seconds = 0.0
        self.pending = 0
        self._driver = driver
        self._context = context
        self._ring = ring
        self._records: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._pinned: deque[tuple[bytes, int, bool]] = deque()
        self._failure: WorkerError | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="pinner", daemon=True)
        try:
            self.fd, self._done = os.pipe()
        except OSError as error:
            raise InternalError(f"no pipe to pin slots with: {error}", where="loader.pinner") from error
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self.fd)
            os.close(self._done)
            raise InternalError(f"no thread to pin slots with: {error}", where="loader.pinner") from error

    def put(self, record: bytes, slot: int) -> None:
        """Pin `slot`, which `record` says to be full; `record` is not looked at."""
        self.pending += 1
        self._records.put((record, slot))

    def take(self) -> list[tuple[bytes, int, bool]]:
        """What may be copied now: (record, slot, whether the slot may be filled again).

        Raises: WorkerError: a driver call failed; a refusal to pin is no failure, see `Ring.pin`.
        """
        os.read(self.fd, 4096)
        if self._failure is not None:
            raise self._failure
        taken = [self._pinned.popleft() for _ in range(len(self._pinned))]
        self.pending -= len(taken)
        return taken

    def stop(self) -> None:
        """End after the slot in progress; what was not taken is lost. May be called again."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._records.put(None)
        self._thread.join()
        os.close(self.fd)
        os.close(self._done)

    def _run(self) -> None:
        try:
            self._driver.use_context(self._context)
            while (item := self._records.get()) is not None and not self._is_stopped:
                start = time.monotonic()
                is_reusable = self._ring.pin(item[1])
                self.seconds += time.monotonic() - start
                self._pinned.append((*item, is_reusable))
                os.write(self._done, b"\0")
        except Exception as error:  # noqa: BLE001 - border of a thread: raised by `take`
            if not isinstance(error, WorkerError):
                error = InternalError(f"pinning failed: {error!r}", where="loader.pinner")
            self._failure = error
            os.write(self._done, b"\0")
