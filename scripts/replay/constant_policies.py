"""Policies that keep every idle worker of a pool equally long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from loader.errors import RequestError
from scripts.replay.arithmetic import break_even_retention
from scripts.replay.policy import Controller, Keep, Quiet, Setup


@dataclass
class ConstantController(Quiet):
    """One retention per pool."""

    keeps: list[Keep] = field(default_factory=list)

    def idle(self, pool: int, level: int, t: float) -> Keep:
        return self.keeps[pool]


class Constant(Protocol):
    def retention(self, startup_s: float, pool: str) -> float: ...


class _Fixed:
    """Shared by policies whose answer is a constant: the controller only repeats it."""

    def controller(self: Constant, setup: Setup) -> Controller:
        return ConstantController(keeps=[Keep(self.retention(setup.startup_s, name)) for name in setup.pools])


@dataclass(frozen=True)
class Multiple(_Fixed):
    """Keeps for `times` startups (the median one)."""

    times: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return self.times * startup_s


@dataclass(frozen=True)
class Seconds(_Fixed):
    """Keeps for a number of seconds: Modal's scaledown window, fal's keep_alive; 0 releases at completion."""

    seconds: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return self.seconds


@dataclass(frozen=True)
class BreakEven(_Fixed):
    """Keeps for as long as a start would cost, a second of waiting priced at `wait_value` GPU-seconds."""

    wait_value: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return break_even_retention(startup_s, self.wait_value)


@dataclass(frozen=True)
class PerPool(_Fixed):
    """Seconds by pool name, `other` for the rest."""

    seconds: tuple[tuple[str, float], ...]
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        table = dict(self.seconds)
        if pool not in table and "other" not in table:
            raise RequestError(
                "a pool without a retention", where=self.text, found=repr(pool), expected="its name or other"
            )
        return table.get(pool, table.get("other", 0.0))


@dataclass(frozen=True)
class Clairvoyant(_Fixed):
    """Keeps only workers whose next use comes within S·(1 + w). Sees the future: a bound, not a policy."""

    wait_value: float
    text: str

    def retention(self, startup_s: float, pool: str) -> float:
        return break_even_retention(startup_s, self.wait_value)
