"""What a retention policy is: its answers, what its controller may know, and a policy with floor and buffer as a plan.

A policy is a small frozen class. One with a constant answer implements `retention`; one that looks at the past returns
a `Controller` from `controller`, and is then run by `fleet.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Keep(NamedTuple):
    """What happens to a worker that became idle: kept for `for_s`; started anew `restart_s` after (None: not)."""

    for_s: float
    restart_s: float | None = None


class Setup(NamedTuple):
    """What a controller may know before the trace begins."""

    startup_s: float  # median
    pools: Sequence[str]


class Controller(Protocol):
    """Decisions of one run; sees the past only. Levels count a pool's requests in service, from 1."""

    tick_s: float | None  # period of `tick` while the pool is active; None: never
    governs: bool  # True: `wanted` alone decides how many workers a pool has

    def idle(self, pool: int, level: int, t: float) -> Keep:
        """The request at `level` finished and its worker is idle; level 0: a worker that has not served yet."""

    def arrival(self, pool: int, level: int, t: float) -> None:
        """A request arrived and is the `level`-th in the pool."""

    def load(self, pool: int, t: float, load: int) -> None:
        """Requests queued or in service changed to `load`."""

    def wanted(self, pool: int, t: float, alive: int) -> int:
        """Workers the pool should have at least (or exactly, if `governs`)."""

    def next_tick(self, pool: int, t: float, active: bool) -> float | None:
        """When to ask `wanted` again, or None until the next arrival."""


class Policy(Protocol):
    """A retention policy; `text` is its specification."""

    @property
    def text(self) -> str: ...

    def retention(self, startup_s: float, pool: str) -> float | None:
        """Constant seconds to keep an idle worker, or None if it takes a controller."""

    def controller(self, setup: Setup) -> Controller: ...


@dataclass(frozen=True)
class Plan:
    """A retention policy together with a warm floor and a buffer of spare workers."""

    policy: Policy
    floor: int = 0
    buffer: int = 0
    buffer_percent: float = 0.0
    while_active: bool = False
    text: str = ""

    def spare(self, in_flight: int, waiting: int) -> int:
        """Idle or starting workers wanted beyond the busy ones."""
        if self.while_active and in_flight + waiting == 0:
            return 0
        return max(self.buffer, math.ceil(self.buffer_percent / 100 * in_flight - 1e-9))

    @property
    def is_plain(self) -> bool:
        """True without floor and buffer."""
        return self.floor == 0 and self.buffer == 0 and self.buffer_percent == 0


@dataclass
class Quiet:
    """Controller parts that most policies leave alone."""

    tick_s: float | None = None
    governs: bool = False

    def arrival(self, pool: int, level: int, t: float) -> None:
        return None

    def load(self, pool: int, t: float, load: int) -> None:
        return None

    def wanted(self, pool: int, t: float, alive: int) -> int:
        return 0

    def next_tick(self, pool: int, t: float, active: bool) -> float | None:
        return t + self.tick_s if self.tick_s and active else None
