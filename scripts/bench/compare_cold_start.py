"""Join the cold start of this project with diffusers' on the same machine, and draw the throttled starts.

    python -m scripts.bench.compare_cold_start

Reads `results/cold_start.json` and `results/peer_diffusers.json`, which must come from one machine and commit. Writes
`results/cold_start_vs_diffusers.json` and `docs/throttle.svg`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.bench.common import RESULTS, target, write_result

LINEAR_FLOP_PER_ROW = 38.535e9  # 50 blocks, two per multiply-add
ATTENTION_FLOP_PER_ROW2 = 1_433_600.0
PICTURE = Path(__file__).parents[2] / "docs" / "throttle.svg"


def main() -> int:
    ours, peer = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("cold_start", "peer_diffusers")
    )
    for key in ("machine", "commit"):
        if ours[key] != peer[key]:
            raise SystemExit(f"{key} differs: {ours[key]} and {peer[key]}; measure both in one run")
    entry = ours["figures"]["starts"]["first_dit_entry"]["median"]
    rows = sum(ours["figures"]["rows"].values())
    peer_rows = peer["figures"]["transformer"]["num_rows"]
    scaled = ours["figures"]["warm_step_s"] * _work(peer_rows) / _work(rows)
    figures = {
        "ours": {"first_dit_entry_s": entry, "warm_step_s": ours["figures"]["warm_step_s"], "rows": rows},
        "diffusers": {
            "first_dit_entry_s": peer["figures"]["first_dit_entry_s"],
            "warm_step_s": peer["figures"]["warm_step_s"],
            "rows": peer_rows,
        },
        "our_warm_step_scaled_to_their_rows_s": round(scaled, 4),
        "note": "diffusers' loads were timed one after the other, each from fresh files in memory, and added",
        "measured": {"ours": [ours["commit"], ours["date"]], "diffusers": [peer["commit"], peer["date"]]},
        "measured_on": ours["machine"],
    }
    targets = {
        "first_dit_entry_vs_diffusers": target(
            round(peer["figures"]["first_dit_entry_s"] / entry, 3), 14, "higher"
        ),
        "warm_step_vs_diffusers": target(
            round(peer["figures"]["warm_step_s"] / scaled, 4),
            1.15,
            "higher",
            note="scaled to equal rows by operations",
        ),
    }
    print(write_result("cold_start_vs_diffusers", figures, targets))
    _draw(ours["figures"]["throttle"])
    return 0


def _work(rows: int) -> float:
    return LINEAR_FLOP_PER_ROW * rows + ATTENTION_FLOP_PER_ROW2 * rows * rows


def _draw(points: list[dict[str, Any]]) -> None:
    """Entry time against storage rate, beside the ideal line; both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2))
    rates = [point["gbps"] for point in points]
    axes.plot(rates, [point["ideal_s"] for point in points], "--", color="#888", label="bytes needed ÷ rate")
    axes.plot(
        rates,
        [point["entry_s"] for point in points],
        "o-",
        color="#3b6fb6",
        label="first DiT entry, measured",
    )
    for point in points:
        text = f"{point['entry_s']:.1f} s"
        axes.annotate(text, (point["gbps"], point["entry_s"]), xytext=(6, 6), textcoords="offset points")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="storage, GB/s (throttled)",
        ylabel="seconds from the first instruction",
    )
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_title("A cold start on slow storage (50.4 GB before the first entry)", loc="left", fontsize=11)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
