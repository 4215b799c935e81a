"""One self-contained HTML page of a result: inline SVG, no script, no outside reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from scripts.replay.findings import findings
from scripts.replay.plots import draw_svg
from scripts.replay.tables import HEAD, combination_cells

CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1d2329; background: #fff; margin: 0 auto;
       max-width: 1180px; padding: 1.5rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p.lead { color: #4a545e; margin-top: 0; } ul.findings li { margin: .35rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 12.5px; white-space: nowrap; }
th, td { padding: .3rem .45rem; text-align: right; border-bottom: 1px solid #e3e7ea; font-variant-numeric: tabular-nums; }
th { color: #4a545e; font-weight: 600; border-bottom: 2px solid #b8c0c7; } .left { text-align: left; }
tbody tr:hover { background: #f5f7f8; }
figure { margin: 1.2rem 0 2rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption { color: #4a545e; font-size: 13px; margin-top: .3rem; } dl { display: grid; grid-template-columns: max-content 1fr;
       gap: .15rem 1rem; font-size: 13px; } dt { color: #4a545e; } dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 3rem; color: #4a545e; font-size: 13px; border-top: 1px solid #e3e7ea; padding-top: .8rem; }
"""
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
    for name, (svg, caption) in draw_svg(result).items():
        label = escape(TITLES[name])
        parts.append(
            f'<h2>{label}</h2><figure role="img" aria-label="{escape(caption)}">{svg}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    data = result.get("pictures") or {}
    parts += [
        _cheapest(data.get("cheapest", [])),
        _spares(data.get("spares", [])),
        _stats(result),
        _facts(result),
    ]
    body = "\n".join(part for part in parts if part)
    title = escape(f"Replay of {trace['label']}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style></head><body>\n{body}\n{_footer()}\n</body></html>\n"
    )


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Writes beside the name, then renames: no half page looks whole."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(html_report(result), "utf-8")
    partial.replace(path)


def _lead(result: Mapping[str, Any]) -> str:
    trace = result["trace"]
    span_h = trace["span_s"] / 3600
    span = f"{span_h / 24:.1f} days" if span_h >= 48 else f"{span_h:.1f} hours"
    return escape(
        f"{trace['requests']:,} requests in {trace['pools']} pool(s) over {span}, mean generation "
        f"{trace['duration_mean_s']:.1f} s; {len(result['combinations'])} combinations of startup and policy."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if at < left else ''}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", header)}</tr></thead><tbody>{body}</tbody></table></div>'


def _main_table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = [*HEAD, "USD"] if "cost_usd" in rows[0] else list(HEAD)
    return _table(header, [combination_cells(row) for row in rows])


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
    return f"<h2>Against the first combination ({first})</h2>{_table(header, cells)}"


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
    return f"<h2>Cheapest retention</h2><p>{note}</p>{_table(header, cells)}"


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
    return f"<h2>What spare workers would have cost</h2>{_table(header, cells)}"


def _stats(result: Mapping[str, Any]) -> str:
    stats = result.get("stats")
    if not stats:
        return ""
    return f"<h2>Burst statistics ({escape(stats['estimator'])})</h2>{_pairs(stats)}"


def _facts(result: Mapping[str, Any]) -> str:
    about = {
        **result["trace"],
        **{key: result[key] for key in ("version", "seed", "command", "date") if key in result},
    }
    return f"<h2>Input and settings</h2>{_pairs(about)}"


def _pairs(values: Mapping[str, Any]) -> str:
    cells = "".join(
        f"<dt>{escape(str(key))}</dt><dd>{escape(_plain(value))}</dd>" for key, value in values.items()
    )
    return f"<dl>{cells}</dl>"


def _plain(value: object) -> str:
    if value is None:
        return "undefined"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) or "none"
    return str(value)


def _footer() -> str:
    return (
        "<footer>GPU time of every worker is split without gaps into starting, generating and idle, from its start order to "
        "its release. Cold: served by a worker that had just started. Percentiles by nearest rank on exact data. At equal "
        "times finishes come before arrivals and arrivals before retention timers.</footer>"
    )
