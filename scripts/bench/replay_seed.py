"""The production figures and the public traces: shares at startups of 70 and 7.2 s, retention twice the startup."""

from __future__ import annotations

import argparse
import csv
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.common import target, write_result
from scripts.replay.importers import import_trace
from scripts.replay.laws import Constant, parse_law
from scripts.replay.policies import parse_plan
from scripts.replay.simulate import simulate
from scripts.replay.stats import burst_stats
from scripts.replay.traces import Trace, merge_pools, scale_durations, stretch, thin, with_durations
from scripts.replay.workload import from_windows, synthetic

# Published means and standard deviations over streams, percent.
PUBLISHED = {
    "share_70": (33.15, 0.44),
    "share_7": (74.77, 0.13),
    "overhead_cut": (83.3, 0.2),
    "time_saved": (55.7, 0.5),
}
BURSTS = {"crossings_per_hour": (8.50, 0.14), "peak_median": (2.99, 0.04), "peak_share_high": (0.223, 0.017), "max_over_median": (20.0, 3.0)}  # fmt: skip


def shares(trace: Trace) -> dict[str, float]:
    """Shares and cuts in percent, cold fractions and mean waits."""
    slow, fast = (
        simulate(trace, Constant(startup), parse_plan("multiple:2"), record=False) for startup in (70.0, 7.2)
    )
    a, b = slow.generating_s / slow.allocated_s, fast.generating_s / fast.allocated_s
    return {
        "requests": float(len(trace)),
        "share_70": 100 * a,
        "share_7": 100 * b,
        "overhead_cut": 100 * (1 - (1 / b - 1) / (1 / a - 1)),
        "time_saved": 100 * (1 - a / b),
        "idle_cut": 100 * (1 - fast.idle_s / slow.idle_s),
        "cold_70": 100 * float(slow.cold.mean()),
        "cold_7": 100 * float(fast.cold.mean()),
        "wait_mean_70_s": float(slow.waits.mean()),
        "wait_mean_7_s": float(fast.waits.mean()),
        "wait_p50_70_s": float(np.median(slow.waits)),
        "wait_p50_7_s": float(np.median(fast.waits)),
    }


def reference(streams: int) -> dict[str, Any]:
    """Mean and standard deviation over streams of shares and burst statistics."""
    rows = []
    for seed in range(streams):
        trace = synthetic("ref", seed)
        stats = burst_stats(trace, busy=0)
        rows.append(
            {**shares(trace), "q": stats.q, **{name: float(getattr(stats, name) or 0.0) for name in BURSTS}}
        )
        print(f"stream {seed}", file=sys.stderr)
    return {
        name: {
            "mean": float(np.mean([row[name] for row in rows])),
            "sd": float(np.std([row[name] for row in rows], ddof=1)),
        }
        for name in rows[0]
    }


def public(folder: Path, gentd26: Path | None) -> dict[str, Any]:
    """The same figures on published traces; service times lognormal with CV 0.4 unless the trace has its own."""
    code = import_trace("azure-llm", str(folder / "azure_llm_2023_code.csv"))
    conversation = import_trace("azure-llm", str(folder / "azure_llm_2023_conv.csv"))
    with (folder / "servegen_mm_image_windows.csv").open(encoding="utf-8") as file:
        windows = list(csv.DictReader(file))

    def timed(trace: Trace, mean: float) -> Trace:
        return with_durations(trace, parse_law(f"lognormal:mean={mean},cv=0.4"), 0)

    def clients(scale: float) -> Trace:
        return from_windows(windows, rate_scale=scale, mean_s=54.0, cv=0.4, seed=0, label="servegen")

    traces = {
        "azure code as is, 54 s": timed(code, 54),
        "azure code 1/20, 46 s": timed(thin(code, Fraction(1, 20), 0), 46),
        "azure conversation as is, 54 s": timed(conversation, 54),
        "azure conversation 1/50, 54 s": timed(thin(conversation, Fraction(1, 50), 0), 54),
        "azure conversation gaps x10, 54 s": timed(stretch(conversation, 10), 54),
        "azure conversation 1/10, 54 s": timed(thin(conversation, Fraction(1, 10), 0), 54),
        "servegen 35 pools": clients(1.0),
        "servegen 35 pools, rates / 10": clients(0.1),
        "servegen 35 pools, rates / 50": clients(0.02),
        "servegen one pool, rates / 50": merge_pools(clients(0.02)),
    }
    if gentd26 is not None:
        trace = import_trace("gentd26", str(gentd26))
        traces["gentd26 one pool"] = merge_pools(trace)
        traces["gentd26 pool per model"] = trace
        traces["gentd26 pool per model, times x2"] = scale_durations(trace, 2.0)
    found = {}
    for name, trace in traces.items():
        found[name] = {**shares(trace), "q": burst_stats(trace).q}
        print(name, file=sys.stderr)
    return found


def _within(name: str, value: float, better: str) -> dict[str, object]:
    """Met inside three standard deviations of the published mean; the goal is the band's nearer edge for `better`."""
    mean, sd = PUBLISHED[name]
    low, high = mean - 3 * sd, mean + 3 * sd
    found = target(value, high if better == "lower" else low, better, band=[low, high])
    return {**found, "met": low <= value <= high}


def main() -> None:
    """Writes `results/replay_seed.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the published excerpts")
    parser.add_argument("--gentd26", type=Path, help="lora_request_trace.csv, which may not be redistributed")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "reference": reference(arguments.streams),
        "published": PUBLISHED,
        "published_bursts": BURSTS,
    }
    figures["public"] = public(arguments.traces, arguments.gentd26)
    means = {name: figures["reference"][name]["mean"] for name in (*PUBLISHED, *BURSTS, "idle_cut")}
    figures["deviation_sd"] = {
        name: (means[name] - mean) / sd for name, (mean, sd) in {**PUBLISHED, **BURSTS}.items()
    }
    targets = {
        "seed_share_70s": _within("share_70", means["share_70"], "lower"),
        "seed_share_7s": _within("share_7", means["share_7"], "higher"),
        "seed_idle_cut": _within("overhead_cut", means["overhead_cut"], "higher"),
    }
    print(write_result("replay_seed", figures, targets))


if __name__ == "__main__":
    main()
