"""Sentences that a table hides: what a faster start costs, what the cheapest retention is, what was started in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def findings(result: Mapping[str, Any]) -> list[str]:
    """Plain sentences about a result, most important first."""
    rows: Sequence[Mapping[str, Any]] = result["combinations"]
    found = _faster_start(rows) + _cheapest((result.get("pictures") or {}).get("cheapest", []))
    found += _in_vain(rows)
    found += [f"{row['startup']} {row['policy']}: {flag}" for row in rows for flag in row["flags"]]
    return found


def _faster_start(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The slowest against the fastest startup under the same policy."""
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        same = [row for row in rows if row["policy"] == policy]
        slow = max(same, key=lambda row: row["startup_p50_s"])
        fast = min(same, key=lambda row: row["startup_p50_s"])
        if slow["startup_p50_s"] <= fast["startup_p50_s"] or slow["requests"] == 0:
            continue
        before, after = slow["wait_s"], fast["wait_s"]
        overhead = 1 - fast["overhead_s_per_request"] / max(slow["overhead_s_per_request"], 1e-12)
        text = (
            f"{policy}, startup {slow['startup']} → {fast['startup']}: "
            f"{100 * slow['share']['generating']:.1f} → {100 * fast['share']['generating']:.1f} % generating, "
            f"overhead −{100 * overhead:.1f} %, mean wait {before['mean']:.1f} → {after['mean']:.1f} s."
        )
        if fast["cold_fraction"] > slow["cold_fraction"] + 0.005:
            text += (
                f" What it costs: more requests are cold, {100 * slow['cold_fraction']:.0f} → "
                f"{100 * fast['cold_fraction']:.0f} %, and moves the median wait from {before['p50']:.1f} to {after['p50']:.1f} s."
            )
        found.append(text)
    return found


def _cheapest(items: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for item in items:
        if item["wait_value"] != 1 or item["cost_s"] <= 0:
            continue
        ratio = item["cost_at_twice_s"] / item["cost_s"]
        found.append(
            f"Cheapest retention at S = {item['startup']}, a waiting second priced at one GPU-second: "
            f"{_seconds(item['retention_s'])} ({item['cost_s']:.1f} s per request); twice the startup costs {ratio:.2f} times as "
            f"much (level curve, hindsight on this trace)."
        )
    return found


def _seconds(value: float) -> str:
    return "practically none" if value < 0.5 else f"{value:.3g} s"


def _in_vain(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    wasted = [row for row in rows if row["useless_starts"]]
    if not wasted:
        return ["No worker was started for nothing in any combination."]
    return [
        f"{row['startup']} {row['policy']}: {row['useless_starts']:,} of {row['starts']:,} workers never served a request."
        for row in wasted
    ]
