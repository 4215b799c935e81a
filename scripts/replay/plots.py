"""Six pictures of a result, drawn with matplotlib to PNG or to SVG text for the report.

Colours are told apart in grey: generating dark, starting middle with hatching, idle light.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.replay.optional import require

GENERATING, STARTING, IDLE, LOST = "#16425b", "#e07a3f", "#bccad1", "#7a1f3d"
COLOURS = {"generating": GENERATING, "starting": STARTING, "idle": IDLE, "lost": LOST}
LINES = ("#16425b", "#e07a3f", "#4c9f70", "#8d5a97", "#8a8a8a", "#b03a2e")
MARKERS = "osD^vP"
MAX_POINTS = 900
STYLE = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
}


def pictures(result: Mapping[str, Any]) -> dict[str, tuple[Callable[[], Any], str]]:
    """Name → (drawing function returning a Figure, caption). Pictures without data are left out."""
    rows, data = result["combinations"], result.get("pictures") or {}
    label = result["trace"]["label"]
    found: dict[str, tuple[Callable[[], Any], str]] = {}
    first = [row for row in _first_policy(rows) if row.get("timeline")]
    if first:
        found["workers"] = (lambda: _workers(first), _caption("Workers over time on", label, first))
    found["shares"] = (lambda: _shares(rows), _caption("Where GPU time goes on", label, rows))
    if data.get("frontier"):
        found["frontier"] = (
            lambda: _frontier(data["frontier"], rows),
            f"GPU-hours against waiting on {label}; each curve is one startup S with retention R from 0 to 16·S; "
            f"squares mark R = 2·S, stars the cheapest point if a waiting second costs one GPU-second.",
        )
    if data.get("waits"):
        found["waits"] = (
            lambda: _waits(data["waits"]),
            _caption("Waiting times on", label, _first_policy(rows)),
        )
    if data.get("bursts", {}).get("ratios"):
        found["bursts"] = (
            lambda: _bursts(data["bursts"]),
            f"Bursts of {label}: requests per minute over the mean of their clock hour, six hours around the largest "
            f"burst; crossings of twice the mean are marked (busy hours only). Right: peaks of all bursts.",
        )
    zooms = [item for item in data.get("zooms", []) if item["zoom"]]
    if zooms:
        found["zoom"] = (
            lambda: _zoom(zooms),
            f"Ten minutes around the largest burst of {label}, one line per worker (an even sample "
            f"of {max(item['zoom']['shown'] for item in zooms)} at most), policy {zooms[0]['policy']}; ticks on top are arrivals.",
        )
    return found


def draw_png(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """One PNG per picture; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib = require("matplotlib", "plots")
    paths = []
    for name, (draw, caption) in pictures(result).items():
        with matplotlib.rc_context(STYLE):
            figure = draw()
            figure.text(0.01, -0.02, _wrap(caption, 130), fontsize=8, color="#444444", va="top")
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15)
        paths.append(path)
    return paths


def draw_svg(result: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name → (inline SVG, caption); no document type, no outside reference."""
    return {name: (_inline(name, draw), caption) for name, (draw, caption) in pictures(result).items()}


def search_svg(found: Mapping[str, Any]) -> tuple[str, str]:
    """Inline SVG of a search, and its caption."""
    goal = found["goal"]
    caption = (
        f"Every setting tried on {found['trace']['label']} with startup {found['startup']}: GPU-hours against "
        f"{'the share of cold requests' if goal['metric'] == 'cold' else goal['metric'] + ' wait'}. The line joins settings that no other beats in both; the star is the "
        f"{'chosen' if found['chosen'] else 'nearest'} one"
        + ("." if goal["limit"] is None else ", the dashed line the limit.")
    )
    return _inline("search", lambda: _search(found)), caption


def _inline(name: str, draw: Callable[[], Any]) -> str:
    matplotlib = require("matplotlib", "plots")
    # A salt per picture keeps the ids of several pictures in one page apart.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        buffer = io.StringIO()
        draw().savefig(
            buffer,
            format="svg",
            bbox_inches="tight",
            pad_inches=0.1,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    text = buffer.getvalue()
    return _renamed(text[text.index("<svg") :], name)


def _metric_name(metric: str) -> str:
    return "cold requests, %" if metric == "cold" else f"{metric} wait, s"


def _search(found: Mapping[str, Any]) -> Any:
    """All settings as dots, the frontier as a line, the choice as a star, the limit dashed."""
    goal, metric = found["goal"], found["goal"]["metric"]
    key, scale = ("cold_fraction", 100.0) if metric == "cold" else (f"wait_{metric}_s", 1.0)
    figure = _figure(10, 4.2)
    axis = figure.subplots()
    best = found["chosen"] or found["nearest"]
    at = best["cold_fraction"] if metric == "cold" else best["wait_s"][metric]
    axis.plot(
        [scale * point[key] for point in found["points"]], [point["gpu_hours"] for point in found["points"]],
        "o", ms=5, clip_on=False, mfc=IDLE, mec="white", mew=0.5, label="tried",
    )  # fmt: skip
    axis.plot(
        [scale * point[key] for point in found["frontier"]], [point["gpu_hours"] for point in found["frontier"]],
        "-o", ms=5, clip_on=False, color=GENERATING, lw=1.3, label="frontier",
    )  # fmt: skip
    axis.plot(
        scale * at, best["gpu_hours"], "*", ms=16, clip_on=False, zorder=5, color=STARTING, mec="white", mew=0.8,
        label="chosen" if found["chosen"] else "nearest",
    )  # fmt: skip
    if goal["limit"] is not None:
        axis.axvline(scale * goal["limit"], color=LOST, ls="--", lw=1.2, label="limit")
    axis.set_xlabel(_metric_name(metric))
    axis.set_ylabel("GPU-hours")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper right")
    return figure


def _renamed(svg: str, name: str) -> str:
    """Ids prefixed by the picture's name: `figure_1` and `axes_1` occur in every picture."""
    for old, new in (('id="', f'id="{name}-'), ('href="#', f'href="#{name}-'), ("url(#", f"url(#{name}-")):
        svg = svg.replace(old, new)
    return svg


def _figure(width: float, height: float) -> Any:
    return require("matplotlib.figure", "plots").Figure(figsize=(width, height), layout="constrained")


def _first_policy(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first combination of each startup."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault(row["startup"], row)
    return list(found.values())


def _caption(title: str, label: str, rows: Sequence[Mapping[str, Any]]) -> str:
    policies = ", ".join(dict.fromkeys(row["policy"] for row in rows))
    startups = ", ".join(dict.fromkeys(f"{_startup(row['startup'])}" for row in rows))
    retentions = ", ".join(dict.fromkeys(_retention(row) for row in rows))
    mode = rows[0]["options"].get("binding", "bound")
    dispatch = rows[0]["options"].get("dispatch", "newest-idle")
    return f"{title} {label}; policy {policies}; startup S = {startups}; R = {retentions}; {mode} requests, {dispatch}."


def _startup(text: str) -> str:
    return f"{text} s" if text.replace(".", "", 1).isdigit() else text


def _retention(row: Mapping[str, Any]) -> str:
    value = row["retention_s"]
    return "adaptive" if value is None else f"{value:g} s" if isinstance(value, (int, float)) else str(value)


def _wrap(text: str, width: int) -> str:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def _coarse(values: Sequence[float], step: int) -> Any:
    """Means of `step` neighbouring bins; the last incomplete group is dropped."""
    array = np.asarray(values, dtype=np.float64)
    return array[: len(array) // step * step].reshape(-1, step).mean(axis=1)


def _workers(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Arrivals on top, stacked workers of each startup below, one time axis, one worker axis."""
    figure = _figure(10, 1.6 + 1.9 * len(rows))
    axes = figure.subplots(
        len(rows) + 1, 1, sharex=True, squeeze=False, height_ratios=[1] + [1.6] * len(rows)
    )[:, 0]
    length = max(len(row["timeline"]["arrivals"]) for row in rows)
    width = rows[0]["timeline"]["bin_s"]
    step = max(1, math.ceil(length / MAX_POINTS))
    unit_s, unit = _time_unit(length * width)
    arrivals = _coarse(rows[0]["timeline"]["arrivals"], step) * 60 / width
    axes[0].fill_between(
        np.arange(len(arrivals)) * step * width / unit_s, arrivals, step="post", color="#555555", lw=0
    )
    axes[0].set_ylabel("requests/min")
    axes[0].set_title(f"Arrivals (means of {step * width / 60:g} min)")
    top = 0.0
    for axis, row in zip(axes[1:], rows, strict=True):
        line = row["timeline"]
        stack = [_coarse(line[kind], step) / width for kind in ("generating", "starting", "idle")]
        x = np.arange(len(stack[0])) * step * width / unit_s
        lower = np.zeros(len(x))
        for kind, layer in zip(("generating", "starting", "idle"), stack, strict=True):
            axis.fill_between(x, lower, lower + layer, step="post", color=COLOURS[kind], lw=0, label=kind)
            lower = lower + layer
        top = max(top, float(lower.max()))
        share = row["share"]
        axis.set_title(
            f"S = {_startup(row['startup'])}, {row['policy']}: generating {share['generating']:.1%}, "
            f"starting {share['starting']:.1%}, idle {share['idle']:.1%}"
        )
        axis.set_ylabel("workers")
    for axis in axes[1:]:
        axis.set_ylim(0, top * 1.05)
    axes[-1].set_xlabel(unit)
    axes[-1].set_xlim(0, length * width / unit_s)
    handles, names = axes[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=3)
    return figure


def _time_unit(span_s: float) -> tuple[float, str]:
    if span_s > 3 * 86400:
        return 86400.0, "days"
    return (3600.0, "hours") if span_s > 3 * 3600 else (60.0, "minutes")


def _shares(rows: Sequence[Mapping[str, Any]]) -> Any:
    """One horizontal bar per combination; GPU-hours at its end."""
    figure = _figure(10, 1.0 + 0.42 * len(rows))
    axis = figure.subplots()
    y = np.arange(len(rows))[::-1]
    left = np.zeros(len(rows))
    for kind in ("generating", "starting", "idle", "lost"):
        values = np.array([100 * row["share"][kind] for row in rows])
        if kind == "lost" and not values.any():
            continue
        hatch = "////" if kind == "starting" else None
        axis.barh(
            y,
            values,
            left=left,
            color=COLOURS[kind],
            label=kind,
            hatch=hatch,
            edgecolor="white",
            lw=0.5,
            height=0.72,
        )
        for place, (value, start) in enumerate(zip(values, left, strict=True)):
            if value >= 5:
                back = (
                    {"facecolor": STARTING, "edgecolor": "none", "pad": 1.0} if kind == "starting" else None
                )
                colour = "white" if kind == "generating" else "black"
                axis.text(
                    start + value / 2,
                    y[place],
                    f"{value:.1f}",
                    ha="center",
                    va="center",
                    color=colour,
                    bbox=back,
                )
        left = left + values
    for row, at in zip(rows, y, strict=True):
        axis.text(101, at, f"{row['gpu_hours']:,.0f} GPU-h", va="center", fontsize=9)
    axis.set_yticks(y, [f"S = {_startup(row['startup'])}\n{row['policy']}" for row in rows])
    axis.set_xlim(0, 112)
    axis.set_xticks(range(0, 101, 20))
    axis.set_xlabel("share of allocated GPU time, %")
    axis.grid(axis="y", visible=False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return figure


def _frontier(curves: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Any:
    """GPU-hours against p95 and mean wait, one curve per startup."""
    figure = _figure(10, 4.2)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key, name in ((axes[0], "wait_p95_s", "p95 wait, s"), (axes[1], "wait_mean_s", "mean wait, s")):
        for index, curve in enumerate(curves):
            points = curve["points"]
            colour = LINES[index % len(LINES)]
            x, y = [point[key] for point in points], [point["gpu_hours"] for point in points]
            label = f"S = {_startup(curve['startup'])}"
            axis.plot(x, y, "-", color=colour, marker=MARKERS[index % 6], ms=3.5, lw=1.3, label=label)
            twice = next(point for point in points if point["multiple"] == 2)
            axis.plot(twice[key], twice["gpu_hours"], "s", ms=9, mfc="none", mec=colour, mew=1.6)
            best = min(
                points, key=lambda point: point["gpu_hours"] + point["wait_mean_s"] * rows[0]["served"] / 3600
            )
            axis.plot(best[key], best["gpu_hours"], "*", ms=13, color=colour, mec="white", mew=0.6)
            if axis is axes[1]:
                for point in (points[0], points[-1]):
                    axis.annotate(
                        f"{point['multiple']:g}·S",
                        (point[key], point["gpu_hours"]),
                        fontsize=8,
                        color=colour,
                        xytext=(5, 3),
                        textcoords="offset points",
                    )
        axis.set_xlabel(name)
        axis.set_xlim(left=0)
    axes[0].set_ylabel("GPU-hours")
    axes[0].set_ylim(bottom=0)
    axes[1].plot([], [], "s", ms=9, mfc="none", mec="#555555", mew=1.6, label="R = 2·S")
    axes[1].plot([], [], "*", ms=12, color="#555555", mec="white", mew=0.6, label="cheapest with waiting")
    axes[1].legend(loc="upper right")
    return figure


def _waits(items: Sequence[Mapping[str, Any]]) -> Any:
    """Histogram of positive waits on a logarithmic axis for each startup; cold requests shaded."""
    figure = _figure(10, 0.9 + 1.6 * len(items))
    axes = figure.subplots(len(items), 1, sharex=True, squeeze=False)[:, 0]
    edges = [edge for item in items for edge in item["edges"]]
    for axis, item in zip(axes, items, strict=True):
        total = item["none"] + sum(item["cold"]) + sum(item["queued"])
        if item["edges"]:
            left, widths = np.array(item["edges"][:-1]), np.diff(item["edges"])
            cold, queued = 100 * np.array(item["cold"]) / total, 100 * np.array(item["queued"]) / total
            axis.bar(
                left,
                cold,
                widths,
                align="edge",
                color=STARTING,
                hatch="////",
                edgecolor="white",
                lw=0.3,
                label="waited for a start",
            )
            if queued.any():
                axis.bar(
                    left,
                    queued,
                    widths,
                    bottom=cold,
                    align="edge",
                    color=GENERATING,
                    label="waited for a busy worker",
                )
            axis.set_xscale("log")
        axis.set_title(
            f"S = {_startup(item['startup'])}: {item['none'] / total:.1%} of requests did not wait"
        )
        axis.set_ylabel("% of requests")
    if edges:
        axes[-1].set_xlim(min(edges), max(edges))
    axes[-1].set_xlabel("wait, s (logarithmic)")
    axes[-1].xaxis.set_major_formatter(require("matplotlib.ticker", "plots").FormatStrFormatter("%g"))
    handles = {
        name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=2)
    return figure


def _bursts(data: Mapping[str, Any]) -> Any:
    """Minute rate over the hourly mean with crossings, and the peaks' histogram."""
    figure = _figure(10, 3.4)
    axes = figure.subplots(1, 2, width_ratios=[2.4, 1])
    ratios = np.array(data["ratios"])
    x = data["from_hour"] + np.arange(len(ratios)) / 60
    axes[0].step(x, ratios, where="post", color=GENERATING, lw=0.9)
    axes[0].axhline(data["limit"], color=STARTING, lw=1, ls="--")
    for hour, is_busy in enumerate(data["busy"]):
        if not is_busy:
            left = data["from_hour"] + hour
            label = "" if False in data["busy"][:hour] else "hour below the mean: not counted"
            axes[0].axvspan(left, left + 1, color="#eceff1", lw=0, zorder=0, label=label)
    at = np.array(data["crossings"], dtype=int)
    axes[0].plot(x[at], ratios[at], "v", color=STARTING, ms=6, mec="white", label="crossing of 2")
    axes[0].set_xlabel("hour of the trace")
    axes[0].set_ylabel("minute rate / hourly mean")
    axes[0].set_ylim(0, float(ratios.max()) * 1.2)
    axes[0].legend(loc="upper left", ncols=2)
    peaks = np.array(data["peaks"])
    if peaks.size:
        top = max(float(np.quantile(peaks, 0.99)), 4.5)
        axes[1].hist(
            np.minimum(peaks, top),
            bins=np.arange(2, top + 0.5, 0.25),
            color=GENERATING,
            edgecolor="white",
            lw=0.4,
        )
        axes[1].axvline(float(np.median(peaks)), color=STARTING, lw=1.5)
        axes[1].set_title(
            f"{peaks.size} bursts, median {np.median(peaks):.2f},\n{(peaks >= 4).mean():.0%} reach 4"
        )
    axes[1].set_xlabel("peak / hourly mean")
    axes[1].set_ylabel("bursts")
    return figure


def _zoom(items: Sequence[Mapping[str, Any]]) -> Any:
    """One panel per startup, one line per worker, in order of their start."""
    collections = require("matplotlib.collections", "plots")
    heights = [max(1.6, 0.055 * item["zoom"]["shown"]) for item in items]
    figure = _figure(10, 0.8 + sum(heights))
    axes = figure.subplots(len(items), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, item in zip(axes, items, strict=True):
        zoom = item["zoom"]
        for kind in ("idle", "starting", "generating", "lost"):
            spans = [span for span in zoom["spans"] if span[1] == kind]
            if spans:
                # One collection: a rectangle object per span is slow to draw.
                corners = [
                    ((begin, row + 0.1), (end, row + 0.1), (end, row + 0.9), (begin, row + 0.9))
                    for row, _, begin, end in spans
                ]
                axis.add_collection(collections.PolyCollection(corners, fc=COLOURS[kind], lw=0, label=kind))
        axis.plot(
            zoom["arrivals"],
            np.full(len(zoom["arrivals"]), zoom["shown"] + 1.5),
            "|",
            color="#222222",
            ms=6,
            mew=0.7,
        )
        more = "" if zoom["workers"] == zoom["shown"] else f", {zoom['shown']} of them shown"
        axis.set_title(
            f"S = {_startup(item['startup'])}: {zoom['workers']} workers{more}, {len(zoom['arrivals'])} arrivals"
        )
        axis.set_ylim(0, zoom["shown"] + 3)
        axis.set_ylabel("worker")
        axis.grid(axis="y", visible=False)
    axes[-1].set_xlim(0, items[0]["zoom"]["length_s"])
    axes[-1].set_xlabel(f"seconds from {items[0]['zoom']['begin_s'] / 3600:.2f} h")
    handles = {
        name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=4)
    return figure
