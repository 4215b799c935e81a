"""Results as text: terminal tables and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.replay.sweep import flat

HEAD = ("startup", "policy", "R s", "generating", "starting", "idle", "GPU-h", "cold", "wait mean", "p50", "p90", "p99", "max", "starts", "useless", "peak", "queue")  # fmt: skip


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first two left-aligned, figures right-aligned."""
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def combination_cells(row: Mapping[str, Any]) -> list[str]:
    """One line of the main table."""
    wait, share = row["wait_s"], row["share"]
    retention = row["retention_s"]
    cells = [
        row["startup"],
        row["policy"],
        "adaptive" if retention is None else retention if isinstance(retention, str) else f"{retention:g}",
        *(f"{100 * share[kind]:.1f}%" for kind in ("generating", "starting", "idle")),
        f"{row['gpu_hours']:,.1f}",
        f"{100 * row['cold_fraction']:.1f}%",
        *(f"{wait[name]:.1f}" for name in ("mean", "p50", "p90", "p99", "max")),
        *(f"{row[name]:,}" for name in ("starts", "useless_starts", "peak_workers", "queue_peak")),
    ]
    return cells + ([f"{row['cost_usd']:,.2f}"] if "cost_usd" in row else [])


def main_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All combinations; a cost column if a price was given."""
    header = [*HEAD, "USD"] if rows and "cost_usd" in rows[0] else list(HEAD)
    return table(header, [combination_cells(row) for row in rows])


def difference_lines(result: Mapping[str, Any]) -> list[str]:
    """Each combination against the first, in words."""
    first = result["combinations"][0]
    lines = []
    for row, change in zip(result["combinations"][1:], result["differences"], strict=True):
        lines.append(
            f"{row['startup']} {row['policy']} against {first['startup']} {first['policy']}: "
            f"overhead {-100 * change['overhead_cut']:+.1f}%, GPU time {-100 * change['gpu_time_saved']:+.1f}%, "
            f"cold {100 * change['cold_change']:+.1f} points, mean wait {change['wait_mean_change_s']:+.2f} s, "
            f"median wait {change['wait_p50_change_s']:+.2f} s"
        )
    return lines


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One row per combination, dotted column names."""
    flats = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flats for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flats)
    return buffer.getvalue()


def timeline_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Per-bin arrivals and worker-seconds of every combination that has a timeline."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    kinds = ("arrivals", "generating", "starting", "idle", "lost")
    writer.writerow(
        ["startup", "policy", "begin_s", *(kind if kind == "arrivals" else f"{kind}_s" for kind in kinds)]
    )
    for row in rows:
        line = row.get("timeline")
        if line:
            for at in range(len(line["arrivals"])):
                writer.writerow(
                    [row["startup"], row["policy"], at * line["bin_s"], *(line[kind][at] for kind in kinds)]
                )
    return buffer.getvalue()
