"""Which step schedules to prepare: names that a rule defines, files of `manifests/schedules/`, ladders of the caller.

A file is `{"name": …, "video_sigmas": [1.0, …, 0.0], "audio_sigmas": […], "note": …}`; on the command line the same is
`NAME=v1,v2,…/a1,a2,…`. Sigmas are used as they are (rounded to float32), no shift is applied.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from pathlib import Path

from loader.errors import ArtifactError, RequestError
from loader.strict_json import load_json
from runtime.schedules import MAX_EVALUATIONS, Schedule, explicit_schedule, named_schedule

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")
_RULED = re.compile(r"base-\d+|fasth3-8")
_KEYS = {"name", "video_sigmas", "audio_sigmas", "note"}


def stored_schedules() -> tuple[str, ...]:
    """Names of the files of `manifests/schedules/`."""
    folder = importlib.resources.files("manifests") / "schedules"
    return tuple(sorted(e.name.removesuffix(".json") for e in folder.iterdir() if e.name.endswith(".json")))


def resolve_schedules(names: Sequence[str], explicit: Sequence[Schedule], default: str) -> list[Schedule]:
    """Schedules to prepare, each once: those asked for by name, then the caller's ladders.

    Args:
        default: taken if the caller asked for nothing.
    Raises: RequestError: unknown name, or one name for two ladders.
    """
    if not names and not explicit:
        names = (default,)
    result = [find_schedule(name) for name in dict.fromkeys(names)]
    for schedule in explicit:
        twin = next((other for other in result if other.name == schedule.name), None)
        if twin is None:
            result.append(schedule)
        elif not twin.same_trajectory(schedule):
            raise RequestError("two step schedules of one name", where="schedule", found=schedule.name)
    return result


def find_schedule(name: str) -> Schedule:
    """A schedule by its name. Raises: RequestError: unknown; lists what is known."""
    stored = stored_schedules()
    if name in stored:
        data = (importlib.resources.files("manifests") / "schedules" / f"{name}.json").read_bytes()
        return _from_json(data, f"manifests/schedules/{name}.json", name)
    try:
        return named_schedule(name)
    except RequestError as error:
        known = ", ".join((f"base-1 … base-{MAX_EVALUATIONS}", "fasth3-8", *stored))
        raise RequestError(
            error.message,
            where="schedule",
            found=repr(name),
            expected=known,
            hint="or give its sigmas with --sigmas",
        ) from error


def parse_sigmas(text: str) -> Schedule:
    """`NAME=v1,v2,…/a1,a2,…`, or the path of a schedule file.

    Raises: RequestError: neither, a name that is taken or unusable, or sigmas that are no ladder.
    """
    name, is_inline, ladders = text.partition("=")
    try:
        schedule = _from_text(name, ladders) if is_inline else _from_file(Path(text))
    except ArtifactError as error:
        raise RequestError(
            error.message, where=f"--sigmas: {error.where}", found=error.found, expected=error.expected
        ) from error
    taken = schedule.name in stored_schedules() or _RULED.fullmatch(schedule.name)
    if taken and not find_schedule(schedule.name).same_trajectory(schedule):
        raise RequestError(
            "name belongs to another schedule", where="--sigmas", found=schedule.name, hint="choose another"
        )
    return schedule


def _from_text(name: str, text: str) -> Schedule:
    ladders = text.split("/")
    if len(ladders) != 2:
        raise ArtifactError("not two ladders", where=name, found=repr(text), expected="NAME=v1,v2,…/a1,a2,…")
    video, audio = ([_number(name, item) for item in ladder.split(",")] for ladder in ladders)
    return explicit_schedule(_checked(name), video, audio)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ArtifactError("not a number", where=name, found=repr(text)) from error


def _from_file(path: Path) -> Schedule:
    try:
        return _from_json(path.read_bytes(), path.name)
    except OSError as error:
        raise ArtifactError(
            f"schedule file cannot be read ({error.strerror})",
            where=str(path),
            expected="NAME=v1,v2,…/a1,a2,… or a file",
        ) from error


def _from_json(data: bytes, where: str, expected_name: str | None = None) -> Schedule:
    table = load_json(data, where)
    lists = [table.get(key) for key in ("video_sigmas", "audio_sigmas")]
    name = table.get("name")
    if not set(table) <= _KEYS or not isinstance(name, str) or not all(isinstance(x, list) for x in lists):
        raise ArtifactError(
            "not a schedule file",
            where=where,
            found=sorted(table),
            expected="name, video_sigmas, audio_sigmas",
        )
    if expected_name not in (None, name):
        raise ArtifactError("schedule has another name than its file", where=where, found=name)
    video, audio = lists
    return explicit_schedule(_checked(name), video, audio)  # type: ignore[arg-type]


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ArtifactError(
            "not a usable name", where="name", found=repr(name), expected="a-z, 0-9, - and _, at most 48"
        )
    return name
