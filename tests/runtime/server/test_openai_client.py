"""The official client, unchanged, against a real server process."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.service import KEY, ServiceProcess

PICTURE = Path(__file__).parents[2] / "cases/inputs/images/good.png"
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")


def client_of(service: ServiceProcess, key: str = KEY, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, **options)


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[openai.OpenAI]:
    with client_of(service) as client:
        yield client


def test_create_poll_download_delete(client: openai.OpenAI, mp4: Path) -> None:
    job = client.videos.create_and_poll(
        model="minimax-h3", prompt="a harbor at dawn", seconds="5", size="1344x768",  # type: ignore[arg-type]
        extra_body={"seed": 7, "accel": "exact"},
    )  # fmt: skip
    assert (job.status, job.progress, job.error) == ("completed", 100, None)
    assert job.to_dict()["seed"] == 7
    assert job.to_dict()["num_frames"] == 124
    assert client.videos.download_content(job.id).read() == mp4.read_bytes()
    deleted = client.videos.delete(job.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (job.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError) as missing:
        client.videos.retrieve(job.id)
    assert missing.value.code == "video_not_found"


def test_create_with_a_file_as_keyframe(client: openai.OpenAI) -> None:
    job = client.videos.create(prompt="a", input_reference=PICTURE)
    assert job.to_dict()["task"] == "fl2va"


def test_nested_extra_body_and_a_reference_object(client: openai.OpenAI) -> None:
    import base64

    uri = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    body = {
        "target": {"short_edge": 768, "aspect_ratio": "1:1", "duration_seconds": 5},
        "image_reference": {"image_url": uri},
    }
    job = client.videos.create(prompt="a", extra_body=body)
    assert (job.size, job.to_dict()["task"]) == ("768x768", "fl2va")


def test_a_list_of_conditions_as_the_client_sends_it(client: openai.OpenAI) -> None:
    import base64

    uri = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    conditions = [
        {"type": "image", "role": "keyframe", "uri": uri, "frame_index": index} for index in (0, -1)
    ]
    job = client.videos.create(prompt="a", extra_body={"conditions": conditions})
    assert job.to_dict()["task"] == "fl2va"


def test_a_failed_job_is_a_completed_poll(client: openai.OpenAI) -> None:
    job = client.videos.create_and_poll(prompt="a [broken]")
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "internal"
    assert "secret path" not in job.error.message


def test_lists_page_by_cursor(client: openai.OpenAI) -> None:
    made = [client.videos.create(prompt=f"page {index}").id for index in range(5)]
    listed = [video.id for video, _ in zip(client.videos.list(limit=2), range(5), strict=False)]
    assert listed == list(reversed(made))
    assert (
        client.videos.list(limit=3, order="asc").data[0].created_at
        <= client.videos.retrieve(made[0]).created_at
    )


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"prompt": "a", "extra_body": {"num_frame": 124}}, openai.BadRequestError, "num_frame"),
        ({"prompt": "a", "seconds": "99"}, openai.BadRequestError, "seconds"),
        ({"prompt": "a", "model": "sora-2"}, openai.NotFoundError, "model"),
        (
            {"prompt": "a", "extra_body": {"num_inference_steps": 28}},
            openai.UnprocessableEntityError,
            "num_inference_steps",
        ),
    ],
)
def test_refusals_become_the_clients_exceptions(
    client: openai.OpenAI, fields: Any, kind: Any, param: str
) -> None:
    with pytest.raises(kind) as refusal:
        client.videos.create(**fields)
    assert refusal.value.param == param
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.request_id


def test_a_wrong_key(service: ServiceProcess) -> None:
    with client_of(service, "wrong") as client, pytest.raises(openai.AuthenticationError) as refusal:
        client.videos.list()
    assert refusal.value.code == "invalid_api_key"


def test_a_full_queue_is_a_rate_limit(start: Callable[..., ServiceProcess]) -> None:
    service = start(COLDFRAME_SERVE_MAX_QUEUED="1")
    running = service.create("[gate@1]")
    service.at_step(running["id"], 0)
    service.create("waits")
    with client_of(service, max_retries=0) as client, pytest.raises(openai.RateLimitError) as refusal:
        client.videos.create(prompt="too many")
    assert refusal.value.code == "queue_full"
    assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 120


def test_a_repeated_creation_with_one_key_is_one_job(client: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "openai-1"}
    first, second = (client.videos.create(prompt="once", extra_headers=headers).id for _ in range(2))
    assert first == second


def test_the_client_warns_of_nothing_else(client: openai.OpenAI) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client.videos.create(prompt="a", input_reference=("a.png", io.BytesIO(PICTURE.read_bytes())))
    assert all("Sora" in str(warning.message) for warning in caught)
