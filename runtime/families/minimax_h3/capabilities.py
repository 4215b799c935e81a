"""What one prepared directory can serve: tasks, step schedules, limits. Built from its manifest; standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from loader.errors import ArtifactError, CapabilityError
from runtime.families.minimax_h3.canvas import (
    SMALL_CANVAS,
    SMALL_FRAMES,
    STRICT_FRAMES,
    CanvasLimits,
    FrameLimits,
)
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.order import TASKS, Task
from runtime.media.images import ImageLimits
from runtime.schedules import DEFAULT_SCHEDULE, Schedule, schedule_from_bits

if TYPE_CHECKING:
    from loader.manifest import Manifest

MAX_PROMPT_BYTES = 64 << 10
_RELEASED_HIDDEN_SIZE = 5376


@dataclass(frozen=True)
class Capabilities:
    """Everything that a request is checked against.

    Attributes:
        schedules: task → prepared schedules, the default first; a task without one is not served.
        qualities: names of acceleration profiles that a request may ask for.
    """

    config: H3Config
    schedules: Mapping[Task, tuple[Schedule, ...]]
    canvas: CanvasLimits = field(default_factory=CanvasLimits)
    frames: FrameLimits = field(default_factory=FrameLimits)
    images: ImageLimits = field(default_factory=ImageLimits)
    max_prompt_bytes: int = MAX_PROMPT_BYTES
    qualities: tuple[str, ...] = ("exact",)

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(task for task in TASKS if self.schedules.get(task))


def capabilities_of(manifest: Manifest, *, strict: bool = False) -> Capabilities:
    """Capabilities of a prepared directory.

    The published limits belong to the released model; any other size (a tiny model for tests and demonstrations) gets
    small canvases and short clips. `strict` takes diffusers' limits on the clip length instead of the native ones.

    Raises: ArtifactError: the manifest names a task without a schedule, or a broken schedule. CapabilityError: it was
    prepared from a transformer that this version cannot run.
    """
    _check_runnable(manifest)
    config = H3Config.from_dict(manifest.config)
    schedules: dict[Task, tuple[Schedule, ...]] = {}
    for task in TASKS:
        prepared = [
            schedule_from_bits(record.name, record.video_sigmas, record.audio_sigmas)
            for record in manifest.schedules
            if record.task == task
        ]
        prepared.sort(
            key=lambda schedule: schedule.name != DEFAULT_SCHEDULE
        )  # stable: else the manifest's order
        if prepared:
            schedules[task] = tuple(prepared)
    tasks = manifest.model.get("tasks")
    declared = [task for task in TASKS if isinstance(tasks, list | tuple) and task in tasks]
    missing = [task for task in declared if task not in schedules]
    if missing or not schedules:
        raise ArtifactError(
            "no step schedule is prepared for a declared task",
            where="manifest.json: schedules",
            found=", ".join(missing) or "no schedule",
            expected=f"at least one for each of {', '.join(declared or TASKS)}",
        )
    released = config.transformer.hidden_size == _RELEASED_HIDDEN_SIZE
    return Capabilities(
        config=config,
        schedules=MappingProxyType(schedules),
        canvas=CanvasLimits() if released else SMALL_CANVAS,
        frames=STRICT_FRAMES if strict else FrameLimits() if released else SMALL_FRAMES,
    )


def _check_runnable(manifest: Manifest) -> None:
    variant, tasks = manifest.model.get("variant", "base"), manifest.model.get("tasks")
    if variant != "base":
        raise CapabilityError(
            "the model needs video sparse attention (VSA), which this version does not have",
            where="manifest.json: model.variant",
            found=repr(variant),
            expected="'base'",
            hint="prepare the base checkpoint; dense attention would give other videos",
        )
    if isinstance(tasks, list | tuple) and tasks and not any(task in TASKS for task in tasks):
        raise CapabilityError(
            "tasks that this version does not serve",
            where="manifest.json: model.tasks",
            found=", ".join(map(str, tasks)),
            expected=" or ".join(TASKS),
            hint="prepare the partition that serves them",
        )
