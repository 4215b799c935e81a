"""What a simulation may be told beyond trace, startup and policy; every default is the base model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from loader.errors import RequestError
from scripts.replay.laws import Law

BINDINGS = ("bound", "shared")
DISPATCHES = ("newest-idle", "oldest-idle", "newest-created")


@dataclass(frozen=True)
class Options:
    """Extensions of the base model; off by default.

    binding, dispatch: see docs/replay.md. Caps, queue limits, scale limits, start failures and concurrency need one
    queue per pool: they force `shared`.
    max_workers: per pool; max_gpus: over all pools, with `evict` an idle worker of another pool makes room.
    scheduling: platform delay before the first instruction; adds to the wait, billed only with `bill_scheduling`.
    scale_rate: (new workers, per seconds). start_failure: (probability, seconds until it shows).
    efficiency: GPUs per worker → parallel efficiency; the generation time is g / (k · e_k).
    slowdown: requests running together in a worker → factor on their service times, by rising count from 1.
    window: seconds; intervals are clipped to it. warmup_s: the same with an open end.
    """

    binding: str = "bound"
    dispatch: str = "newest-idle"
    cancel_surplus: bool = False
    max_workers: int | None = None
    max_gpus: int | None = None
    evict: bool = False
    queue_limit: int | None = None
    queue_timeout_s: float | None = None
    scheduling: Law | None = None
    bill_scheduling: bool = False
    fresh_idle_s: float | None = None
    scale_delay_s: float = 0.0
    scale_rate: tuple[int, float] | None = None
    start_failure: tuple[float, float] | None = None
    gpus_per_worker: int = 1
    efficiency: Mapping[int, float] = field(default_factory=dict)
    slowdown: tuple[float, ...] = (1.0,)
    preempt_mean_s: float | None = None
    window: tuple[float, float] | None = None
    warmup_s: float = 0.0
    engine: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("binding", self.binding, BINDINGS)
        _one_of("dispatch", self.dispatch, DISPATCHES)
        _one_of("engine", self.engine, ("auto", "python", "numba", "fleet"))
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise RequestError("out of range", where=item.name, found=value, expected="a number ≥ 0")
        for name in ("max_workers", "max_gpus", "queue_limit"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "queue_limit" else 1):
                raise RequestError("too small", where=name, found=value, expected="≥ 1")
        if self.gpus_per_worker < 1 or not self.slowdown or min(self.slowdown) < 1:
            raise RequestError(
                "workers of less than one GPU or a speed-up by sharing", where="gpus_per_worker, slowdown"
            )
        if self.start_failure is not None and not 0 <= self.start_failure[0] < 1:
            raise RequestError(
                "a probability", where="start_failure", found=self.start_failure[0], expected="0 ≤ p < 1"
            )
        if self.window is not None and not 0 <= self.window[0] < self.window[1]:
            raise RequestError("not a window", where="window", found=self.window, expected="0 ≤ begin < end")
        if self.max_gpus is not None and self.max_gpus < self.gpus_per_worker:
            raise RequestError(
                "no worker fits", where="max_gpus", found=self.max_gpus, expected=f"≥ {self.gpus_per_worker}"
            )

    @property
    def is_shared(self) -> bool:
        """True if cold requests queue together, by choice or because an option needs it."""
        limits = (self.max_workers, self.max_gpus, self.queue_limit, self.queue_timeout_s, self.scale_rate)
        return (
            self.binding == "shared"
            or any(limit is not None for limit in limits)
            or self.start_failure is not None
            or self.scale_delay_s > 0
            or len(self.slowdown) > 1
        )

    @property
    def needs_fleet(self) -> bool:
        """True if the plain loops cannot express these options."""
        return (
            self.engine == "fleet"
            or self.dispatch == "newest-created"
            or self.cancel_surplus
            or self.max_gpus is not None
            or self.queue_limit is not None
            or self.queue_timeout_s is not None
            or self.fresh_idle_s is not None
            or self.scale_delay_s > 0
            or self.scale_rate is not None
            or self.start_failure is not None
            or len(self.slowdown) > 1
            or self.preempt_mean_s is not None
        )

    def as_dict(self) -> dict[str, object]:
        """Options that differ from the base model, JSON-ready."""
        plain = Options()
        found: dict[str, object] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != getattr(plain, item.name):
                found[item.name] = value.text if item.name == "scheduling" else value
        return found


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RequestError("unknown value", where=name, found=repr(value), expected=", ".join(allowed))
