"""Which prepared step schedule a request runs on.

Modulation tables exist only for prepared schedules, so every field that could change the trajectory is a question
("is this what is prepared?"), never an instruction; an absent field means "as prepared". A mismatch is refused and
the prepared schedules are listed. Standard library only.

`num_evaluations` counts model evaluations. `num_inference_steps` counts as the publisher of the schedule does: grid
points for `base-<E>` (E + 1, as diffusers), evaluations for distilled ladders (8 for `fasth3-8`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from loader.errors import RequestError
from runtime.families.minimax_h3.capabilities import Capabilities
from runtime.families.minimax_h3.fields import Fields, quote
from runtime.families.minimax_h3.order import Task
from runtime.schedules import (
    AUDIO_SHIFT,
    FASTH3_VIDEO_SHIFT,
    MAX_EVALUATIONS,
    VIDEO_SHIFT,
    Schedule,
    named_schedule,
    round_float32,
)

GUIDANCE_SCALE = 1.0  # the checkpoints are guidance-distilled: one branch, nothing to scale


def choose_schedule(fields: Fields, capabilities: Capabilities, task: Task) -> Schedule:
    """The first prepared schedule of `task` that agrees with every trajectory field of the request.

    Raises: RequestError, status 422, naming the first field that no prepared schedule agrees with.
    """
    prepared = capabilities.schedules[task]
    if not fields.is_neutral("guidance_scale", GUIDANCE_SCALE):
        fields.number("guidance_scale")
        _refuse("guidance_scale", fields, prepared, task, "1 (the model is guidance-distilled)")
    if fields.text("negative_prompt"):
        _refuse("negative_prompt", fields, prepared, task, "none (a distilled model has no second branch)")
    candidates = prepared
    for name, agrees in _questions(fields).items():
        candidates = tuple(schedule for schedule in candidates if agrees(schedule))
        if not candidates:
            _refuse(name, fields, prepared, task)
    return candidates[0]


def step_count(schedule: Schedule) -> int:
    """`num_inference_steps` of a schedule, as its publisher counts."""
    return schedule.evaluations + 1 if _is_published_base(schedule) else schedule.evaluations


def shifts(schedule: Schedule) -> tuple[float, float] | None:
    """(video, audio) shift of a published schedule; None for a ladder that no shift defines."""
    if _is_published_base(schedule):
        return VIDEO_SHIFT, AUDIO_SHIFT
    if schedule.same_trajectory(named_schedule("fasth3-8")):
        return FASTH3_VIDEO_SHIFT, AUDIO_SHIFT
    return None


def describe(schedule: Schedule) -> str:
    """One line for messages and the models listing."""
    pair = shifts(schedule)
    shift = f", flow_shift {pair[0]:g}, audio_flow_shift {pair[1]:g}" if pair else ""
    return (
        f"{schedule.name} ({schedule.evaluations} evaluations, num_inference_steps {step_count(schedule)}"
        f"{shift}, guidance_scale 1)"
    )


def _is_published_base(schedule: Schedule) -> bool:
    count = schedule.evaluations
    return count <= MAX_EVALUATIONS and schedule.same_trajectory(named_schedule(f"base-{count}"))


def _questions(fields: Fields) -> dict[str, Callable[[Schedule], bool]]:
    """Trajectory fields that the request gives → whether a schedule agrees."""
    name = fields.text("schedule")
    evaluations, steps = fields.integer("num_evaluations"), fields.integer("num_inference_steps")
    video_shift, audio_shift = fields.number("flow_shift"), fields.number("audio_flow_shift")
    sigmas, timesteps = fields.numbers("sigmas"), fields.numbers("timesteps")
    questions: dict[str, tuple[object, Callable[[Schedule], bool]]] = {
        "schedule": (name, lambda s: s.name == name),
        "num_evaluations": (evaluations, lambda s: s.evaluations == evaluations),
        "num_inference_steps": (steps, lambda s: step_count(s) == steps),
        "flow_shift": (video_shift, lambda s: (shifts(s) or (None, None))[0] == video_shift),
        "audio_flow_shift": (audio_shift, lambda s: (shifts(s) or (None, None))[1] == audio_shift),
        "sigmas": (sigmas, lambda s: _rounded(sigmas) == s.video_sigmas),
        "timesteps": (timesteps, lambda s: _rounded(timesteps) == s.video_timesteps),
    }
    return {field: agrees for field, (given, agrees) in questions.items() if given is not None}


def _rounded(values: list[float] | None) -> tuple[float, ...]:
    # anything beyond 2 is no sigma or timestep, and float32 would overflow for the largest
    return tuple(round_float32(value) if abs(value) < 2 else value for value in values or ())


def _refuse(
    name: str, fields: Fields, prepared: tuple[Schedule, ...], task: Task, allowed: str | None = None
) -> NoReturn:
    listing = "; ".join(describe(schedule) for schedule in prepared)
    raise RequestError(
        "not what is prepared here",
        where=name,
        found=quote(fields.get(name)),
        expected=f"{allowed or 'absent, or that of a prepared schedule'} – prepared schedules for {task}: {listing}",
        http_status=422,
    )
