"""One request from conditioning to the finished file, for any family. This is the only denoising loop.

Imports torch only through what it is given. Phases and steps are reported to the caller's hooks; cancellation is
looked at between steps and between decoded units.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.errors import InternalError
from runtime.family import Job, Latents
from runtime.timeline import Timeline

if TYPE_CHECKING:
    from runtime.media.encoder_pool import EncoderPool


class Cancelled(Exception):
    """The request was cancelled; nothing is left at its output."""


def _ignore(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Hooks:
    """How a run talks to its caller.

    Args:
        timeline: receives marks and spans.
        cancelled: set from another thread to stop at the next border.
        on_phase: called with `conditioning`, `denoising`, `decoding`.
        on_step: called with (evaluations done, evaluations in all).
        on_frames: called with (frames in host memory, frames in all) after every decoded unit.
        on_first_step: called once, when the first evaluation is done and the machine has time for other things.
        synchronize: waits for the device, so that a mark means what it says.
    """

    timeline: Timeline
    cancelled: threading.Event
    on_phase: Callable[[str], None] = _ignore
    on_step: Callable[[int, int], None] = _ignore
    on_frames: Callable[[int, int], None] = _ignore
    on_first_step: Callable[[], None] = _ignore
    synchronize: Callable[[], None] = _ignore


def generate(
    job: Job,
    output: Path,
    hooks: Hooks,
    encoder: Mapping[str, Any] | None = None,
    encoders: EncoderPool | None = None,
) -> dict[str, object]:
    """Run one job and write its MP4.

    Args:
        output: appears complete or not at all.
        encoder: options of `runtime.media.encode.Mp4Writer` (crf, preset, receiver …).
        encoders: the worker's encoder processes; None: pictures are encoded in this process.
    Returns: figures of the run, JSON-ready.
    Raises: Cancelled; WorkerError.
    """
    timeline = hooks.timeline
    hooks.on_phase("conditioning")
    with timeline.span("conditioner"):
        job.condition()
        hooks.synchronize()
    timeline.mark("conditioner_done")
    _check(hooks)
    hooks.on_phase("denoising")
    latents = denoise(job, hooks)
    hooks.on_phase("decoding")
    with timeline.span("decode and encode"):
        written = decode_and_write(job, latents, output, hooks, encoder or {}, encoders)
    timeline.mark("mp4_complete")
    return {**job.report(), **written}


def denoise(job: Job, hooks: Hooks) -> Latents:
    """All stages and steps of a job that has been conditioned; the final latents. Raises: Cancelled, WorkerError."""
    stages = job.stages()
    total = sum(len(stage.steps) for stage in stages)
    done = 0
    latents: Latents | None = None
    for stage in stages:
        latents = stage.start(latents)
        for step in stage.steps:
            _check(hooks)
            if done == 0:
                hooks.synchronize()
                hooks.timeline.mark("first_dit_entry")
            with hooks.timeline.span("step", evaluation=step.evaluation):
                latents = stage.sampler(latents, stage.denoiser(latents, step), step)
                hooks.synchronize()
            done += 1
            if done == 1:
                hooks.timeline.mark("first_step_done")
                hooks.on_first_step()
            hooks.on_step(done, total)
    if latents is None:
        raise InternalError("the family's schedule has no stage", where="pipeline")
    hooks.timeline.mark("denoising_done")
    return latents


def decode_and_write(
    job: Job,
    latents: Latents,
    output: Path,
    hooks: Hooks,
    encoder: Mapping[str, Any],
    encoders: EncoderPool | None,
) -> dict[str, object]:
    """Latents to the finished file. Units go to the encoders as they are decoded; when the last one is, only that one is
    left to encode. Arguments, result and errors as in `generate`."""
    from runtime.media.encode import Mp4Writer

    media = job.media
    decoders = job.decoders()

    def note(frames: int) -> None:
        if hooks.timeline.seconds("first_frame_out") is None:
            hooks.timeline.mark("first_frame_out")
        hooks.on_frames(frames, media.num_frames)

    writer = Mp4Writer(
        output,
        width=media.width,
        height=media.height,
        fps=media.fps,
        frames=media.num_frames,
        encoders=encoders,
        on_pictures=note,
        **encoder,
    )
    with writer:
        with hooks.timeline.span("audio decode"):
            (audio,) = decoders["audio"].units(latents)
        writer.add_sound(audio, media.sample_rate)
        _check(hooks)
        for index, unit in enumerate(decoders["video"].units(latents)):
            with hooks.timeline.span("hand over", unit=index):
                writer.add_frames(unit)
            _check(hooks)
        with hooks.timeline.span("finish file"):
            writer.finish()
    return {
        "num_frames": media.num_frames,
        "fps": media.fps,
        "sample_rate": media.sample_rate,
        "video_s": media.num_frames / media.fps,
        "size_bytes": output.stat().st_size,
    }


def _check(hooks: Hooks) -> None:
    if hooks.cancelled.is_set():
        raise Cancelled
