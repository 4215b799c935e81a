"""A timeline as files: JSON that Perfetto opens, and an SVG waterfall for people. Standard library only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from runtime.timeline import HEADLINE, Span, Timeline

_ROW_PX, _LEFT_PX, _PLOT_PX, _RIGHT_PX, _TOP_PX = 22, 190, 860, 230, 64
_WIDTH_PX = _LEFT_PX + _PLOT_PX + _RIGHT_PX
_CHARACTER_PX = 6.8  # of most texts, at the least
_JSON_ONLY = ("groups",)  # hundreds of spans that a picture cannot show
_HALO = 'paint-order="stroke" stroke="#fff" stroke-width="3" stroke-linejoin="round"'  # text stays readable over lines
_COLOURS = ("#3b6fb6", "#2f8f6b", "#b5651d", "#8258a8", "#a33f5e", "#4d7c8a", "#7a7a2a", "#5b5b9e")


def to_perfetto(timeline: Timeline) -> dict[str, object]:
    """Chrome trace-event form (`traceEvents`, microseconds from the origin), plus `headline`, `facts` and when the
    origin was (`origin_unix_ns`)."""
    threads = _thread_names(timeline)
    numbers = {name: number for number, name in enumerate(threads, start=1)}
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": numbers[name], "args": {"name": name}}
        for name in threads
    ]
    events += [
        {
            "name": span.name,
            "ph": "X",
            "pid": 1,
            "tid": numbers[span.thread],
            "ts": (span.start_ns - timeline.origin_ns) / 1e3,
            "dur": (span.end_ns - span.start_ns) / 1e3,
            "args": span.args,
        }
        for span in timeline.spans
    ]
    events += [
        {
            "name": mark.name,
            "ph": "i",
            "s": "p",
            "pid": 1,
            "tid": numbers[mark.thread],
            "ts": (mark.t_ns - timeline.origin_ns) / 1e3,
            "args": mark.args,
        }
        for mark in timeline.marks
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "headline": timeline.headline(),
        "facts": timeline.facts,
        "origin_unix_ns": time.time_ns() - (time.monotonic_ns() - timeline.origin_ns),
    }


def write_json(timeline: Timeline, path: Path) -> None:
    """Write the Perfetto form beside its name and rename it."""
    _write_text(path, json.dumps(to_perfetto(timeline), default=str) + "\n")


def write_svg(timeline: Timeline, path: Path, title: str) -> None:
    """Write the waterfall picture beside its name and rename it."""
    _write_text(path, to_svg(timeline, title))


def to_svg(timeline: Timeline, title: str) -> str:
    """Waterfall: a lane for every thread, a bar for every span, a dashed line for every headline mark."""
    lanes = _lanes(timeline)
    end_ns = max(
        [s.end_ns for s in timeline.spans] + [m.t_ns for m in timeline.marks] + [timeline.origin_ns + 1]
    )
    scale = _PLOT_PX / max(end_ns - timeline.origin_ns, 1)
    marks = [(name, seconds) for name in HEADLINE if (seconds := timeline.seconds(name)) is not None]
    rows = sum(len(rows) for _, rows in lanes)
    body_px = rows * _ROW_PX
    height = _TOP_PX + body_px + 40 + 18 * len(marks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH_PX} {height}" width="{_WIDTH_PX}" height="{height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH_PX}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="16" font-weight="bold" fill="#1c1c1c">{escape(title)}</text>',
    ]
    parts += _axis(end_ns - timeline.origin_ns, body_px)
    parts += _mark_lines(marks, scale, body_px)  # under the bars and their labels
    parts += _bars(lanes, timeline.origin_ns, scale)
    parts.append("</svg>\n")
    return "\n".join(parts)


def spoken(name: str) -> str:
    """A headline name as people read it: `first_dit_entry` → `first DiT entry`."""
    words = {"dit": "DiT", "mp4": "MP4"}
    return " ".join(words.get(word, word) for word in name.split("_"))


def _label(span: Span) -> str:
    """Its name and how long it took; a point in time only has the name."""
    duration_ns = span.end_ns - span.start_ns
    if not duration_ns:
        return span.name
    return f"{span.name}  " + (f"{duration_ns / 1e9:.3f} s" if duration_ns >= 1e6 else "under 1 ms")


def _axis(total_ns: int, body_px: int) -> list[str]:
    step_s = _round_step(total_ns / 1e9)
    parts, tick = [], 0
    while tick * step_s <= total_ns / 1e9:
        x = _LEFT_PX + _PLOT_PX * tick * step_s / (total_ns / 1e9)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP_PX - 6}" x2="{x:.1f}" y2="{_TOP_PX + body_px}" stroke="#e3e3e3"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP_PX - 12}" text-anchor="middle" fill="#555">{tick * step_s:g} s</text>'
        )
        tick += 1
    return parts


def _bars(lanes: Sequence[tuple[str, list[list[Span]]]], origin_ns: int, scale: float) -> list[str]:
    parts, y = [], _TOP_PX
    for index, (thread, rows) in enumerate(lanes):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(
            f'<text x="{_LEFT_PX - 8}" y="{y + 15}" text-anchor="end" fill="#333">{escape(thread)}</text>'
        )
        for row in rows:
            free_from = 0.0
            for span in row:
                x = _LEFT_PX + (span.start_ns - origin_ns) * scale
                w = max((span.end_ns - span.start_ns) * scale, 1.0)
                label = _label(span)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="{w:.1f}" height="{_ROW_PX - 6}" rx="2" fill="{colour}" '
                    f'fill-opacity="0.85"><title>{escape(label)}</title></rect>'
                )
                if w > _CHARACTER_PX * len(label) + 8:
                    parts.append(f'<text x="{x + 4:.1f}" y="{y + 15}" fill="#fff">{escape(label)}</text>')
                elif row[-1] is span and x + w >= free_from:
                    parts.append(_label_beside(label, free_from, x, x + w, y + 15))
                free_from = x + w
            y += _ROW_PX
    return parts


def _label_beside(label: str, free_from: float, left: float, right: float, y: int) -> str:
    """The label of a row's last bar, which ends at `right`: behind it, or before it where only that has room for all of it."""
    room = int((_WIDTH_PX - right - 4) / _CHARACTER_PX)
    if len(label) > room and left - 4 - _CHARACTER_PX * len(label) > max(free_from, _LEFT_PX):
        x, anchor, shown = left - 4, "end", label
    else:
        x, anchor, shown = right + 4, "start", label if len(label) <= room else label[: room - 1] + "…"
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="#333" {_HALO}>{escape(shown)}</text>'


def _mark_lines(marks: Sequence[tuple[str, float]], scale: float, body_px: int) -> list[str]:
    parts = []
    bottom = _TOP_PX + body_px
    for index, (name, seconds) in enumerate(sorted(marks, key=lambda item: item[1])):
        x, y = _LEFT_PX + seconds * 1e9 * scale, bottom + 22 + 18 * index
        anchor, dx = ("end", -5) if x > _LEFT_PX + _PLOT_PX / 2 else ("start", 5)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP_PX}" x2="{x:.1f}" y2="{y - 4}" stroke="#c0392b" stroke-dasharray="3 3"/>'
        )
        parts.append(
            f'<text x="{x + dx:.1f}" y="{y}" text-anchor="{anchor}" fill="#c0392b" {_HALO}>'
            f"{escape(spoken(name))}  {seconds:.3f} s</text>"
        )
    return parts


def _lanes(timeline: Timeline) -> list[tuple[str, list[list[Span]]]]:
    """Threads in order of first work; spans that overlap on a thread go to further rows."""
    lanes: dict[str, list[list[Span]]] = {}
    shown = [span for span in timeline.spans if span.thread not in _JSON_ONLY]
    for span in sorted(shown, key=lambda s: (s.start_ns, -s.end_ns)):
        rows = lanes.setdefault(span.thread, [])
        row = next((row for row in rows if row[-1].end_ns <= span.start_ns), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return list(lanes.items())


def _thread_names(timeline: Timeline) -> list[str]:
    names = [span.thread for span in timeline.spans] + [mark.thread for mark in timeline.marks]
    return list(dict.fromkeys(names))


def _round_step(total_s: float) -> float:
    """Axis step that gives 5 to 12 ticks: 1, 2 or 5 times a power of ten."""
    power = 10.0
    while power > 1e-6:
        for factor in (5, 2, 1):
            if total_s / (power * factor / 10) >= 5:
                return power * factor / 10
        power /= 10
    return 1e-6


def _write_text(path: Path, text: str) -> None:
    """Beside its name, then renamed; two threads may write one timeline at a time."""
    partial = path.with_name(f"{path.name}.{threading.get_ident()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
