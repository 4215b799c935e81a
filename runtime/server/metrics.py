"""Counters, gauges and histograms in Prometheus text form. Labels come from small sets.

Shapes are the only ones that clients choose: the first `MAX_SHAPES` keep their names, later ones are `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.server.jobs import Job

MAX_SHAPES = 32
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TYPES: Mapping[str, tuple[str, str]] = {
    "h3_requests_total": ("counter", "HTTP requests by route and status"),
    "h3_errors_total": ("counter", "HTTP errors by code"),
    "h3_jobs_total": ("counter", "Jobs that ended, by outcome"),
    "h3_jobs_queued": ("gauge", "Jobs waiting for the worker"),
    "h3_jobs_running": ("gauge", "Jobs on the worker"),
    "h3_job_duration_seconds": ("histogram", "Creation to end of completed jobs, by task and shape"),
    "h3_queue_wait_seconds": ("histogram", "Creation to hand-over to the worker"),
    "h3_stage_duration_seconds": ("histogram", "Time in each phase of completed jobs"),
    "h3_denoise_step_seconds": ("histogram", "Mean time of a denoising step of completed jobs"),
    "h3_request_duration_seconds": ("histogram", "HTTP handling time by route, streams and waits excluded"),
    "h3_cold_start_seconds": (
        "gauge",
        "Marks of the last start of the worker, seconds from its first instruction; of a request only if the start had one",
    ),
    "h3_first_dit_forward_seconds": ("gauge", "First entry of the DiT in the last start that had a request"),
    "h3_worker_starts_total": ("counter", "Workers started"),
    "h3_worker_exits_total": ("counter", "Workers ended, by exit code"),
    "h3_checksum_failures_total": ("counter", "Workers that refused a damaged prepared directory"),
    "h3_worker_ready": ("gauge", "1 when the prepared plan can run without waiting"),
    "h3_weights_read_bytes_total": ("counter", "Weights brought in by all starts, by component"),
    "h3_weights_read_seconds": ("gauge", "First to last byte of a component in the last start"),
    "h3_weights_loaded_bytes": ("gauge", "Weights in place"),
    "h3_weights_total_bytes": ("gauge", "Weights that a start brings in"),
    "h3_gpu_memory_bytes": ("gauge", "Device memory as reported with the last result"),
    "h3_output_bytes_total": ("counter", "Bytes of finished files"),
    "h3_output_video_seconds_total": ("counter", "Seconds of finished video"),
    "h3_server_ready_seconds": ("gauge", "Process start to listening socket"),
    "h3_build_info": ("gauge", "1, with the version and the prepared directory as labels"),
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        index = next((i for i, bound in enumerate(BUCKETS) if value <= bound), len(BUCKETS))
        self.counts[index] += 1
        self.total += value


class Metrics:
    """Registry of the names in `TYPES`; using another name is a programming error (KeyError)."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {
            name: {} for name, (kind, _) in TYPES.items() if kind != "histogram"
        }
        self._shapes: set[str] = set()
        self._histograms: dict[str, dict[Labels, _Histogram]] = {
            name: {} for name, (kind, _) in TYPES.items() if kind == "histogram"
        }

    def _shape(self, job: Job) -> str:
        video = job.video
        shape = f"{video.get('width')}x{video.get('height')}x{video.get('num_frames')}"
        if len(self._shapes) < MAX_SHAPES:
            self._shapes.add(shape)
        return shape if shape in self._shapes else "other"

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        series, key = self._values[name], tuple(sorted(labels.items()))
        series[key] = series.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        self._values[name][tuple(sorted(labels.items()))] = value

    def replace(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """All samples of a gauge at once, by the value of its only label; earlier ones are gone."""
        self._values[name] = {((label, text),): value for text, value in values.items()}

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._histograms[name].setdefault(tuple(sorted(labels.items())), _Histogram()).observe(
            max(0.0, value)
        )

    def job_ended(self, job: Job, outcome: str) -> None:
        """Everything that is counted when a job ends."""
        self.count("h3_jobs_total", outcome=outcome)
        if outcome != "completed" or job.completed_at is None:
            return
        self.observe(
            "h3_job_duration_seconds",
            job.completed_at - job.created_at,
            task=str(job.video.get("task", "unknown")),
            shape=self._shape(job),
        )
        for phase, seconds in job.timings.items():
            self.observe("h3_stage_duration_seconds", seconds, stage=phase)
        if job.steps and "denoise" in job.timings:
            self.observe("h3_denoise_step_seconds", job.timings["denoise"] / job.steps)
        self.count("h3_output_bytes_total", float(job.result.get("bytes", 0)))
        self.count("h3_output_video_seconds_total", int(job.video.get("num_frames") or 0) / 24)
        peak = job.result.get("peak_memory_mb")
        if isinstance(peak, int | float):
            self.set("h3_gpu_memory_bytes", float(peak) * 1e6, kind="peak")

    def render(self) -> str:
        """The exposition: HELP and TYPE for every name, also for those without a sample yet."""
        lines: list[str] = []
        for name, (kind, text) in TYPES.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            if kind == "histogram":
                for labels, histogram in sorted(self._histograms[name].items()):
                    lines += _histogram_lines(name, labels, histogram)
            else:
                lines += [
                    f"{name}{_braces(labels)} {value:.10g}"
                    for labels, value in sorted(self._values[name].items())
                ]
        return "\n".join(lines) + "\n"


def _histogram_lines(name: str, labels: Labels, histogram: _Histogram) -> Iterable[str]:
    cumulative = 0
    bounds: Sequence[str] = [f"{bound:g}" for bound in BUCKETS] + ["+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        cumulative += count
        yield f"{name}_bucket{_braces((*labels, ('le', bound)))} {cumulative}"
    yield f"{name}_sum{_braces(labels)} {histogram.total:.10g}"
    yield f"{name}_count{_braces(labels)} {cumulative}"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    quoted = (f'{name}="{_escape(value)}"' for name, value in labels)
    return "{" + ",".join(quoted) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
