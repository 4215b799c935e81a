"""Lines on stderr that say what a bench does, with the time of day and the seconds since it began."""

from __future__ import annotations

import sys
import time


class Progress:
    """Seconds of one bench, and of those that it may take."""

    def __init__(self, budget_s: float) -> None:
        self._started = time.monotonic()
        self.budget_s = budget_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """May be negative."""
        return self.budget_s - self.seconds

    @property
    def deadline(self) -> float:
        """By `time.monotonic`."""
        return self._started + self.budget_s

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.seconds:6.1f} s  {text}", file=sys.stderr, flush=True)
