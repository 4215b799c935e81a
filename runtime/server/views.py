"""Jobs as clients see them. Pure functions of a job; the shapes are declared in `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.server.jobs import COMPLETED, Job

SERVER_TIMING = (  # name in the header, phases that it sums
    ("coldstart", ("loading",)),
    ("encode", ("preprocess", "text_encode")),
    ("denoise", ("denoise",)),
    ("decode", ("decode",)),
    ("mux", ("encode", "mux")),
)


def video_object(job: Job) -> dict[str, Any]:
    """The OpenAI video object with the extensions of this service. Server paths are not part of it."""
    video, result = job.video, job.result
    done = job.status == COMPLETED
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": 100 if done else min(job.progress, 99),
        "phase": job.phase,
        "created_at": int(job.created_at),
        "completed_at": int(job.completed_at) if job.completed_at is not None else None,
        "expires_at": int(job.expires_at) if job.expires_at is not None else None,
        "size": f"{video.get('width', 0)}x{video.get('height', 0)}",
        "seconds": f"{video.get('seconds', 0):.10g}",
        "prompt": job.request.get("prompt"),
        "quality": video.get("accel") or "exact",
        "remixed_from_video_id": None,
        "error": job.error,
        "url": f"/v1/videos/{job.id}/content" if done else None,
        "width": video.get("width"),
        "height": video.get("height"),
        "fps": video.get("fps", 24),
        "num_frames": video.get("num_frames"),
        "audio": {"sample_rate": 32000, "channels": 2},
        "seed": video.get("seed"),
        "num_inference_steps": video.get("num_inference_steps"),
        "num_evaluations": video.get("num_evaluations"),
        "task": video.get("task"),
        "accel": video.get("accel") or "exact",
        "bundle_id": job.bundle_id,
        "inference_time_s": inference_time_s(job),
        "stage_durations": stage_durations(job),
        "peak_memory_mb": result.get("peak_memory_mb"),
        "cold_start": cold_start(job),
        "sha256": result.get("sha256"),
    }


def dynamo_object(job: Job, data: Mapping[str, Any]) -> dict[str, Any]:
    """The video object plus the keys of NVIDIA Dynamo's blocking answer."""
    entry = {"output_format": "mp4", "fps": job.video.get("fps", 24), "audio_sample_rate": 32000, **data}
    return {**video_object(job), "created": int(job.created_at), "data": [entry]}


def inference_time_s(job: Job) -> float | None:
    """Seconds from hand-over to the finished file, loading excluded."""
    if job.started_at is None or job.completed_at is None:
        return None
    return round(max(0.0, job.completed_at - job.started_at - job.timings.get("loading", 0.0)), 3)


def stage_durations(job: Job) -> dict[str, float]:
    return {phase: round(seconds, 3) for phase, seconds in job.timings.items()}


def cold_start(job: Job) -> dict[str, Any] | None:
    """How long the job waited for weights; None if the worker was ready."""
    seconds = job.timings.get("loading")
    return None if seconds is None else {"waited_s": round(seconds, 3)}


def server_timing(job: Job) -> str:
    """`Server-Timing` value, milliseconds."""
    started = job.started_at if job.started_at is not None else job.created_at
    parts = [f"queue;dur={1e3 * max(0.0, started - job.created_at):.1f}"]
    for name, phases in SERVER_TIMING:
        known = [job.timings[phase] for phase in phases if phase in job.timings]
        if known:
            parts.append(f"{name};dur={1e3 * sum(known):.1f}")
    return ", ".join(parts)


def job_failure_status(error: Mapping[str, Any]) -> int:
    """HTTP status of a blocking request whose job failed."""
    by_code = {
        "interrupted": 503,
        "timeout": 504,
        "cancelled": 409,
        "bad_artifact": 503,
        "unavailable_capability": 503,
    }
    fallback = 422 if error.get("type") == "invalid_request_error" else 500
    return by_code.get(str(error.get("code")), fallback)
