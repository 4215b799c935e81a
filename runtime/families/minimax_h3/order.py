"""Which groups a start loads, decided before anything else of the family is imported. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from loader.errors import ArtifactError
from runtime.schedules import DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from loader.manifest import Manifest

Task = Literal["t2va", "fl2va"]
TASKS: tuple[Task, ...] = ("t2va", "fl2va")


def default_order(manifest: Manifest, task: str = "", schedule: str = "") -> str:
    """Key into the manifest's `orders` for a start without a request.

    Args:
        task, schedule: the deployment's choice; empty: the first served task, and its default schedule.
    Raises: ArtifactError: not prepared; names what is.
    """
    prepared = {name: _schedules(manifest, name) for name in TASKS}
    task = task or next((name for name in TASKS if prepared[name]), TASKS[0])
    names = prepared.get(task, [])  # type: ignore[call-overload]  # a deployment may name anything
    if not schedule:
        schedule = DEFAULT_SCHEDULE if DEFAULT_SCHEDULE in names else names[0] if names else "none"
    manifest.order(task, schedule)
    return f"{task}/{schedule}"


def likely_order(
    manifest: Manifest, body: Mapping[str, object] | None, task: str = "", schedule: str = ""
) -> str:
    """The order that an unvalidated body will most likely need; the deployment's default when in doubt.

    Args:
        task, schedule: as for `default_order`.
    Raises: ArtifactError: it comes to the default, which is not prepared.
    """
    if body is None:
        return default_order(manifest, task, schedule)
    wanted = "fl2va" if body.get("first_frame") or body.get("last_frame") else "t2va"
    for name in (body.get("schedule"), f"base-{body.get('num_evaluations')}"):
        if f"{wanted}/{name}" in manifest.orders:
            return f"{wanted}/{name}"
    try:
        return default_order(manifest, wanted)
    except ArtifactError:
        return default_order(manifest, task, schedule)


def _schedules(manifest: Manifest, task: str) -> list[str]:
    return [record.name for record in manifest.schedules if record.task == task]
