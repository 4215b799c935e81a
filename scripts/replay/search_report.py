"""A search as text for the terminal and as one HTML page: the choice, what it was weighed against, lines to paste."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from scripts.replay.page import figure, html_page, pairs, table, trace_lead, write_page
from scripts.replay.tables import main_table
from scripts.replay.tables import table as text_table

FRONTIER_HEAD = ("policy", "cap", "GPU-h", "generating", "cold", "mean wait", "p95", "p99", "max")


def goal_text(found: Mapping[str, Any]) -> str:
    """The objective in words."""
    goal = found["goal"]
    if goal["limit"] is None:
        return f"least overhead with a waiting second priced at {goal['wait_value']:g} GPU-seconds"
    if goal["metric"] == "cold":
        return f"least GPU time with at most {100 * goal['limit']:g} % of requests cold"
    return f"least GPU time with a {goal['metric']} wait of at most {goal['limit']:g} s"


def search_text(found: Mapping[str, Any]) -> str:
    """For a terminal."""
    chosen = found["chosen"]
    head = (
        f"Chosen for {goal_text(found)}:"
        if chosen
        else f"No setting meets the goal ({goal_text(found)}). Nearest:"
    )
    parts = [head, main_table([chosen or found["nearest"]]), *_cap_line(chosen or found["nearest"])]
    parts += [
        "",
        f"Frontier of {found['tried']} settings (waits in s):",
        text_table(FRONTIER_HEAD, _frontier_cells(found)),
    ]
    parts += ["", *_judgements(found)]
    for name, lines in found.get("console", {}).items():
        parts += ["", f"{name}:", *(f"  {line}" for line in lines)]
    return "\n".join([*parts, *(f"note: {note}" for note in found["notes"])])


def write_search_report(found: Mapping[str, Any], path: Path) -> None:
    """The page. Raises: CapabilityError: matplotlib is missing."""
    write_page(search_html(found), path)


def search_html(found: Mapping[str, Any]) -> str:
    """The page as text. Raises: CapabilityError: matplotlib is missing."""
    from scripts.replay.plots import search_svg

    trace, chosen = found["trace"], found["chosen"]
    shown = chosen or found["nearest"]
    verdict = "Chosen setting" if chosen else "No setting meets the goal; the nearest"
    items = "".join(f"<li>{escape(line)}</li>" for line in _judgements(found))
    parts = [
        f"<h1>Cheapest way to keep idle GPUs: {escape(str(trace['label']))}</h1>",
        f'<p class="lead">{escape(trace_lead(trace))}; startup {escape(found["startup"])}; {escape(goal_text(found))}.</p>',
        f"<h2>{verdict}</h2>",
        pairs(_setting(shown)),
        f'<ul class="findings">{items}</ul>' if items else "",
        *_console(found.get("console", {})),
        figure("What was weighed", *search_svg(found)),
        f"<h2>Frontier of {found['tried']} settings</h2>",
        table(FRONTIER_HEAD, _frontier_cells(found), left=1),
        "".join(f"<p>{escape(note)}</p>" for note in found["notes"]),
        f"<h2>Input</h2>{pairs(trace)}",
    ]
    return html_page(f"Search on {trace['label']}", parts)


def _console(lines: Mapping[str, Sequence[str]]) -> Iterable[str]:
    for name, text in lines.items():
        yield f"<h2>For {escape(name)}</h2><pre>{escape(chr(10).join(text))}</pre>"


def _setting(row: Mapping[str, Any]) -> dict[str, Any]:
    wait, cap = row["wait_s"], row["options"].get("max_workers")
    return {
        "policy": row["policy"],
        "most workers at once": cap if cap else f"no cap; {row['peak_workers']} were used",
        "GPU-hours": f"{row['gpu_hours']:,.1f}",
        **({"cost": f"{row['cost_usd']:,.2f} USD"} if "cost_usd" in row else {}),
        "generating, starting, idle": ", ".join(
            f"{100 * row['share'][kind]:.1f} %" for kind in ("generating", "starting", "idle")
        ),
        "cold requests": f"{100 * row['cold_fraction']:.1f} %",
        "wait mean, p50, p90, p95, p99, max": ", ".join(
            f"{wait[name]:.1f} s" for name in ("mean", "p50", "p90", "p95", "p99", "max")
        ),
        "workers started for nothing": f"{row['useless_starts']:,}",
    }


def _cap_line(row: Mapping[str, Any]) -> list[str]:
    cap = row["options"].get("max_workers")
    return [f"(at most {cap} workers at once)"] if cap else []


def _frontier_cells(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            point["policy"],
            str(point["max_workers"] or "–"),
            f"{point['gpu_hours']:,.1f}",
            f"{100 * point['share']:.1f} %",
            f"{100 * point['cold_fraction']:.1f} %",
            *(f"{point[f'wait_{name}_s']:.1f}" for name in ("mean", "p95", "p99", "max")),
        ]
        for point in found["frontier"]
    ]


def _judgements(found: Mapping[str, Any]) -> list[str]:
    """How sure the choice is, and what a retention costs in hindsight, as sentences."""
    lines, price = [], f"a waiting second at {found['goal']['wait_value']:g} GPU-seconds"
    if sure := found.get("confidence"):
        metric = found["goal"]["metric"]
        hours, figures = sure["gpu_hours_90"], sure[f"{metric}_90"]
        waits = " … ".join(
            f"{100 * value:.1f} %" if metric == "cold" else f"{value:.1f} s" for value in figures
        )
        lines.append(
            f"90 % interval from a bootstrap over {sure['blocks']}: {hours[0]:,.1f} … {hours[1]:,.1f} GPU-hours, "
            f"{metric} {'requests' if metric == 'cold' else 'wait'} {waits}."
        )
    best = found["estimate"]
    lines.append(
        f"Retention alone, with {price} (level curve, hindsight): cheapest {best['retention_s']:.3g} s at "
        f"{best['cost_s']:.1f} GPU-seconds per request; twice the startup {best['cost_at_twice_s']:.1f}, "
        f"none {best['cost_at_zero_s']:.1f}, with foresight {best['cost_clairvoyant_s']:.1f}."
    )
    if held := found.get("held_out"):
        lines.append(
            f"Held out: the retention that was cheapest on every other block ({held['retention_s']:.3g} s) costs "
            f"{held['cost_s']:.1f} on the rest; the best there is {held['best_possible_s']:.1f}, "
            f"twice the startup {held['cost_at_twice_s']:.1f}."
        )
    return lines
