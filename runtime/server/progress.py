"""Messages of a worker about a job → changes of that job. The same for a child process and for a platform's function."""

from __future__ import annotations

import time
from typing import Any

from runtime.server.jobs import Job, JobStore

PHASES = {
    "conditioning": ("text_encode", 6),
    "denoising": ("denoise", 7),
    "decoding": ("decode", 89),
    "encoding": ("encode", 95),
}
"""Phase of the worker protocol → phase that clients see, progress at its beginning."""
LOADED = 5
DENOISE_FROM, DENOISE_TO = 7, 88
DECODE_FROM, DECODE_TO = 89, 98
MADE_FIELDS = frozenset(
    {"width", "height", "num_frames", "seed", "task", "fps", "num_inference_steps", "num_evaluations", "schedule", "accel"}
)  # fmt: skip


class Progress:
    """Follows one job at a time; progress never goes back."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._phase_since = time.monotonic()

    def begin(self) -> None:
        """The job has just been handed over."""
        self._phase_since = time.monotonic()

    def apply(self, job_id: str, event: dict[str, Any]) -> None:
        """Take in an `accepted`, `phase`, `step` or `frames` message; others are not about progress."""
        job = self._store.get(job_id)
        if job is None:
            return
        match event.get("event"):
            case "accepted":
                made = {
                    name: value for name, value in (event.get("request") or {}).items() if name in MADE_FIELDS
                }
                known = {name: value for name, value in made.items() if value is not None}
                self._store.update(job_id, video={**job.video, **known})
            case "phase":
                phase, progress = PHASES.get(str(event.get("phase")), (job.phase, job.progress))
                changes = {"phase": phase, "timings": self.timings(job)}
                self._store.update(job_id, progress=max(job.progress, progress), **changes)
            case "step":
                step, steps = int(event.get("step", 0)), max(1, int(event.get("steps", 1)))
                progress = DENOISE_FROM + (DENOISE_TO - DENOISE_FROM) * step // steps
                self._store.update(job_id, step=step, steps=steps, progress=max(job.progress, progress))

            case "frames":
                frames, total = int(event.get("frames", 0)), max(1, int(event.get("total", 1)))
                progress = DECODE_FROM + (DECODE_TO - DECODE_FROM) * frames // total
                self._store.update(job_id, progress=max(job.progress, progress))

    def loading(self, job_id: str, share: float) -> None:
        """Weights arrive while the job waits for them; `share` from 0 to 1."""
        job = self._store.get(job_id)
        if job is not None and job.phase == "loading":
            self._store.update(job_id, progress=max(job.progress, round(LOADED * share)))

    def timings(self, job: Job) -> dict[str, float]:
        """The job's timings with the phase that ends now."""
        now = time.monotonic()
        spent = round(now - self._phase_since, 6)
        self._phase_since = now
        return {**job.timings, job.phase: job.timings.get(job.phase, 0.0) + spent}
