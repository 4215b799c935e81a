"""Every request case, then the rules that the cases leave open."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from loader.errors import ArtifactError, RequestError
from runtime.families.minimax_h3 import canvas
from runtime.families.minimax_h3.capabilities import Capabilities, capabilities_of
from runtime.families.minimax_h3.request import FIELDS, MAX_SEED, H3Request, parse_request
from runtime.families.minimax_h3.trajectory import shifts
from runtime.schedules import explicit_schedule, named_schedule
from tests.runtime.families.minimax_h3.small_config import small_config

INPUTS = Path(__file__).parents[3] / "cases" / "inputs"
CASES = [entry for entry in json.loads((INPUTS / "index.json").read_text()) if entry["group"] == "requests"]

FASTH3 = Capabilities(small_config(), {"t2va": (named_schedule("fasth3-8"),)})
BASE = Capabilities(
    small_config(),
    {
        "t2va": (named_schedule("base-49"), named_schedule("base-28")),
        "fl2va": (named_schedule("base-28"), named_schedule("base-49")),
    },
)
# decisions on the cases that leave the policy open; the FastH3 directory is text-only
REFUSED_BY_POLICY = {
    "R010": "empty", "R050": "integer", "R052": "integer", "R073": "size", "R074": "size", "R076": "size",
    "R077": "size", "R078": "size", "R094": "seed", "R113": "extra_body",
    "R120": "first_frame", "R121": "last_frame", "R122": "first_frame and last_frame",
}  # fmt: skip
# every word must appear, not only one of them
ALL_WORDS = {f"R{n:03}" for n in (*range(41, 45), *range(48, 50), *range(95, 105), 59, 123)}


def fetch_nothing(url: str) -> bytes:
    raise RequestError(
        "the URL could not be fetched: host does not resolve", where="first_frame", found=url[:60]
    )


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    return json.loads((INPUTS / case["file"]).read_text())


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_case(case: dict[str, Any]) -> None:
    expect, body = case["expect"], body_of(case)
    capabilities = (
        BASE if case["id"] >= "R124" else FASTH3
    )  # sources of pictures need a directory that takes them
    if expect["outcome"] == "reject" or case["id"] in REFUSED_BY_POLICY:
        with pytest.raises(RequestError) as caught:
            parse_request(body, capabilities, resolve_image=fetch_nothing)
        text = str(caught.value).lower()
        words = expect.get("say", [REFUSED_BY_POLICY.get(case["id"])])
        found = [word.lower() in text for word in words]
        assert all(found) if case["id"] in ALL_WORDS else any(found), text
        assert caught.value.where
        assert caught.value.http_status in (400, 413, 415, 422)
        assert text.isprintable()
        assert len(text) < 1500
        if "payload" in expect.get("log_must_not_contain", ""):
            payload = body["first_frame"].rpartition(",")[2]
            assert not payload or payload.lower() not in text
        return
    request = parse_request(body, capabilities)
    assert request.num_frames == expect.get("frames", 124)
    assert request.report()["seconds"] == expect.get("seconds", round(request.num_frames / 24, 6))
    if "audio_samples" in expect:
        assert canvas.audio_samples(request.num_frames, 32_000) == expect["audio_samples"]
    assert request.prompt == body["prompt"]
    assert request.seed == body.get("seed", request.seed)
    assert request.seed_origin == ("request" if "seed" in body else "drawn")
    assert (request.width, request.height) == (body.get("width", 1344), body.get("height", 768))
    json.dumps(request.report())


def test_number_of_cases() -> None:
    assert len(CASES) > 110


@pytest.mark.parametrize(
    ("names", "anchors"),
    [
        (("first_frame",), ["first"]),
        (("last_frame",), ["last"]),
        (("first_frame", "last_frame"), ["first", "last"]),
    ],
    ids=["R120", "R121", "R122"],
)
def test_keyframes_where_they_are_served(names: tuple[str, ...], anchors: list[str]) -> None:
    case = next(c for c in CASES if c["id"] == "R122")
    body = body_of(case)
    body = {k: v for k, v in body.items() if not k.endswith("_frame") or k in names}
    request = parse_request(body, BASE)
    assert request.task == "fl2va"
    assert [k.anchor for k in request.keyframes] == anchors
    assert all(k.image.size == (8, 8) for k in request.keyframes)
    assert request.schedule.name == "base-28"
    assert request.canvas_origin == "request"


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 40)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((300, 400), (768, 1024)),
        ((640, 360), (1344, 768)),
        ((2100, 900), (1536, 672)),
        ((100, 100), (768, 768)),
    ],
)
def test_canvas_follows_the_first_keyframe_given(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """C57: 3:4, 16:9, 21:9 and square pictures, without an explicit canvas."""
    request = parse_request({"prompt": "x", "last_frame": png(*size)}, BASE)
    assert (request.width, request.height, request.canvas_origin) == (*expected, "keyframe")
    both = parse_request({"prompt": "x", "first_frame": png(*size), "last_frame": png(90, 50)}, BASE)
    assert (both.width, both.height) == expected


def test_elongated_keyframes_need_an_explicit_canvas() -> None:
    with pytest.raises(
        RequestError, match=r"first_frame: unsupported aspect ratio.*500:100.*width and height"
    ):
        parse_request({"prompt": "x", "first_frame": png(500, 100)}, BASE)
    request = parse_request({"prompt": "x", "first_frame": png(500, 100), "size": "512x256"}, BASE)
    assert (request.width, request.height) == (512, 256)


def test_defaults_are_reported() -> None:
    request = parse_request({"prompt": "  a cat \n"}, BASE)
    assert request.prompt == "  a cat \n"
    assert 0 <= request.seed <= MAX_SEED
    assert request.report() | {"seed": 0} == {
        "task": "t2va", "width": 1344, "height": 768, "canvas_origin": "default", "num_frames": 124,
        "requested_frames": 124, "seconds": 5.166667, "fps": 24, "seed": 0, "seed_origin": "drawn", "schedule": "base-49",
        "num_evaluations": 49, "noise": "single_stream", "quality": "exact", "keyframes": [], "anchor_fit": None,
    }  # fmt: skip
    assert request.latent_shape(small_config()) == (37, 48, 84)
    assert request.num_audio_latents == 207
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.seed = 3  # type: ignore[misc]


def test_drawn_seeds_differ() -> None:
    assert len({parse_request({"prompt": "x"}, BASE).seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"schedule": "base-28"}, "base-28"), ({"num_evaluations": 28}, "base-28"), ({"num_inference_steps": 29}, "base-28"),
        ({"num_inference_steps": 50}, "base-49"), ({"flow_shift": 12, "audio_flow_shift": 3.0}, "base-49"),
        ({"guidance_scale": 1, "negative_prompt": ""}, "base-49"),
        ({"sigmas": list(named_schedule("base-28").video_sigmas)}, "base-28"),
        ({"timesteps": list(named_schedule("base-28").video_timesteps)}, "base-28"),
        ({"schedule": "base-28", "num_evaluations": 28, "num_inference_steps": 29, "seed": None}, "base-28"),
    ],
)  # fmt: skip
def test_matching_trajectory_fields_choose_the_schedule(fields: dict[str, object], name: str) -> None:
    assert parse_request({"prompt": "x", **fields}, BASE).schedule.name == name


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"num_inference_steps": 49}, "num_inference_steps"), ({"num_inference_steps": 28}, "num_inference_steps"),
        ({"schedule": "base-28", "num_evaluations": 49}, "num_evaluations"), ({"schedule": "fasth3-8"}, "schedule"),
        ({"flow_shift": 10}, "flow_shift"), ({"sigmas": []}, "sigmas"), ({"sigmas": [1e300, 0]}, "sigmas"),
        ({"timesteps": [999.0]}, "timesteps"), ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"guidance_scale": True}, "guidance_scale"), ({"guidance_scale": "1"}, "guidance_scale"),
        ({"sigmas": [1, None]}, "sigmas"), ({"sigmas": "1,0"}, "sigmas"), ({"flow_shift": float("nan")}, "flow_shift"),
        ({"flow_shift": 10**400}, "flow_shift"), ({"schedule": 7}, "schedule"), ({"sigmas": [1.0] * 2001}, "sigmas"),
    ],
)  # fmt: skip
def test_other_trajectories_are_refused(fields: dict[str, object], where: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"prompt": "x", **fields}, BASE)
    assert caught.value.where == where


def test_ladders_without_a_shift_answer_no_shift_question() -> None:
    own = explicit_schedule("own-2", [1.0, 0.5, 0.0], [1.0, 0.25, 0.0])
    long = [1 - i / 1024 for i in range(1025)]
    assert shifts(explicit_schedule("long", long, long)) is None
    capabilities = Capabilities(small_config(), {"t2va": (own,)})
    assert parse_request({"prompt": "x", "num_inference_steps": 2}, capabilities).schedule is own
    for field in ("flow_shift", "audio_flow_shift"):
        with pytest.raises(RequestError, match="own-2"):
            parse_request({"prompt": "x", field: 12.0}, capabilities)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"size": "768x1344"}, (768, 1344)), ({"size": "auto"}, (1344, 768)), ({"aspect_ratio": "1:1"}, (768, 768)),
        ({"aspect_ratio": "21:9", "short_edge": 768}, (1536, 672)), ({"aspect_ratio": "auto"}, (1344, 768)),
        ({"size": "1344x768", "width": 1344, "height": 768, "aspect_ratio": "16:9"}, (1344, 768)),
    ],
)  # fmt: skip
def test_ways_to_give_a_canvas(fields: dict[str, object], size: tuple[int, int]) -> None:
    request = parse_request({"prompt": "x", **fields}, BASE)
    assert (request.width, request.height) == size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": "1344x768", "aspect_ratio": "1:1"}, "size, aspect_ratio: the canvas is given twice"),
        ({"aspect_ratio": "5:1"}, "aspect_ratio: unsupported"), ({"aspect_ratio": "0:1"}, "aspect_ratio: unsupported"),
        ({"aspect_ratio": "wide"}, "not an aspect ratio"), ({"short_edge": 512}, "short_edge"),
        ({"width": 10**5000, "height": 768}, "16610 bits"), ({"size": "99999999x99999999"}, "nearest legal"),
        ({"width": 1344.0, "height": 768}, "width: must be an integer"), ({"size": 1344}, "size: must be a string"),
        ({"fps": 25}, "fps"), ({"n": True}, "n: unsupported"), ({"n": 2}, "allowed: 1"), ({"generate_sound": False}, "sound"),
        ({"generate_sound": 1}, "sound"), ({"output_format": "webm"}, "mp4"), ({"noise": "fresh"}, "single_stream, reseed"),
        ({"task": "fl2va"}, "task: the task does not fit"), ({"task": "ref2va"}, "t2va, fl2va"),
        ({"quality": "exact", "accel": "high"}, "accel"), ({"anchor_fit": "crop"}, "cover_crop"),
        ({"seconds": "five"}, "seconds"), ({"seconds": True}, "seconds"), ({"seconds": float("inf")}, "not finite"),
    ],
)  # fmt: skip
def test_other_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_request({"prompt": "x", **fields}, BASE)


def test_unknown_fields_are_listed_together_with_suggestions() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({"prompt": "x", "num_frame": 3, "sed": 4, "video_path": "/x", "\x1b[31m": 1}, BASE)
    text = str(caught.value)
    assert "num_frame, sed, video_path, \\x1b[31m: unknown fields" in text
    assert "did you mean num_frames for 'num_frame'?" in text
    assert "never names a path of the server" in text


@pytest.mark.parametrize("body", [None, [], "x", 7, [("prompt", "x")]])
def test_bodies_that_are_no_objects_are_refused(body: object) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        parse_request(body, BASE)  # type: ignore[arg-type]


def test_form_parts_are_text() -> None:
    body = {"prompt": "7", "num_frames": "124", "seed": "9", "width": "768", "height": "768", "seconds": "5",
            "n": "1", "guidance_scale": "1.0", "generate_sound": "true", "num_inference_steps": "50", "flow_shift": "12"}  # fmt: skip
    request = parse_request(body, BASE, form=True)
    assert (request.prompt, request.num_frames, request.seed, request.width) == ("7", 124, 9, 768)
    with pytest.raises(RequestError, match=r"n: unsupported value; found '1'"):
        parse_request(body, BASE)
    with pytest.raises(RequestError, match="seed: must be an integer"):
        parse_request({"prompt": "x", "seed": "7.5"}, BASE, form=True)


def test_null_means_not_given() -> None:
    body = dict.fromkeys(FIELDS) | {"prompt": "x", "seed": 1}
    assert parse_request(body, BASE) == parse_request({"prompt": "x", "seed": 1}, BASE)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["auto", "5", "1:1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=8), VALUES, max_size=5), st.booleans()
)
def test_any_body_is_parsed_or_refused(body: dict[str, object], form: bool) -> None:
    try:
        request = parse_request({"prompt": "x", **body}, BASE, form=form)
    except RequestError as error:
        text, ours = str(error), None
    else:
        text, ours = "", request
    assert ours is None or isinstance(ours, H3Request)
    assert text.isprintable()


def manifest(config: dict[str, Any], tasks: list[str], schedules: list[tuple[str, str]]) -> SimpleNamespace:
    records = [
        SimpleNamespace(
            name=n,
            task=t,
            video_sigmas=named_schedule(n).video_bits,
            audio_sigmas=named_schedule(n).audio_bits,
        )
        for n, t in schedules
    ]
    return SimpleNamespace(config=config, model={"tasks": tasks}, schedules=tuple(records))


def test_capabilities_come_from_the_manifest() -> None:
    config = small_config().to_dict()
    small = capabilities_of(
        manifest(config, ["fl2va", "t2va"], [("base-2", "t2va"), ("base-49", "t2va"), ("base-2", "fl2va")])
    )
    assert small.tasks == ("t2va", "fl2va")
    assert [s.name for s in small.schedules["t2va"]] == ["base-49", "base-2"]
    assert small.schedules["fl2va"][0].same_trajectory(named_schedule("base-2"))
    tiny = parse_request({"prompt": "x", "width": 64, "height": 64, "num_frames": 22}, small)
    assert (tiny.width, tiny.height, tiny.num_frames) == (64, 64, 22)
    assert parse_request({"prompt": "x"}, small).width == 128

    released = {**config, "transformer": {**config["transformer"], "hidden_size": 5376}}
    full = capabilities_of(manifest(released, ["t2va"], [("fasth3-8", "t2va")]))
    assert full.tasks == ("t2va",)
    assert full.canvas == canvas.CanvasLimits()
    assert full.frames == canvas.FrameLimits()
    strict = capabilities_of(manifest(released, ["t2va"], [("fasth3-8", "t2va")]), strict=True)
    with pytest.raises(RequestError, match="num_frames"):
        parse_request({"prompt": "x", "num_frames": 346}, strict)


@pytest.mark.parametrize(
    ("tasks", "schedules"), [(["t2va", "fl2va"], [("base-2", "t2va")]), ([], []), (["t2va"], [])]
)
def test_tasks_without_a_schedule_are_a_bad_artifact(
    tasks: list[str], schedules: list[tuple[str, str]]
) -> None:
    with pytest.raises(ArtifactError, match="schedule"):
        capabilities_of(manifest(small_config().to_dict(), tasks, schedules))
