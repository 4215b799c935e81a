"""Policies by name: `multiple:2`, `fixed:60+floor:1`, … → `Plan`. A new policy is a class and its line in `POLICIES`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from loader.errors import RequestError
from scripts.replay.constant_policies import BreakEven, Clairvoyant, Multiple, PerPool, Seconds
from scripts.replay.demand_policies import Forecast, Schedule, Target
from scripts.replay.gap_policies import Hybrid, Level
from scripts.replay.policy import Plan, Policy
from scripts.replay.specs import Spec, parse_number, parse_spec


def _multiple(spec: Spec) -> Policy:
    spec.only({"m"}, positions=1)
    return Multiple(_at_least(spec, spec.number("m", 2.0, position=0)), spec.text)


def _fixed(spec: Spec) -> Policy:
    if spec.values == ("inf",):
        return Seconds(math.inf, spec.text)
    spec.only({"seconds"}, positions=1)
    return Seconds(_at_least(spec, spec.number("seconds", position=0)), spec.text)


def _zero(spec: Spec) -> Policy:
    spec.only(())
    return Seconds(0.0, spec.text)


def _break_even(spec: Spec) -> Policy:
    spec.only({"w"}, positions=1)
    return BreakEven(_at_least(spec, spec.number("w", 1.0, position=0)), spec.text)


def _clairvoyant(spec: Spec) -> Policy:
    spec.only({"w"}, positions=1)
    return Clairvoyant(_at_least(spec, spec.number("w", 1.0, position=0)), spec.text)


def _level(spec: Spec) -> Policy:
    spec.only({"w"}, positions=1)
    return Level(_at_least(spec, spec.number("w", 1.0, position=0)), spec.text)


def _pools(spec: Spec) -> Policy:
    return PerPool(
        tuple((name, parse_number(value, where=spec.text)) for name, value in spec.named), spec.text
    )


def _hybrid(spec: Spec) -> Policy:
    spec.only({"range", "bin", "head", "tail", "cv", "oob", "margin"})
    given = dict(spec.named)
    return Hybrid(
        spec.text,
        range_s=spec.number("range") if "range" in given else None,
        bin_s=spec.number("bin") if "bin" in given else None,
        head=spec.number("head", 5.0),
        tail=spec.number("tail", 99.0),
        cv=spec.number("cv", 2.0),
        oob=spec.number("oob", 0.5),
        margin=spec.number("margin", 0.1),
    )


def _forecast(spec: Spec) -> Policy:
    spec.only({"q", "alpha", "m"})
    quantile = spec.number("q", 0.9)
    if not 0 < quantile < 1:
        raise RequestError("a quantile", where=spec.text, found=quantile, expected="between 0 and 1")
    return Forecast(spec.text, quantile, spec.number("alpha", 0.03), spec.number("m", 2.0))


def _target(spec: Spec) -> Policy:
    spec.only({"u", "window", "panic", "grace", "tick", "panic_at"}, positions=1)
    policy = Target(
        spec.text,
        spec.number("u", 0.7, position=0),
        spec.number("window", 60.0),
        spec.number("panic", 0.1),
        spec.number("panic_at", 2.0),
        spec.number("grace", 30.0),
        spec.number("tick", 2.0),
    )
    if policy.target <= 0 or policy.window_s <= 0 or policy.tick_s <= 0 or not 0 < policy.panic_share <= 1:
        raise RequestError(
            "values out of range", where=spec.text, expected="u, window, tick > 0; 0 < panic ≤ 1"
        )
    return policy


def _schedule(spec: Spec) -> Policy:
    times = spec.number("m", 2.0)
    rows = [(name, value) for name, value in spec.named if name != "m"]
    table = sorted(
        (parse_number(hour, where=spec.text), int(parse_number(count, where=spec.text)))
        for hour, count in rows
    )
    if not table or any(not 0 <= hour < 24 or count < 0 for hour, count in table):
        raise RequestError(
            "a table of hours", where=spec.text, expected="schedule:0=1,9=6,18=2 with hours 0 … 24"
        )
    return Schedule(tuple(table), spec.text, times)


def _at_least(spec: Spec, value: float) -> float:
    if value < 0:
        raise RequestError("a negative value", where=spec.text, found=value, expected="≥ 0")
    return value


POLICIES: dict[str, Callable[[Spec], Policy]] = {
    "multiple": _multiple,
    "fixed": _fixed,
    "zero": _zero,
    "break_even": _break_even,
    "pools": _pools,
    "hybrid": _hybrid,
    "level": _level,
    "forecast": _forecast,
    "target": _target,
    "schedule": _schedule,
    "clairvoyant": _clairvoyant,
}


def parse_plan(text: str) -> Plan:
    """`multiple:2`, `fixed:60+floor:1`, `zero+buffer:2,percent=10,active=1`, … → Plan.

    Parts joined by `+`: one retention policy (default `multiple:2`), `floor:k`, `buffer:k`.
    """
    plan = Plan(Multiple(2.0, "multiple:2"), text=text)
    chosen = False
    for part in text.split("+"):
        spec = parse_spec(part)
        if spec.name == "floor":
            spec.only({"k"}, positions=1)
            plan = replace(plan, floor=spec.integer("k", 1, position=0))
        elif spec.name == "buffer":
            spec.only({"k", "percent", "active"}, positions=1)
            plan = replace(
                plan,
                buffer=spec.integer("k", 0 if "percent" in dict(spec.named) else 1, position=0),
                buffer_percent=spec.number("percent", 0.0),
                while_active=spec.number("active", 0.0) != 0,
            )
        elif spec.name in POLICIES and not chosen:
            plan, chosen = replace(plan, policy=POLICIES[spec.name](spec)), True
        else:
            raise RequestError(
                "a second retention policy" if chosen else "unknown policy",
                where="--policy",
                found=repr(part),
                expected=", ".join([*sorted(POLICIES), "floor", "buffer"]),
            )
    return plan
