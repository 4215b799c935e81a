"""Summaries of the fused operators' bench: targets, shares of the copy rate, tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.bench.common import target
from scripts.bench.fused_cases import Case

SHARE_GOAL = 0.8


def targets(figures: Mapping[str, Any], cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Names fixed by the plan of this work. Shares are of the large copy's bandwidth, at the smaller row count."""
    result: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        timed = figures["cases"].get(name, {}).get("timed", {}).get(str(case.timed_rows[0]))
        if timed is None or "ours_us" not in timed:
            continue
        value = timed["ours_us"]
        if case.goal_us is not None:
            result[f"fused_{name}_us"] = target(value, case.goal_us, "lower")
        result[f"fused_{name}_bandwidth_share"] = target(timed["share"], SHARE_GOAL, "higher")
    return result


def summarise(timed: dict[str, Any], bandwidth: float, shipped: int) -> dict[str, Any]:
    """Adds what ships, the best tuning and shares of the copy rate."""
    if not timed["tunings"]:
        return timed
    best = min(timed["tunings"], key=lambda number: timed["tunings"][number]["us"])
    ours_tuning = shipped if shipped in timed["tunings"] else best  # best: where what ships did not compile
    ours = timed["tunings"][ours_tuning]["us"]
    floor = timed["bytes"] / bandwidth * 1e6
    return timed | {
        "ours_us": ours,
        "ours_tuning": ours_tuning,
        "floor_us": floor,
        "share": floor / ours,
        "share_of_same_copy": timed["copy_us"] / ours,
        "best_tuning": best,
        "best_us": timed["tunings"][best]["us"],
    }


def print_table(figures: dict[str, Any]) -> None:
    print(f"\ncopy {figures['copy_tbps']:.2f} TB/s, host {figures['host']}, attention {figures['attention']}")
    print(f"complete: {figures['complete']}, missing: {figures['missing']}")
    print(
        f"{'operator':<22}{'rows':>6}{'eager':>9}{'ours':>8}{'best':>8}{'@':>2}{'lib':>8}{'copy':>8}{'floor':>8}{'share':>7}{'error':>10}{'flips':>10}"
    )
    for name, case in figures["cases"].items():
        if "failed" in case:
            print(f"{name:<22}  FAILED {case['failed'][:120]}")
        worst = (
            {key: max(c[key] for c in case["checks"].values()) for key in ("error", "flips")}
            if case["checks"]
            else {}
        )
        for rows, t in case["timed"].items():
            if "ours_us" not in t:
                continue
            library = f"{t['library_us']:.1f}" if "library_us" in t else "-"
            print(
                f"{name:<22}{rows:>6}{t['eager_us']:>9.1f}{t['ours_us']:>8.1f}{t['best_us']:>8.1f}{t['best_tuning']:>2}"
                f"{library:>8}{t['copy_us']:>8.1f}{t['floor_us']:>8.1f}{t['share']:>7.2f}"
                f"{worst.get('error', -1):>10.1e}{worst.get('flips', -1):>10.1e}"
            )


def print_tuning(case: Case, architecture: str, timed: Mapping[str, Mapping[str, Any]]) -> None:
    tunings = case.operator.tunings
    for rows, times in timed.items():
        for number, microseconds in sorted(times["median_us"].items(), key=lambda item: item[1]):
            print(f"{rows:>6} rows  tuning {number}  {microseconds:8.2f} us  {tunings[number]}")
        print(f"SHIPPED[{architecture!r}][{case.operator.name!r}] = {times['best']}  # at {rows} rows")
