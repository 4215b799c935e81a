"""Downloads: ranges, conditions, and files that are not there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.service import ServiceProcess, until


@pytest.fixture(scope="module")
def video(service: ServiceProcess) -> str:
    return str(service.finished(service.create()["id"])["id"])


def test_the_whole_file_with_its_digest_as_etag(service: ServiceProcess, video: str, mp4: Path) -> None:
    response = service.client.get(f"/v1/videos/{video}/content")
    data = mp4.read_bytes()
    assert response.content == data
    assert response.headers["etag"] == f'"{hashlib.sha256(data).hexdigest()}"'
    assert response.headers["content-type"] == "video/mp4"
    assert response.headers["content-disposition"] == f'attachment; filename="{video}.mp4"'
    assert response.headers["accept-ranges"] == "bytes"
    assert service.get(video)["sha256"] == hashlib.sha256(data).hexdigest()


def test_head_has_the_headers_only(service: ServiceProcess, video: str, mp4: Path) -> None:
    response = service.client.head(f"/v1/videos/{video}/content")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == mp4.stat().st_size


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=0-99", slice(0, 100)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-100", slice(-100, None)),
        ("bytes=5-5", slice(5, 6)),
    ],
)
def test_ranges(service: ServiceProcess, video: str, mp4: Path, header: str, part: slice) -> None:
    response = service.client.get(f"/v1/videos/{video}/content", headers={"Range": header})
    data = mp4.read_bytes()
    assert response.status_code == 206
    assert response.content == data[part]
    start = range(len(data))[part][0]
    assert (
        response.headers["content-range"] == f"bytes {start}-{start + len(response.content) - 1}/{len(data)}"
    )


def test_several_ranges(service: ServiceProcess, video: str, mp4: Path) -> None:
    response = service.client.get(f"/v1/videos/{video}/content", headers={"Range": "bytes=0-9,100-109"})
    assert response.status_code == 206
    assert response.headers["content-type"].startswith("multipart/byteranges")
    assert mp4.read_bytes()[100:110] in response.content


@pytest.mark.parametrize("header", ["bytes=99999999-", "bytes=99999999-99999999"])
def test_past_the_end(service: ServiceProcess, video: str, mp4: Path, header: str) -> None:
    response = service.client.get(f"/v1/videos/{video}/content", headers={"Range": header})
    assert response.status_code == 416
    assert response.headers["content-range"] == f"bytes */{mp4.stat().st_size}"
    assert response.json()["error"]["code"] == "range_not_satisfiable"


@pytest.mark.parametrize("header", ["bytes=", "bytes=x-y", "bytes=9-2", "lines=1-2", "bytes"])
def test_ranges_that_are_none_give_the_whole(
    service: ServiceProcess, video: str, mp4: Path, header: str
) -> None:
    response = service.client.get(f"/v1/videos/{video}/content", headers={"Range": header})
    assert (response.status_code, len(response.content)) == (200, mp4.stat().st_size)


def test_an_unchanged_file_is_not_sent_again(service: ServiceProcess, video: str) -> None:
    etag = service.client.head(f"/v1/videos/{video}/content").headers["etag"]
    for value in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        response = service.client.get(f"/v1/videos/{video}/content", headers={"If-None-Match": value})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag
    assert (
        service.client.get(f"/v1/videos/{video}/content", headers={"If-None-Match": '"other"'}).status_code
        == 200
    )


def test_a_range_of_another_version_gives_the_whole(service: ServiceProcess, video: str, mp4: Path) -> None:
    url, headers = f"/v1/videos/{video}/content", {"Range": "bytes=0-9"}
    etag = service.client.head(url).headers["etag"]
    assert service.client.get(url, headers={**headers, "If-Range": etag}).status_code == 206
    assert service.client.get(url, headers={**headers, "If-Range": '"old"'}).status_code == 200


def test_variants(service: ServiceProcess, video: str) -> None:
    for variant in ("video", "0"):
        assert (
            service.client.get(f"/v1/videos/{video}/content", params={"variant": variant}).status_code == 200
        )
    refusal = service.client.get(f"/v1/videos/{video}/content", params={"variant": "thumbnail"})
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "unsupported_variant")


def test_not_finished_failed_unknown(service: ServiceProcess) -> None:
    service.gate.unlink(missing_ok=True)
    waiting = service.create("[gate@1]")["id"]
    response = service.client.get(f"/v1/videos/{waiting}/content")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "video_not_ready")
    assert response.headers["retry-after"] == "5"
    service.gate.touch()
    service.finished(waiting)
    failed = service.finished(service.create("[broken]")["id"])["id"]
    response = service.client.get(f"/v1/videos/{failed}/content")
    assert (response.status_code, response.json()["error"]["code"]) == (422, "video_failed")
    response = service.client.get(f"/v1/videos/video_{'0' * 32}/content")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "video_not_found")


@pytest.mark.parametrize("mark", ["[nofile]", "[garbage]"])
def test_a_worker_that_says_done_without_a_video_has_failed(service: ServiceProcess, mark: str) -> None:
    done = service.finished(service.create(mark)["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "invalid_output")


def test_expired_results_answer_gone(start: Callable[..., ServiceProcess]) -> None:
    first = start(COLDFRAME_SERVE_RESULT_TTL_S="0.001")
    video = first.finished(first.create()["id"])["id"]
    first.terminate()
    service = start(COLDFRAME_SERVE_RESULT_TTL_S="1000")
    url = f"/v1/videos/{video}/content"
    gone = until(
        lambda: (response := service.client.get(url)).status_code in (404, 410) and response, "the sweep"
    )
    assert gone.json()["error"]["code"] in ("video_expired", "video_not_found")
