"""An untrusted request body → a frozen H3Request, or one error that names the field.

The body has come through JSON or a form; containers such as `extra_body` are flattened and a `model` name is
resolved before this module sees it. What a request does not say is filled in and reported: canvas, frames, seed.
Nothing is shortened, stripped or ignored silently; unknown fields are refused by name. No torch; Pillow only when a
picture is decoded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from loader.errors import RequestError
from runtime.families.minimax_h3 import canvas
from runtime.families.minimax_h3.capabilities import Capabilities
from runtime.families.minimax_h3.config import FPS, H3Config
from runtime.families.minimax_h3.fields import Fields, quote
from runtime.families.minimax_h3.keyframes import Keyframe
from runtime.families.minimax_h3.noise import NOISE_MODES, NoiseMode
from runtime.families.minimax_h3.order import Task
from runtime.families.minimax_h3.packing import Anchor
from runtime.families.minimax_h3.tokens import MAX_TEXT_ROWS
from runtime.families.minimax_h3.trajectory import choose_schedule
from runtime.media.images import decode_image
from runtime.media.sources import read_image_source
from runtime.schedules import Schedule

MAX_SEED = 2**63 - 1
AnchorFit = Literal["stretch", "cover_crop"]

FIELDS: Mapping[str, str] = {
    "prompt": "text, 1 byte … 64 KiB, at most 16,384 token rows together with the keyframes; used verbatim",
    "width": "pixels, a multiple of 32; together with height",
    "height": "pixels, a multiple of 32; together with width",
    "size": '"1344x768", or "auto" for the default canvas',
    "aspect_ratio": '"16:9", between 1:4 and 4:1; short edge 768, at most 1344 x 768 pixels',
    "short_edge": "768; for other sizes give width and height",
    "num_frames": "96 … 362, rounded up to 17n+5",
    "seconds": "4 … 15, number or text; round(24 * seconds) frames, rounded up to 17n+5",
    "fps": "24",
    "seed": "0 … 2^63-1; drawn and reported when absent",
    "noise": '"single_stream" (default) or "reseed": draw order of the initial noise',
    "task": '"t2va" or "fl2va"; follows from the keyframes when absent',
    "first_frame": "image: data URI, or https URL where a fetcher is configured",
    "last_frame": "image, as first_frame",
    "anchor_fit": '"stretch" (default, as the model was trained) or "cover_crop": first keyframe on the canvas',
    "schedule": "name of a prepared step schedule",
    "num_evaluations": "model evaluations; must be prepared",
    "num_inference_steps": "grid points of base schedules (evaluations + 1), evaluations of distilled ones",
    "flow_shift": "must be that of the prepared schedule",
    "audio_flow_shift": "must be that of the prepared schedule",
    "sigmas": "must equal the prepared video ladder",
    "timesteps": "must equal the prepared video timesteps (1 - sigma)",
    "guidance_scale": "1",
    "negative_prompt": "empty",
    "quality": '"exact"; also "lossless", "extra-high"',
    "accel": "acceleration profile, as quality",
    "n": "1",
    "num_outputs_per_prompt": "1",
    "output_format": '"mp4"',
    "generate_sound": "true: the model always makes sound",
    "enable_teacache": "false",
}
_NEUTRAL: Mapping[str, object] = {
    "fps": FPS, "n": 1, "num_outputs_per_prompt": 1, "output_format": "mp4", "generate_sound": True,
    "enable_teacache": False,
}  # fmt: skip
_QUALITY_ALIASES = {"lossless": "exact", "extra-high": "exact"}
_REFERENCES = ("reference_images", "reference_videos", "reference_audios", "references")


@dataclass(frozen=True)
class H3Request:
    """One clip, fully decided.

    Attributes:
        canvas_origin: where width and height came from.
        num_frames: frames served (17n + 5); requested_frames: frames asked for, before rounding up.
        seed_origin: "drawn" when the request had none.
        keyframes: decoded, upright, not yet on the canvas; first before last.
    """

    prompt: str
    task: Task
    width: int
    height: int
    canvas_origin: Literal["request", "keyframe", "default"]
    num_frames: int
    requested_frames: int
    seed: int
    seed_origin: Literal["request", "drawn"]
    schedule: Schedule
    noise: NoiseMode
    quality: str
    keyframes: tuple[Keyframe, ...]
    anchor_fit: AnchorFit

    def latent_shape(self, config: H3Config) -> tuple[int, int, int]:
        """(latent frames, latent height, latent width)."""
        return canvas.latent_shape(config, self.width, self.height, self.num_frames)

    @property
    def num_audio_latents(self) -> int:
        """Per channel."""
        return canvas.audio_latents(self.num_frames)

    @property
    def seconds(self) -> float:
        return self.num_frames / FPS

    def report(self) -> dict[str, object]:
        """What is served, for the result's metadata (JSON types)."""
        return {
            "task": self.task,
            "width": self.width,
            "height": self.height,
            "canvas_origin": self.canvas_origin,
            "num_frames": self.num_frames,
            "requested_frames": self.requested_frames,
            "seconds": round(self.seconds, 6),
            "fps": FPS,
            "seed": self.seed,
            "seed_origin": self.seed_origin,
            "schedule": self.schedule.name,
            "num_evaluations": self.schedule.evaluations,
            "noise": self.noise,
            "quality": self.quality,
            "keyframes": [
                {"anchor": k.anchor, "width": k.image.width, "height": k.image.height} for k in self.keyframes
            ],
            "anchor_fit": self.anchor_fit if self.keyframes else None,
        }


def parse_request(
    body: Mapping[str, object],
    capabilities: Capabilities,
    *,
    resolve_image: Callable[[str], bytes] | None = None,
    form: bool = False,
) -> H3Request:
    """Check a request against what is prepared.

    Args:
        body: field → value. Keyframes may also be bytes (uploads, command line).
        resolve_image: fetches an https URL, or raises RequestError; None refuses URLs.
        form: values are form parts, so numbers come as text.

    Raises: RequestError: 400 malformed or out of range, 413/415 pictures, 422 not served by this directory.
    """
    if not isinstance(body, Mapping):
        raise RequestError(
            "the request must be an object", where="body", found=quote(body), expected="field: value"
        )
    _check_names(body)
    fields = Fields(body, form)
    prompt = _prompt(fields, capabilities)
    _check_neutral(fields)
    seed = _seed(fields)
    task = _task(fields, capabilities)
    schedule = choose_schedule(fields, capabilities, task)
    requested, served = _frames(fields, capabilities)
    explicit = _explicit_canvas(fields, capabilities)
    quality = _quality(fields, capabilities)
    noise = fields.choice("noise", NOISE_MODES) or "single_stream"
    anchor_fit = fields.choice("anchor_fit", ("stretch", "cover_crop")) or "stretch"
    keyframes = _keyframes(fields, capabilities, resolve_image)  # last: the only costly check
    width, height, origin = _canvas(explicit, keyframes, capabilities)
    return H3Request(
        prompt=prompt,
        task=task,
        width=width,
        height=height,
        canvas_origin=origin,
        num_frames=served,
        requested_frames=requested,
        seed=secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
        seed_origin="drawn" if seed is None else "request",
        schedule=schedule,
        noise=cast(NoiseMode, noise),
        quality=quality,
        keyframes=keyframes,
        anchor_fit=cast(AnchorFit, anchor_fit),
    )


def _check_names(body: Mapping[str, object]) -> None:
    unknown = [name for name in body if name not in FIELDS]
    references = [name for name in unknown if name in _REFERENCES]
    if references:
        mixed = [name for name in ("first_frame", "last_frame") if body.get(name) is not None]
        raise RequestError(
            f"references cannot be mixed with {' and '.join(mixed)}"
            if mixed
            else "references are not served here",
            where=", ".join(references),
            expected="keyframes first_frame, last_frame (t2va and fl2va)",
            hint="references need a directory prepared from the ref2va transformer",
            http_status=422,
        )
    if not unknown:
        return
    import difflib  # on this path only: it costs a start more than the whole check

    hints = []
    for name in unknown:
        near = difflib.get_close_matches(str(name), FIELDS, n=1, cutoff=0.7)
        hints += [f"did you mean {near[0]} for {quote(name)}?"] if near else []
        hints += ["a request never names a path of the server"] if "path" in str(name).lower() else []
    raise RequestError(
        "unknown field" if len(unknown) == 1 else "unknown fields",
        where=", ".join(quote(name).strip("'") for name in unknown[:10]),
        expected=", ".join(FIELDS),
        hint="; ".join(dict.fromkeys(hints)) or None,
    )


def _check_neutral(fields: Fields) -> None:
    for name, neutral in _NEUTRAL.items():
        if not fields.is_neutral(name, neutral):
            raise RequestError(
                "unsupported value", where=name, found=quote(fields.get(name)), expected=neutral
            )


def _prompt(fields: Fields, capabilities: Capabilities) -> str:
    prompt = fields.text("prompt")
    if prompt is None:
        raise RequestError("the prompt is required", where="prompt", expected="a string")
    if not prompt.strip():
        raise RequestError("the prompt is empty", where="prompt", found=quote(prompt), expected="text")
    try:
        size = len(prompt.encode())
    except UnicodeEncodeError as error:
        raise RequestError(
            "the prompt is not encodable as UTF-8: it holds half of a surrogate pair",
            where="prompt", found=f"code point U+{ord(prompt[error.start]):04X} at {error.start}", expected="Unicode text",
        ) from None  # fmt: skip
    if size > capabilities.max_prompt_bytes:
        raise RequestError(
            "the prompt is too long", where="prompt", found=f"{size} bytes",
            expected=f"at most {capabilities.max_prompt_bytes} bytes and {MAX_TEXT_ROWS} token rows",
            hint="nothing is cut silently",
        )  # fmt: skip
    return prompt


def _seed(fields: Fields) -> int | None:
    seed = fields.integer("seed")
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise RequestError("the seed is out of range", where="seed", found=quote(seed), expected="0 … 2^63-1")
    return seed


def _task(fields: Fields, capabilities: Capabilities) -> Task:
    given = [name for name in ("first_frame", "last_frame") if fields.get(name) is not None]
    task: Task = "fl2va" if given else "t2va"
    asked = fields.choice("task", ("t2va", "fl2va"))
    if asked not in (None, task):
        raise RequestError(
            "the task does not fit the keyframes", where="task", found=f"{asked} with {' and '.join(given) or 'no keyframe'}",
            expected="fl2va with first_frame or last_frame, t2va without",
        )  # fmt: skip
    if task not in capabilities.tasks:
        raise RequestError(
            f"{task} is not prepared here", where=" and ".join(given) or "first_frame, last_frame",
            found=task, expected=f"tasks {', '.join(capabilities.tasks)}",
            hint=f"prepare the base model with task {task}; distilled text-only models take no keyframe",
            http_status=422,
        )  # fmt: skip
    return task


def _frames(fields: Fields, capabilities: Capabilities) -> tuple[int, int]:
    """Frames asked for and frames served."""
    limits = capabilities.frames
    frames, seconds = fields.integer("num_frames"), fields.number("seconds", text_allowed=True)
    if seconds is None:
        requested = limits.default_frames if frames is None else frames
        return requested, canvas.check_frames(requested, limits)
    served = canvas.frames_of_seconds(seconds, limits)
    if frames is not None and canvas.check_frames(frames, limits) != served:
        raise RequestError(
            "seconds and num_frames contradict each other", where="seconds, num_frames",
            found=f"{seconds:g} s ({served} frames) and {frames} frames", expected="one of them, or both for one length",
        )  # fmt: skip
    return round(FPS * seconds), served


def _explicit_canvas(fields: Fields, capabilities: Capabilities) -> tuple[int, int] | None:
    """(width, height) if the request gives one, in whatever way; None for the default rule."""
    limits, multiple = capabilities.canvas, canvas.canvas_multiple(capabilities.config)
    given: dict[str, tuple[int, int]] = {}
    width, height = fields.integer("width"), fields.integer("height")
    if (width is None) != (height is None):
        raise RequestError(
            "width and height must be given together", where="width, height", expected="both or none"
        )
    if width is not None and height is not None:
        given["width, height"] = _sides(width, height)
    size = fields.text("size")
    if size not in (None, "auto"):
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", size or "")
        if match is None:
            raise RequestError(
                "not a size", where="size", found=quote(size), expected='"<width>x<height>" or "auto"'
            )
        given["size"] = int(match[1]), int(match[2])
    for where, (w, h) in given.items():
        canvas.check_canvas(w, h, limits, multiple, where)
    ratio = fields.text("aspect_ratio")
    if fields.integer("short_edge") not in (None, limits.short_edge):
        raise RequestError(
            "unsupported short edge", where="short_edge", found=quote(fields.get("short_edge")), expected=limits.short_edge,
            hint="give width and height for another size",
        )  # fmt: skip
    if ratio not in (None, "auto"):
        match = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,5})", ratio or "")
        if match is None:
            raise RequestError(
                "not an aspect ratio",
                where="aspect_ratio",
                found=quote(ratio),
                expected='"<w>:<h>" or "auto"',
            )
        given["aspect_ratio"] = canvas.resolve_canvas(
            int(match[1]), int(match[2]), limits, multiple, "aspect_ratio"
        )
    if len(set(given.values())) > 1:
        found = ", ".join(f"{where} {w}x{h}" for where, (w, h) in given.items())
        raise RequestError(
            "the canvas is given twice and differs", where=", ".join(given), found=found, expected="one size"
        )
    return next(iter(given.values()), None)


def _sides(width: int, height: int) -> tuple[int, int]:
    if max(abs(width), abs(height)) >= 2**31:  # beyond any picture; keeps messages and arithmetic small
        raise RequestError(
            "the canvas cannot be used", where="width, height", found=f"{quote(width)}, {quote(height)}",
            expected="sides in pixels",
        )  # fmt: skip
    return width, height


def _canvas(
    explicit: tuple[int, int] | None, keyframes: tuple[Keyframe, ...], capabilities: Capabilities
) -> tuple[int, int, Literal["request", "keyframe", "default"]]:
    if explicit is not None:
        return (*explicit, "request")
    limits, multiple = capabilities.canvas, canvas.canvas_multiple(capabilities.config)
    if keyframes:
        anchor = keyframes[0]
        where = f"{anchor.anchor}_frame"
        return (*canvas.resolve_canvas(*anchor.image.size, limits, multiple, where), "keyframe")
    return (*canvas.resolve_canvas(*limits.default_aspect, limits, multiple, "aspect_ratio"), "default")


def _quality(fields: Fields, capabilities: Capabilities) -> str:
    names = {}
    offered = (
        *capabilities.qualities,
        *(a for a, name in _QUALITY_ALIASES.items() if name in capabilities.qualities),
    )
    for where in ("quality", "accel"):
        name = fields.choice(where, offered, http_status=422)
        if name is not None:
            names[where] = _QUALITY_ALIASES.get(name, name)
    if len(set(names.values())) > 1:
        raise RequestError(
            "quality and accel contradict each other", where="quality, accel", found=names, expected="one"
        )
    return next(iter(names.values()), capabilities.qualities[0])


def _keyframes(
    fields: Fields, capabilities: Capabilities, resolve_image: Callable[[str], bytes] | None
) -> tuple[Keyframe, ...]:
    keyframes = []
    anchors: tuple[Anchor, ...] = ("first", "last")
    for anchor in anchors:
        where = f"{anchor}_frame"
        source = fields.get(where)
        if source is not None:
            data = read_image_source(source, where, capabilities.images.max_bytes, resolve_image)
            keyframes.append(Keyframe(anchor, decode_image(data, capabilities.images, where)))
    return tuple(keyframes)
