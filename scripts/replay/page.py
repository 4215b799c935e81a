"""The frame of a report page and its parts: style, tables, pairs, figures. One file, no script, no outside reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

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
pre { background: #f5f7f8; border: 1px solid #e3e7ea; border-radius: 6px; padding: .7rem .9rem; overflow-x: auto; font-size: 13px; }
footer { margin-top: 3rem; color: #4a545e; font-size: 13px; border-top: 1px solid #e3e7ea; padding-top: .8rem; }
"""


def html_page(title: str, parts: Sequence[str]) -> str:
    """A whole page; empty parts are left out."""
    body = "\n".join(part for part in parts if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style></head><body>\n{body}\n{_footer()}\n</body></html>\n"
    )


def write_page(text: str, path: Path) -> None:
    """Writes beside the name, then renames: no half page looks whole."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def trace_lead(trace: Mapping[str, Any]) -> str:
    """The trace in one line."""
    span_h = trace["span_s"] / 3600
    span = f"{span_h / 24:.1f} days" if span_h >= 48 else f"{span_h:.1f} hours"
    where = "one pool" if trace["pools"] == 1 else f"{trace['pools']:,} pools"
    mean = trace["duration_mean_s"]
    return f"{trace['requests']:,} requests in {where} over {span}, mean generation {mean:.1f} s"


def figure(title: str, svg: str, caption: str) -> str:
    """A picture under its heading."""
    return (
        f'<h2>{escape(title)}</h2><figure role="img" aria-label="{escape(caption)}">{svg}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if at < left else ''}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", header)}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs(values: Mapping[str, Any]) -> str:
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
