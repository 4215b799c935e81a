"""What this deployment serves: the prepared directory's identity, what it can do, and the check of a request against it.

The family is found through `runtime.family`, on first use and in a thread, so that the socket opens first.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.errors import ArtifactError, RequestError
from runtime.server.errors import ApiError
from runtime.server.pictures import Picture

if TYPE_CHECKING:
    from runtime.family import Family

FPS = 24
RATIOS = ("16:9", "4:3", "1:1", "3:4", "9:16", "21:9")
CODES_BY_FIELD: Mapping[str, str] = {
    "num_inference_steps": "schedule_not_prepared",
    "flow_shift": "schedule_not_prepared",
    "audio_flow_shift": "schedule_not_prepared",
    "sigmas": "schedule_not_prepared",
    "timesteps": "schedule_not_prepared",
    "schedule": "schedule_not_prepared",
    "task": "task_not_prepared",
    "accel": "profile_not_prepared",
    "quality": "profile_not_prepared",
}
MADE = (
    "width",
    "height",
    "num_frames",
    "fps",
    "seed",
    "task",
    "schedule",
    "num_inference_steps",
    "num_evaluations",
    "accel",
    "canvas_origin",
)


@dataclass(frozen=True)
class Admitted:
    """A request that the worker will take: its fields with the seed filled in, and what will be made."""

    fields: dict[str, Any]
    video: dict[str, Any]


@dataclass(frozen=True)
class OpenBundle:
    """A prepared directory's family with its identity."""

    family: Family
    identity: str
    model: Mapping[str, Any]


def open_prepared_directory(directory: Path) -> OpenBundle:
    """Read the manifest and find the family. Raises: ArtifactError."""
    from loader.manifest import read_manifest
    from runtime.family import family_for

    manifest = read_manifest(directory)
    model: dict[str, Any] = dict(manifest.model)
    model["schedules"] = [
        {"name": s.name, "task": s.task, "evaluations": s.evaluations} for s in manifest.schedules
    ]
    return OpenBundle(family_for(manifest, directory), f"bundle_{manifest.sha256[:16]}", model)


class Bundle:
    """Opened once, on first use. Methods block and are called in threads.

    Args:
        served_name: model name that clients may give; the family's name where empty.
        opener: how a directory is opened.
    """

    def __init__(
        self,
        directory: Path,
        served_name: str = "",
        opener: Callable[[Path], OpenBundle] = open_prepared_directory,
    ) -> None:
        self.directory = directory
        self._served_name = served_name
        self._opener = opener
        self._opened: OpenBundle | None = None
        self._lock = threading.Lock()

    def open(self) -> OpenBundle:
        """Raises: ArtifactError: the directory cannot be served."""
        with self._lock:
            if self._opened is None:
                try:
                    self._opened = self._opener(self.directory)
                except OSError as cause:
                    raise ArtifactError("cannot be read", where=str(self.directory)) from cause
            return self._opened

    @property
    def identity(self) -> str:
        return self._opened.identity if self._opened is not None else ""

    def names(self) -> tuple[str, ...]:
        """Model names that this bundle answers to, the canonical one first."""
        opened = self.open()
        family = str(opened.model["family"])
        names = (self._served_name or family.replace("_", "-"), family, opened.identity)
        return tuple(dict.fromkeys(names))

    def check_model(self, name: str | None) -> str:
        """The canonical name. Raises: ApiError 404: another model was asked for."""
        names = self.names()
        if name is not None and name not in names:
            raise ApiError(
                "this model is not served here", status=404, code="model_not_found", where="model",
                found=repr(name[:80]), expected=", ".join(names),
            )  # fmt: skip
        return names[0]

    def admit(self, fields: Mapping[str, Any], pictures: Mapping[str, Picture]) -> Admitted:
        """Validate as the worker will: fields, schedule, token count, pictures decoded.

        Raises: ApiError naming the field.
        """
        family = self.open().family
        fields = {"seed": secrets.randbits(63), **fields}
        body = {**fields, **{name: picture.data for name, picture in pictures.items()}}
        try:
            request = family.parse(body)
            prepared = family.prepare(request)
        except ApiError:
            raise
        except RequestError as error:
            raise _with_code(error) from error
        media, report = prepared.media, prepared.report
        video = {name: report[name] for name in MADE if report.get(name) is not None}
        video |= {
            "width": media.width,
            "height": media.height,
            "num_frames": media.num_frames,
            "fps": media.fps,
        }
        return Admitted(
            fields, {**video, "seed": fields["seed"], "seconds": round(media.num_frames / media.fps, 6)}
        )

    def offers(self) -> dict[str, Any]:
        """What a client may choose from: sizes, seconds, profiles, schedules, tasks."""
        opened = self.open()
        capabilities = opened.family.capabilities
        frames = getattr(capabilities, "frames", None)
        limits = (
            (frames.min_frames, frames.default_frames, frames.max_frames)
            if frames is not None
            else (96, 124, 360)
        )
        return {
            "supported_task_types": list(opened.model["tasks"]),
            "schedules": list(opened.model["schedules"]),
            "accel": list(getattr(capabilities, "qualities", ("exact",))),
            "sizes": [size for ratio in RATIOS if (size := _size_of(opened.family, ratio)) is not None],
            "min_seconds": round(limits[0] / FPS, 4),
            "default_seconds": round(limits[1] / FPS, 4),
            "max_seconds": min(15.0, round(limits[2] / FPS, 4)),
            "fps": FPS,
        }


def _size_of(family: Family, ratio: str) -> str | None:
    """`WxH` that an aspect ratio becomes; None where the family refuses it."""
    try:
        request = family.parse({"prompt": "size", "seed": 0, "aspect_ratio": ratio})
    except RequestError:
        return None
    return f"{request.width}x{request.height}"


def _with_code(error: RequestError) -> ApiError:
    """The family's refusal with the code that clients of the API know."""
    where = error.where or ""
    code = CODES_BY_FIELD.get(where) if error.http_status == 422 else None
    if "unknown" in error.message:
        code = "unknown_parameter"
    elif where == "prompt" and "token" in str(error):
        code = "prompt_too_long"
    return ApiError(
        error.message, status=error.http_status, code=code or ("invalid_value" if error.http_status == 400 else None),
        where=error.where, found=error.found, expected=error.expected, hint=error.hint,
    )  # fmt: skip
