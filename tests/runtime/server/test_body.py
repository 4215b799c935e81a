"""Strict JSON, and request shapes of peers as the canonical body."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.server.body import Body, Upload, parse_object
from runtime.server.create import body_hash
from runtime.server.errors import ApiError, envelope, error_object
from runtime.server.peers import Canonical, Source, canonical

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5))
def test_every_json_object_is_read_as_written(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(alphabet='{}[]",:0123456789.eE-+truefalsn\\ud8', max_size=60).map(str.encode)
)
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(parse_object(data), dict)


def form(**fields: Any) -> Canonical:
    return canonical(Body(fields, is_form=True))


def as_json(**fields: Any) -> Canonical:
    return canonical(Body(fields))


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (rb'{"prompt": "x", "conditions": [{"\ud83d": 1}]}', r"\ud83d"),
        (rb'{"\ud83d": {}}', r"\ud83d"),
        (rb'{"\ud83d": 1, "\ud83d": 1}', r"\ud83d"),
        (rb'{"image_reference": [["a", "\ud83d"]]}', "image_reference"),
    ],
    ids=["key in a list", "key", "twice", "text in lists"],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(body: bytes, shown: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_object(body)
    error = error_object(refusal.value)
    assert (refusal.value.http_status, error["code"], error["param"]) == (400, "invalid_unicode", shown)
    assert json.dumps(envelope(error), ensure_ascii=False).encode()


def test_a_number_in_a_list_is_finite_too() -> None:
    with pytest.raises(ApiError, match="seed: is not a finite number"):
        parse_object(b'{"seed": [1, 1e999]}')


def test_numbers_arrive_as_text_in_forms_and_prompts_stay_text() -> None:
    made = form(
        prompt="2024", num_frames="124", seed="7", seconds="5", generate_sound="true", guidance_scale="1.0"
    )
    assert made.fields == {
        "prompt": "2024",
        "num_frames": 124,
        "seed": 7,
        "seconds": "5",
        "generate_sound": True,
        "guidance_scale": 1.0,
    }


def test_bracket_keys_nest() -> None:
    made = form(
        **{
            "prompt": "a",
            "target[short_edge]": "768",
            "target[aspect_ratio]": "16:9",
            "target[duration_seconds]": "5",
        }
    )
    assert made.fields == {"prompt": "a", "short_edge": 768, "aspect_ratio": "16:9", "seconds": "5"}


def test_lists_of_objects_arrive_column_wise() -> None:
    fields = {
        "conditions[][type]": ["image", "image"],
        "conditions[][uri]": ["data:1", "data:2"],
        "conditions[][frame_index]": ["0", "-1"],
    }
    made = form(prompt="a", **fields)
    assert made.pictures == {
        "first_frame": Source("conditions[0].uri", "data:1"),
        "last_frame": Source("conditions[1].uri", "data:2"),
    }


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ApiError) as refusal:
        form(prompt="a", **{"conditions[][type]": ["image", "image"], "conditions[][uri]": ["data:1"]})
    assert (refusal.value.code, refusal.value.where) == ("ambiguous_list", "conditions")


@pytest.mark.parametrize("container", ["extra_body", "extra_json", "extra_params", "extra_args", "nvext"])
def test_containers_are_lifted_and_the_top_wins(container: str) -> None:
    made = as_json(prompt="a", seed=1, **{container: {"seed": 2, "num_frames": 124}})
    assert made.fields == {"prompt": "a", "seed": 1, "num_frames": 124}
    assert made.blocks == (container == "nvext")
    assert form(prompt="a", **{container: '{"num_frames": 124}'}).fields == {"prompt": "a", "num_frames": 124}


UPLOAD = Upload(b"png")


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        ({"input_reference": UPLOAD}, UPLOAD, None),
        ({"input_reference": '{"image_url": "https://x.example/a.png"}'}, "https://x.example/a.png", None),
        ({"image_reference": {"image_url": "data:x"}}, "data:x", None),
        ({"image_reference": ["data:x", "data:y"]}, "data:x", "data:y"),
        ({"image_reference": '["data:x", {"image_url": {"url": "data:y"}}]'}, "data:x", "data:y"),
        ({"input_references": [UPLOAD, UPLOAD]}, UPLOAD, UPLOAD),
        ({"reference_url": "https://x.example/a.png"}, "https://x.example/a.png", None),
        (
            {"conditions": [{"type": "image", "role": "keyframe", "uri": "data:z", "frame_index": -1}]},
            None,
            "data:z",
        ),
        ({"first_frame": "data:x", "last_frame": UPLOAD}, "data:x", UPLOAD),
    ],
)
def test_every_way_to_give_keyframes(fields: dict[str, Any], first: Any, last: Any) -> None:
    made = as_json(prompt="a", **fields)
    values = {name: source.value for name, source in made.pictures.items()}
    assert values == {
        name: value for name, value in (("first_frame", first), ("last_frame", last)) if value is not None
    }
    assert made.fields == {"prompt": "a"}


@pytest.mark.parametrize(
    ("fields", "where", "code"),
    [
        ({"first_frame": "data:x", "input_reference": "data:y"}, "input_reference", "conflicting_parameters"),
        ({"image_reference": ["a", "b", "c"]}, "image_reference", "too_many_images"),
        ({"input_reference": 5}, "input_reference", "invalid_type"),
        ({"conditions": [{"type": "video", "uri": "x"}]}, "conditions[0]", "unsupported_parameter"),
        (
            {"conditions": [{"type": "image", "uri": "x", "frame_index": 5}]},
            "conditions[0].frame_index",
            "unsupported_parameter",
        ),
        ({"conditions": [{"uri": "x", "strength": 1}]}, "conditions[0].strength", "unknown_parameter"),
        ({"target": {"short_edge": 768, "fps": 24}}, "target.fps", "unknown_parameter"),
        ({"target": {"duration_seconds": 5}, "seconds": 6}, "seconds", "conflicting_parameters"),
        ({"extra_body": {"extra_body": {}}}, "extra_body.extra_body", "unknown_parameter"),
        ({"extra_body": "{"}, "extra_body", "invalid_json"),
        ({"generator_device": "tpu"}, "generator_device", "unsupported_parameter"),
        ({"output_path": "/tmp/x"}, "output_path", "unsupported_parameter"),
        ({"extra_body": {"video_path": "/etc/passwd"}}, "video_path", "unsupported_parameter"),
        ({"text_encoder_model_path": "x"}, "text_encoder_model_path", "unsupported_parameter"),
        ({"lora": "x"}, "lora", "unsupported_parameter"),
        ({"response_format": "path"}, "response_format", "unsupported_parameter"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"model": 5}, "model", "invalid_type"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], where: str, code: str) -> None:
    with pytest.raises(ApiError) as refusal:
        as_json(prompt="a", **fields)
    assert (refusal.value.where, refusal.value.code, refusal.value.http_status) == (where, code, 400)


@pytest.mark.parametrize("name", ["prompt", "seed", "model", "target[short_edge]", "extra_body[a][b]", "new"])
def test_a_file_in_a_field_that_is_no_picture_is_refused(name: str) -> None:
    with pytest.raises(ApiError, match="takes no file") as refusal:
        form(**{"prompt": "a", name: UPLOAD})
    where = {"target[short_edge]": "short_edge", "extra_body[a][b]": "a"}.get(name, name)
    assert (refusal.value.http_status, refusal.value.where) == (400, where)


def test_the_hash_of_a_request_does_not_depend_on_its_encoding() -> None:
    assert body_hash(as_json(prompt="a", seed=7)) == body_hash(form(prompt="a", seed="7"))
    assert body_hash(as_json(prompt="a", seed=7)) != body_hash(as_json(prompt="a", seed=8))
    with_picture = [body_hash(form(prompt="a", first_frame=Upload(data))) for data in (b"1", b"1", b"2")]
    assert with_picture[0] == with_picture[1] != with_picture[2]
