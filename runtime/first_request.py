"""The first request of a worker whose commands come while it starts: from the thread that reads them to the start, and
what the start made of it back. Nobody waits for a request that may never come. Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.family import Prepared

FOLLOWS_FLAG = "--request-follows"  # of a worker; its sender must have one at hand
FOLLOWS_S = 1.0  # an announced request is there in milliseconds, on a busy host later; nothing is read while it is waited for


class FirstRequest:
    """A place for one request, open until the start would gain nothing from knowing it.

    Args:
        follows: whoever started this process says that a request comes at once: the start chooses what to load by it.
    """

    def __init__(self, follows: bool = False) -> None:
        self.follows = follows
        self._changed = threading.Condition()
        self._is_open = True
        self._body: Mapping[str, object] | None = None
        self._is_settled = False
        self._outcome: Prepared | Exception | None = None

    # --- the thread that reads commands

    def offer(self, body: Mapping[str, object]) -> bool:
        """Hand a request to the start. False: it takes none any more, or has one."""
        with self._changed:
            is_taken, self._is_open = self._is_open, False
            if is_taken:
                self._body = body
                self._changed.notify_all()
            return is_taken

    def result(self) -> Prepared | None:
        """Wait for what the start makes of the request that it took; None: the start failed before.

        Raises: what parsing or preparing it raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    # --- the start

    def wait(self, timeout_s: float | None = None) -> Mapping[str, object] | None:
        """The request; None: there is none yet after `timeout_s`, or none is taken any more (None: wait for either)."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_open, timeout_s)
            return self._body

    def close(self) -> None:
        """Take no request from here on; one that is there stays."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def abandon(self) -> None:
        """The start has failed: whoever waits is let go."""
        self.close()
        self.settle(None)

    def settle(self, outcome: Prepared | Exception | None) -> None:
        """Say what became of the request. Does nothing to one that is settled."""
        with self._changed:
            if not self._is_settled:
                self._is_settled, self._outcome = True, outcome
                self._changed.notify_all()
