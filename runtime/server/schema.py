"""The OpenAPI document: structs for what is sent and taken, and one table of routes. Built on first request.

The structs describe; validation of a request is the family's `parse`, and a test holds the two together.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

Size = Annotated[str, Meta(pattern=r"^[1-9][0-9]{2,3}x[1-9][0-9]{2,3}$", examples=["1344x768"])]
Prompt = Annotated[str, Meta(min_length=1, max_length=65536)]
Picture = Annotated[
    str, Meta(description="data:image/png|jpeg|webp;base64,… or, where allowed, an http(s) url")
]
VideoId = Annotated[str, Meta(pattern=r"^video_[0-9a-f]{32}$")]


class CreateVideo(Struct, forbid_unknown_fields=True):
    """Request for a video. Clients of peers may use further names; see the API page."""

    prompt: Prompt
    model: str | UnsetType = UNSET
    size: Size | UnsetType = UNSET
    width: Annotated[int, Meta(ge=64, multiple_of=32)] | UnsetType = UNSET
    height: Annotated[int, Meta(ge=64, multiple_of=32)] | UnsetType = UNSET
    aspect_ratio: Literal["21:9", "16:9", "4:3", "1:1", "3:4", "9:16", "auto"] | UnsetType = UNSET
    short_edge: int | UnsetType = UNSET
    seconds: Annotated[float, Meta(ge=4, le=15)] | str | UnsetType = UNSET
    num_frames: Annotated[int, Meta(ge=1, le=362, description="raised to the next 17n+5")] | UnsetType = UNSET
    fps: Literal[24] | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | UnsetType = UNSET
    num_inference_steps: Annotated[int, Meta(description="must be a prepared schedule")] | UnsetType = UNSET
    task: Literal["t2va", "fl2va"] | UnsetType = UNSET
    first_frame: Picture | UnsetType = UNSET
    last_frame: Picture | UnsetType = UNSET
    accel: str | UnsetType = UNSET
    response_format: Literal["url", "b64_json"] | UnsetType = UNSET
    stream: bool | UnsetType = UNSET


class Failure(Struct):
    """Why a request was refused or a job failed."""

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: str


class Error(Struct):
    """Body of every refusal."""

    error: Failure
    detail: str


class Audio(Struct):
    sample_rate: Literal[32000]
    channels: Literal[2]


class Video(Struct):
    """A job and, once completed, its result."""

    id: VideoId
    object: Literal["video"]
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: Annotated[int, Meta(ge=0, le=100)]
    phase: Literal["queued", "loading", "preprocess", "text_encode", "denoise", "decode", "encode", "mux"]
    created_at: int
    completed_at: int | None
    expires_at: int | None
    size: str
    seconds: str
    prompt: str | None
    quality: str
    remixed_from_video_id: None
    error: Failure | None
    url: str | None
    width: int | None
    height: int | None
    fps: int
    num_frames: int | None
    audio: Audio
    seed: int | None
    num_inference_steps: int | None
    num_evaluations: int | None
    task: str | None
    accel: str
    bundle_id: str
    inference_time_s: float | None
    stage_durations: dict[str, float]
    peak_memory_mb: float | None
    cold_start: dict[str, float] | None
    sha256: str | None
    created: int | UnsetType = UNSET
    data: list[dict[str, Any]] | UnsetType = UNSET


class VideoList(Struct):
    object: Literal["list"]
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Struct):
    id: VideoId
    object: Literal["video.deleted"]
    deleted: Literal[True]


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    aliases: list[str]
    bundle_id: str
    supported_task_types: list[str]
    schedules: list[dict[str, Any]]
    accel: list[str]
    sizes: list[str]
    min_seconds: float
    default_seconds: float
    max_seconds: float
    fps: int
    state: Literal["loading", "ready"]


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Health(Struct):
    status: str
    phase: str
    loaded_bytes: int
    total_bytes: int


class Alive(Struct):
    status: Literal["ok"]


class Version(Struct):
    version: str
    python: str


class Status(Struct):
    worker: dict[str, Any]
    queue: dict[str, Any]


class ServerSentEvent(Struct):
    """One event of a stream; `data` is JSON text."""

    data: str
    event: Literal["status", "phase", "progress", "completed", "failed"] | UnsetType = UNSET
    id: str | UnsetType = UNSET


class StartList(Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]


STRUCTS = (
    CreateVideo,
    Error,
    Video,
    VideoList,
    Deleted,
    Model,
    ModelList,
    Health,
    Alive,
    Version,
    Status,
    StartList,
    ServerSentEvent,
)
BAD = (400, 422)
ID = {
    "name": "video_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^video_[0-9a-f]{32}$"},
}


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _ref(struct: type[Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}


def _json(struct: type[Struct], kind: str = "application/json") -> dict[str, Any]:
    return {kind: _ref(struct)}


def _binary(kind: str) -> dict[str, Any]:
    return {kind: {"schema": {"type": "string", "format": "binary"}}}


def _text(kind: str) -> dict[str, Any]:
    return {kind: {"schema": {"type": "string"}}}


def _operation(
    name: str,
    summary: str,
    content: dict[str, Any],
    *,
    errors: tuple[int, ...] = (),
    parameters: tuple[dict[str, Any], ...] = (),
    body: bool = False,
    is_open: bool = False,
    also: dict[str, Any] | None = None,
) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}, **(also or {})}
    refusals = {"description": "refused", "content": _json(Error)}
    responses |= {str(status): refusals for status in (*errors, *(() if is_open else (401,)))}
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = list(parameters)
    if body:
        forms = {
            "application/json": _ref(CreateVideo),
            "multipart/form-data": {"schema": {"$ref": "#/components/schemas/CreateVideoForm"}},
        }
        operation["requestBody"] = {"required": True, "content": forms}
    operation["security"] = [] if is_open else [{"key": []}]
    return operation


_CREATE = (400, 404, 408, 409, 413, 415, 422, 429, 503, 507)
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}
_PREFER = {
    "name": "Prefer",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "examples": ["wait=60"]},
}
_LIST = (
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    _query("after", {"type": "string"}),
    _query("order", {"enum": ["asc", "desc"], "default": "desc"}),
)


def _paths() -> dict[str, Any]:
    event_stream = _json(ServerSentEvent, "text/event-stream")
    created = {**_json(Video), **event_stream}
    health = {"503": {"description": "not now", "content": _json(Health)}}
    range_header = {"name": "Range", "in": "header", "required": False, "schema": {"type": "string"}}
    content_also = {
        "206": {
            "description": "part of the file",
            "content": {**_binary("video/mp4"), **_binary("multipart/byteranges")},
        },
        "304": {"description": "not modified"},
    }
    content_parameters = (ID, _query("variant", {"enum": ["video", "0", "live"]}), range_header)
    startup = {**_json(StartList), "image/svg+xml": {"schema": {"type": "string"}}}
    form = _query("format", {"enum": ["json", "trace", "svg"]})
    return {
        "/v1/videos": {
            "post": _operation("createVideo", "Create a video job", created, errors=(*_CREATE, 500, 504), parameters=(_KEY, _PREFER), body=True),
            "get": _operation("listVideos", "List jobs of this key", _json(VideoList), errors=(400, 404), parameters=_LIST),
        },
        "/v1/videos/sync": {
            "post": _operation("createVideoSync", "Create and wait for the file", _binary("video/mp4"), errors=(*_CREATE, 500, 504), parameters=(_KEY,), body=True)
        },
        "/v1/videos/{video_id}": {
            "get": _operation("getVideo", "Retrieve a job", _json(Video), errors=(404,), parameters=(ID,)),
            "delete": _operation("deleteVideo", "Cancel if unfinished, then forget", _json(Deleted), errors=(404,), parameters=(ID,)),
        },
        "/v1/videos/{video_id}/content": {
            "get": _operation("getContent", "Download the MP4", _binary("video/mp4"), errors=(400, 404, 410, 416, 422), parameters=content_parameters, also=content_also)
        },
        "/v1/videos/{video_id}/cancel": {"post": _operation("cancelVideo", "Stop a job", _json(Video), errors=(404,), parameters=(ID,))},
        "/v1/videos/{video_id}/events": {"get": _operation("videoEvents", "Follow a job", event_stream, errors=(404,), parameters=(ID,))},
        "/v1/models": {"get": _operation("listModels", "What is served here", _json(ModelList), errors=(503,))},
        "/v1/models/{model}": {
            "get": _operation(
                "getModel", "One model", _json(Model), errors=(404, 503),
                parameters=({"name": "model", "in": "path", "required": True, "schema": {"type": "string"}},),
            )
        },
        "/v1/startup": {"get": _operation("starts", "The last starts", startup, errors=(400, 404), parameters=(form, _query("id", {"type": "string"})))},
        "/v1/status": {"get": _operation("status", "Worker and queue", _json(Status))},
        "/metrics": {"get": _operation("metrics", "Prometheus text", _text("text/plain"))},
        "/health": {"get": _operation("health", "Requests are accepted", _json(Health), is_open=True, also=health)},
        "/ready": {"get": _operation("ready", "Weights are in place", _json(Health), is_open=True, also=health)},
        "/livez": {"get": _operation("livez", "The process runs", _json(Alive), is_open=True)},
        "/version": {"get": _operation("version", "Version", _json(Version), is_open=True)},
    }  # fmt: skip


@functools.cache
def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 document of the service."""
    _, components = msgspec.json.schema_components(STRUCTS, ref_template="#/components/schemas/{name}")
    components["CreateVideoForm"] = _form_schema(components["CreateVideo"])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "coldframe",
            "version": version,
            "summary": "Video with sound from text and keyframes",
        },
        "paths": _paths(),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _form_schema(create: dict[str, Any]) -> dict[str, Any]:
    """The same fields as multipart parts: pictures are files; blocking answers need JSON."""
    properties = {name: schema for name, schema in create["properties"].items() if name != "response_format"}
    for name in ("first_frame", "last_frame", "input_reference"):
        properties[name] = {"type": "string", "format": "binary"}
    return {**create, "title": "CreateVideoForm", "properties": properties}
