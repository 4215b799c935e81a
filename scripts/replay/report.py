"""One self-contained HTML page of a result: inline SVG, no script, no outside reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from scripts.replay.findings import findings
from scripts.replay.page import figure, html_page, pairs, table, trace_lead, write_page
from scripts.replay.plots import draw_svg
from scripts.replay.stats import in_words
from scripts.replay.tables import HEAD, combination_cells

TITLES = {
    "workers": "Workers over time",
    "shares": "Where GPU time goes",
    "frontier": "Cost against waiting",
    "waits": "How long requests waited",
    "bursts": "Bursts",
    "zoom": "The largest burst, worker by worker",
}


def html_report(result: Mapping[str, Any]) -> str:
    """The page as text. Raises: CapabilityError: matplotlib is missing."""
    trace = result["trace"]
    parts = [
        f"<h1>How long to keep an idle GPU: {escape(str(trace['label']))}</h1>",
        f'<p class="lead">{_lead(result)}</p>',
        "<h2>Findings</h2>",
        '<ul class="findings">' + "".join(f"<li>{escape(text)}</li>" for text in findings(result)) + "</ul>",
        "<h2>Combinations</h2>",
        _main_table(result["combinations"]),
        _differences(result),
    ]
    parts += [figure(TITLES[name], svg, caption) for name, (svg, caption) in draw_svg(result).items()]
    data = result.get("pictures") or {}
    parts += [
        _cheapest(data.get("cheapest", [])),
        _spares(data.get("spares", [])),
        _stats(result),
        _facts(result),
    ]
    return html_page(f"Replay of {trace['label']}", parts)


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Raises: CapabilityError: matplotlib is missing."""
    write_page(html_report(result), path)


def _lead(result: Mapping[str, Any]) -> str:
    return escape(
        f"{trace_lead(result['trace'])}; {len(result['combinations'])} combinations of startup and policy."
    )


def _main_table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = [*HEAD, "USD"] if "cost_usd" in rows[0] else list(HEAD)
    return table(header, [combination_cells(row) for row in rows])


def _differences(result: Mapping[str, Any]) -> str:
    rows = result["combinations"]
    if len(rows) < 2:
        return ""
    cells = [
        [
            row["startup"],
            row["policy"],
            f"{-100 * change['overhead_cut']:+.1f} %",
            f"{-100 * change['gpu_time_saved']:+.1f} %",
            f"{100 * change['cold_change']:+.1f}",
            f"{change['wait_mean_change_s']:+.2f}",
            f"{change['wait_p50_change_s']:+.2f}",
        ]
        for row, change in zip(rows[1:], result["differences"], strict=True)
    ]
    header = ["startup", "policy", "overhead", "GPU time", "cold, points", "mean wait, s", "median wait, s"]
    first = escape(f"{rows[0]['startup']} {rows[0]['policy']}")
    return f"<h2>Against the first combination ({first})</h2>{table(header, cells)}"


def _cheapest(items: Sequence[Mapping[str, Any]]) -> str:
    if not items:
        return ""
    cells = [
        [
            item["startup"],
            f"{item['wait_value']:g}",
            f"{item['retention_s']:.3g}",
            f"{item['cost_s']:.1f}",
            f"{item['cost_at_twice_s']:.1f}",
            f"{item['clairvoyant_s']:.1f}",
        ]
        for item in items
    ]
    header = [
        "startup",
        "waiting second in GPU-seconds",
        "cheapest R, s",
        "cost",
        "cost at R = 2·S",
        "with foresight",
    ]
    note = "Overhead plus priced waiting, GPU-seconds per request, by the level curve in hindsight (an estimate for S &gt; 0)."
    return f"<h2>Cheapest retention</h2><p>{note}</p>{table(header, cells)}"


def _spares(items: Sequence[Mapping[str, Any]]) -> str:
    if not items:
        return ""
    cells = [
        [
            item["startup"],
            item["policy"],
            str(item["spares"]),
            f"{item['gpu_hours_more']:+,.0f}",
            f"{100 * item['cold_before']:.1f} → {100 * item['cold_fraction']:.1f} %",
            f"{item['wait_mean_before_s']:.1f} → {item['wait_mean_s']:.1f}",
            f"{item['useless_starts']:,}",
        ]
        for item in items
    ]
    header = ["startup", "policy", "spares", "GPU-hours", "cold", "mean wait, s", "started for nothing"]
    return f"<h2>What spare workers would have cost</h2>{table(header, cells)}"


def _stats(result: Mapping[str, Any]) -> str:
    stats = result.get("stats")
    if not stats:
        return ""
    return f"<h2>Burst statistics ({escape(stats['estimator'])})</h2>{pairs(in_words(stats))}"


def _facts(result: Mapping[str, Any]) -> str:
    about = {
        **result["trace"],
        **{key: result[key] for key in ("version", "seed", "command", "date") if key in result},
    }
    return f"<h2>Input and settings</h2>{pairs(about)}"
