"""Cold-start study: samples of first calls → one CSV row each, P50 and P90 per mark and configuration, a plot as SVG.

`python -m runtime.platforms.study --count 5 --regions us-east,eu-west --gpus H200,B200` asks the deployed app. Standard
library only, and modal inside one function: it runs on the laptop that starts the study.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUND_TRIP = "round_trip"


@dataclass(frozen=True)
class Sample:
    """One first call. `marks` are seconds from the worker's first instruction, plus the round trip on the caller's clock,
    which also holds placement, image and queue."""

    region: str
    gpu: str
    marks: Mapping[str, float] = field(default_factory=dict)
    is_cold: bool = True
    error: str = ""

    @classmethod
    def of(cls, region: str, gpu: str, sent_s: float, received_s: float, answer: Mapping[str, Any]) -> Sample:
        """Sample of an answer of `GpuRuntime.run`. A container that had served before is not cold."""
        if error := answer.get("error"):
            return cls(region, gpu, error=str(error.get("message")), is_cold=False)
        start = answer.get("start") or {}
        marks = {name: float(value) for name, value in (start.get("headline") or {}).items()}
        marks[ROUND_TRIP] = received_s - sent_s
        return cls(region, gpu, marks, is_cold="start" in answer)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between closest ranks (numpy's default). Raises: ValueError: no values."""
    if not values:
        raise ValueError("no values")
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(sorted(values), n=1000, method="inclusive")[round(1000 * share) - 1]


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Rows `{region, gpu, mark, count, p50_s, p90_s}` of the cold samples, marks in order of their median."""
    rows = []
    groups = dict.fromkeys((sample.region, sample.gpu) for sample in samples)
    for region, gpu in groups:
        cold = [
            sample for sample in samples if (sample.region, sample.gpu) == (region, gpu) and sample.is_cold
        ]
        names = dict.fromkeys(name for sample in cold for name in sample.marks)
        values = {name: [sample.marks[name] for sample in cold if name in sample.marks] for name in names}
        for name in sorted(values, key=lambda name: percentile(values[name], 0.5)):
            p50, p90 = percentile(values[name], 0.5), percentile(values[name], 0.9)
            rows.append(
                {
                    "region": region,
                    "gpu": gpu,
                    "mark": name,
                    "count": len(values[name]),
                    "p50_s": p50,
                    "p90_s": p90,
                }
            )
    return rows


def write_study(samples: Sequence[Sample], stem: Path) -> str:
    """Write `<stem>.csv` (one row per sample and mark), `<stem>.svg`; returns the table as text."""
    with stem.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sample", "region", "gpu", "cold", "mark", "seconds", "error"])
        for number, sample in enumerate(samples):
            for name, value in sample.marks.items() or [("", 0.0)]:
                writer.writerow(
                    [
                        number,
                        sample.region,
                        sample.gpu,
                        int(sample.is_cold),
                        name,
                        f"{value:.4f}",
                        sample.error,
                    ]
                )
    rows = summary(samples)
    stem.with_suffix(".svg").write_text(plot(rows))
    lines = [f"{'region':<16}{'gpu':<10}{'mark':<24}{'n':>4}{'P50 s':>10}{'P90 s':>10}"]
    lines += [
        f"{row['region']:<16}{row['gpu']:<10}{row['mark']:<24}{row['count']:>4}{row['p50_s']:>10.2f}{row['p90_s']:>10.2f}"
        for row in rows
    ]
    warm = sum(not sample.is_cold for sample in samples)
    if warm:
        lines.append(
            f"{warm} of {len(samples)} calls failed or found a container that was already there: left out"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Horizontal bars: P50 full, P90 outlined, one row per configuration and mark."""
    width, left, row_px = 900, 330, 22
    height = 40 + row_px * len(rows)
    longest = max((float(row["p90_s"]) for row in rows), default=1.0) or 1.0
    scale = (width - left - 90) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    ]
    parts.append("<title>Cold starts: P50 (filled) and P90 (outline), seconds</title>")
    for index, row in enumerate(rows):
        y = 24 + index * row_px
        label = _escape(f"{row['region']} {row['gpu']} {row['mark'].replace('_', ' ')}")
        p50, p90 = scale * row["p50_s"], scale * row["p90_s"]
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{p90:.1f}" height="15" fill="none" stroke="#0b6e99"/>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{p50:.1f}" height="15" fill="#0b6e99" fill-opacity="0.5"/>'
        )
        parts.append(
            f'<text x="{left + p90 + 6:.1f}" y="{y + 12}">{row["p50_s"]:.2f} / {row["p90_s"]:.2f} s</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


Ask = Callable[[str, str], Mapping[str, Any]]


def collect(
    ask: Ask, configurations: Sequence[tuple[str, str]], count: int, pause: Callable[[], None]
) -> list[Sample]:
    """`count` samples of every (region, gpu), in turns, so that a bad minute of a region does not fall on one of them.

    Args:
        ask: makes one first call and returns its answer. pause: called before every turn but the first.
    """
    samples = []
    for turn in range(count):
        if turn:
            pause()
        for region, gpu in configurations:
            sent = time.time()
            answer = ask(region, gpu)
            samples.append(Sample.of(region, gpu, sent, time.time(), answer))
    return samples


def main(argv: Sequence[str]) -> int:
    """Run a study against the deployed Modal app. Its workers must be scaled to zero."""
    parser = argparse.ArgumentParser(prog="python -m runtime.platforms.study", description=main.__doc__)
    parser.add_argument("--app", default="coldframe", help="name of the deployed app")
    parser.add_argument("--count", type=int, default=5, help="cold containers per configuration")
    parser.add_argument("--regions", required=True, help="comma separated")
    parser.add_argument("--gpus", required=True, help="comma separated, exact types")
    parser.add_argument("--prompt", default="A quiet harbor at dawn.")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--pause-s", type=float, default=60.0, help="between turns: containers must be gone by then"
    )
    parser.add_argument("--out", type=Path, default=Path("cold_starts"), help="stem of the .csv and .svg")
    args = parser.parse_args(argv)
    configurations = [(region, gpu) for region in args.regions.split(",") for gpu in args.gpus.split(",")]
    samples = collect(_modal_ask(args), configurations, args.count, lambda: time.sleep(args.pause_s))
    sys.stdout.write(write_study(samples, args.out) + "\n")
    return 0


def _modal_ask(args: argparse.Namespace) -> Ask:
    import modal  # type: ignore[import-not-found, unused-ignore]

    from runtime.platforms.shell import local_job

    deployed = modal.Cls.from_name(args.app, "Worker")

    def ask(region: str, gpu: str) -> Mapping[str, Any]:
        pool = deployed.with_options(region=region, gpu=gpu, max_containers=1, scaledown_window=2)()
        answer: Mapping[str, Any] = pool.generate.remote(local_job(args.prompt, seconds=args.seconds, seed=0))
        return answer

    return ask


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
