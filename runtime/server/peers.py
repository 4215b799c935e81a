"""Request shapes of several clients → one canonical body. Nothing is dropped silently: every name is used or refused.

Known shapes: OpenAI's SDK (multipart, bracket keys), SGLang Diffusion, vLLM-Omni, FastVideo, NVIDIA Dynamo. Values
are not checked here beyond what moving them needs; the family's `parse` does that with the names it knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.server.body import Body, Upload, parse_object
from runtime.server.errors import ApiError

CONTAINERS = ("extra_body", "extra_json", "extra_params", "extra_args", "nvext")
REFUSED = frozenset(
    {
        "output_path", "output_file_path", "output_file_name", "video_path", "image_path", "perf_dump_path", "save_output",
        "return_file_paths_only", "model_path", "text_encoder_model_path", "vae_model_path", "transformer_model_path",
        "lora", "lora_path", "lora_nickname", "diffusers_kwargs",
    }
)  # fmt: skip
"""Names by which a client of a peer could reach the server's files or code."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "output_quality": ("default", "", None),
    "output_compression": (None,),
    "generator_device": ("cpu", "cuda", None),
    "user": (None, ""),
}
"""Fields of peers that the family does not know: accepted at the value that they have anyway, else refused by name."""
INTEGERS = frozenset(
    {"num_frames", "width", "height", "seed", "fps", "num_inference_steps", "short_edge", "n"}
)
INTEGERS |= {"num_outputs_per_prompt", "frame_index"}
FLOATS = frozenset({"guidance_scale", "flow_shift", "audio_flow_shift"})
BOOLEANS = frozenset({"enable_teacache", "generate_sound", "stream"})
PICTURE_FIELDS = ("input_reference", "image_reference", "input_references", "reference_url", "conditions")
JSON_FIELDS = frozenset({*CONTAINERS, "target", "conditions", "image_reference"})
RESPONSE_FORMATS = ("url", "b64_json")


@dataclass(frozen=True)
class Source:
    """A keyframe as given: uploaded bytes, or a text (data URI or address), and the client's name for the field."""

    where: str
    value: Upload | str


@dataclass(frozen=True)
class Canonical:
    """One creation, the same for every client.

    Attributes:
        fields: for the family's `parse`, without pictures.
        pictures: `first_frame` and `last_frame` → where it comes from.
        model: name the client asked for, if any.
        response_format: `url` or `b64_json` where the client asked for a blocking answer of that form.
        stream: whether the answer is the event stream.
        blocks: whether the shape of the request asks to wait for the result.
    """

    fields: dict[str, Any]
    pictures: dict[str, Source] = field(default_factory=dict)
    model: str | None = None
    response_format: str | None = None
    stream: bool = False
    blocks: bool = False


def canonical(body: Body) -> Canonical:
    """Flatten, rename, and separate what concerns the transport.

    Raises: ApiError 400 naming the field.
    """
    raw = _from_form(body.fields) if body.is_form else dict(body.fields)
    blocks = not body.is_form and ("response_format" in raw or "nvext" in raw)
    raw = _flatten(raw)
    for name in raw:
        if name in REFUSED or name.endswith("_model_path"):
            raise ApiError(
                "unknown field",
                code="unsupported_parameter",
                where=name,
                hint="a request never names server paths or weights",
            )
    for name, allowed in NEUTRAL.items():
        if name in raw and not _is_one_of(raw.pop(name), allowed):
            shown = ", ".join(json.dumps(value) for value in allowed)
            raise ApiError(
                "is not supported by this model", code="unsupported_parameter", where=name, expected=shown
            )
    _apply_target(raw)
    pictures = _pictures(raw)
    _refuse_files(raw)
    model, response_format, stream = (
        raw.pop("model", None),
        raw.pop("response_format", None),
        raw.pop("stream", False),
    )
    if model is not None and not isinstance(model, str):
        raise ApiError("must be text", where="model", code="invalid_type", found=type(model).__name__)
    if response_format not in (None, *RESPONSE_FORMATS):
        raise ApiError(
            "unknown response format",
            where="response_format",
            code="unsupported_parameter",
            expected="url, b64_json",
        )
    if body.is_form and response_format == "b64_json":
        raise ApiError(
            "a form is answered with the job's object, without waiting", code="unsupported_parameter",
            where="response_format", hint="send JSON for a blocking answer",
        )  # fmt: skip
    if not isinstance(stream, bool):
        raise ApiError(
            "must be true or false", where="stream", code="invalid_type", found=type(stream).__name__
        )
    return Canonical(raw, pictures, model, response_format, stream, blocks)


# ---- forms

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def _from_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Form fields as the JSON they stand for: bracket keys nested, JSON texts parsed, numbers where a number belongs."""
    raw: dict[str, Any] = {}
    for name, value in fields.items():
        base, _, rest = name.partition("[")
        path = _BRACKETS.findall(name) if rest else []
        if rest and (not base or base + "".join(f"[{part}]" for part in path) != name):
            raise ApiError("malformed field name", where=name[:80], code="invalid_multipart")
        if path and path != [""]:
            _nest(raw, base, path, value, name)
        elif isinstance(value, list) and base not in (
            "input_references",
            "input_reference",
            "image_reference",
        ):
            raise ApiError("is given more than once", where=base[:80], code="duplicate_field")
        else:
            raw[base] = value if isinstance(value, Upload | list) else _form_value(base, value)
    for name, value in raw.items():
        if isinstance(value, dict) and "" in value:
            raw[name] = _rows(name, value.pop(""))
    return raw


def _nest(raw: dict[str, Any], base: str, path: list[str], value: Any, name: str) -> None:
    """`target[short_edge]` → nested; `conditions[][type]` (columns of a list) → collected under the key ''."""
    holder = raw.setdefault(base, {})
    if not isinstance(holder, dict) or len(path) > 2:
        raise ApiError("malformed field name", where=name[:80], code="invalid_multipart")
    if path[0] == "":
        column = holder.setdefault("", {}).setdefault(path[1], [])
        values = value if isinstance(value, list) else [value]
        column.extend(v if isinstance(v, Upload) else _form_value(path[1], v) for v in values)
        return
    for part in path[:-1]:
        holder = holder.setdefault(part, {})
    if isinstance(value, list):
        raise ApiError("is given more than once", where=name[:80], code="duplicate_field")
    holder[path[-1]] = _form_value(path[-1], value)


def _rows(name: str, columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise ApiError(
            "the elements of this list do not all have the same keys, so they cannot be told apart",
            where=name, code="ambiguous_list", hint="send the list as one JSON string",
        )  # fmt: skip
    return [{key: column[i] for key, column in columns.items()} for i in range(lengths.pop())]


def _form_value(name: str, text: Any) -> Any:
    """Text of a form as the type its field has; what does not parse stays text and is refused by its type later."""
    if not isinstance(text, str):
        return text
    if name in JSON_FIELDS and text.lstrip()[:1] in ("{", "["):
        return _json_text(name, text)
    if name in BOOLEANS and text in ("true", "false"):
        return text == "true"
    if name in INTEGERS and re.fullmatch(r"-?[0-9]{1,40}", text, re.ASCII):
        return int(text)
    if name in FLOATS and re.fullmatch(r"-?[0-9]{1,40}(\.[0-9]{1,40})?", text, re.ASCII):
        return float(text)
    return text


def _json_text(name: str, text: str) -> Any:
    try:
        return parse_object(f'{{"value":{text}}}'.encode())["value"]
    except ApiError as error:
        raise ApiError(f"is not valid JSON: {error.message}", where=name, code="invalid_json") from None


# ---- containers and aliases


def _flatten(raw: dict[str, Any]) -> dict[str, Any]:
    """Lift the content of containers; an explicit field on top wins over the same name inside one."""
    lifted: dict[str, Any] = {}
    for container in CONTAINERS:
        if container not in raw:
            continue
        content = raw.pop(container)
        if isinstance(content, str):
            content = _json_text(container, content)
        if not isinstance(content, dict):
            raise ApiError(
                "must be an object", where=container, code="invalid_type", found=type(content).__name__
            )
        if nested := set(content) & set(CONTAINERS):
            raise ApiError(
                "containers cannot be nested", where=f"{container}.{min(nested)}", code="unknown_parameter"
            )
        lifted = {**content, **lifted}
    return {**lifted, **raw}


def _apply_target(raw: dict[str, Any]) -> None:
    target = raw.pop("target", None)
    if target is None:
        return
    if not isinstance(target, dict):
        raise ApiError("must be an object", where="target", code="invalid_type", found=type(target).__name__)
    names = {"short_edge": "short_edge", "aspect_ratio": "aspect_ratio", "duration_seconds": "seconds"}
    for name, value in target.items():
        if name not in names:
            raise ApiError(
                "unknown field",
                where=f"target.{name}"[:80],
                code="unknown_parameter",
                expected=", ".join(names),
            )
        if raw.setdefault(names[name], value) != value:
            raise ApiError(
                "differs from the same quantity in target", where=names[name], code="conflicting_parameters"
            )


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in allowed)


# ---- pictures


def _pictures(raw: dict[str, Any]) -> dict[str, Source]:
    """All the ways to give keyframes → first_frame, last_frame."""
    pictures: dict[str, Source] = {}
    for name in ("first_frame", "last_frame"):
        if raw.get(name) is not None:
            pictures[name] = _reference(name, raw[name])
        raw.pop(name, None)
    for name in PICTURE_FIELDS:
        value = raw.pop(name, None)
        if value is None:
            continue
        found = _conditions(value) if name == "conditions" else _ordered(name, value)
        if pictures:
            raise ApiError(
                "keyframes are given in more than one way", where=name, code="conflicting_parameters"
            )
        pictures = found
    return pictures


def _refuse_files(raw: Mapping[str, Any]) -> None:
    for name, value in raw.items():
        if _holds_file(value):
            raise ApiError("takes no file", where=name[:80], code="invalid_type", found="an upload")


def _holds_file(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_file, value.values()))
    return isinstance(value, Upload) or (isinstance(value, list) and any(map(_holds_file, value)))


def _ordered(name: str, value: Any) -> dict[str, Source]:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _json_text(name, value)
    values = value if isinstance(value, list) else [value]
    if len(values) > 2:
        raise ApiError(
            "too many keyframes", where=name, code="too_many_images", found=len(values), expected="at most 2"
        )
    frames = ("first_frame", "last_frame")
    return {frame: _reference(name, item) for frame, item in zip(frames, values, strict=False)}


def _conditions(value: Any) -> dict[str, Source]:
    if isinstance(value, str):
        value = _json_text("conditions", value)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ApiError("must be a list of objects", where="conditions", code="invalid_type")
    pictures: dict[str, Source] = {}
    for index, item in enumerate(value):
        where = f"conditions[{index}]"
        unknown = set(item) - {"type", "role", "uri", "frame_index"}
        if unknown:
            raise ApiError("unknown field", where=f"{where}.{min(unknown)}"[:80], code="unknown_parameter")
        if item.get("type", "image") != "image" or item.get("role", "keyframe") != "keyframe":
            raise ApiError(
                "only images as keyframes are supported", where=where, code="unsupported_parameter"
            )
        frame = item.get("frame_index", 0)
        if isinstance(frame, bool) or frame not in (0, -1):
            raise ApiError(
                "keyframes stand at the first or the last frame",
                where=f"{where}.frame_index",
                code="unsupported_parameter",
                expected="0, -1",
            )
        name = "first_frame" if frame == 0 else "last_frame"
        if name in pictures:
            raise ApiError("two keyframes for one place", where=where, code="conflicting_parameters")
        pictures[name] = _reference(f"{where}.uri", item.get("uri"))
    return pictures


def _reference(where: str, value: Any) -> Source:
    """An upload, a text, or one of the objects that clients wrap a text in."""
    if isinstance(value, dict):
        if set(value) != {"image_url"}:
            raise ApiError("must hold image_url and nothing else", where=where, code="unsupported_parameter")
        value = value["image_url"]
        if isinstance(value, dict) and set(value) == {"url"}:
            value = value["url"]
    if not isinstance(value, Upload | str):
        raise ApiError(
            "must be an image: an upload, a data: uri or a url",
            where=where,
            code="invalid_type",
            found=type(value).__name__,
        )
    return Source(where, value)
