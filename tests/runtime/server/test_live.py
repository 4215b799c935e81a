"""A video while it is made: early, late, slow and vanished clients; failures in the middle of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.service import KEY, OTHER_KEY, ROOT, ServiceProcess, until

PART = 100_000
WORKER = f"{sys.executable} {ROOT / 'tests/fakes/live_worker.py'}"
ENV = {"COLDFRAME_SERVE_WORKER_COMMAND": WORKER, "FAKE_FRAGMENT_BYTES": str(PART)}
HELD = "[live@1][gate@1][live@3]"  # one fragment, then nothing until the gate is opened, then another


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, mp4: Path) -> Iterator[ServiceProcess]:
    """A service whose worker makes fragments, shared by the tests of this module."""
    env = {**ENV, "FAKE_MP4": str(mp4), "COLDFRAME_SERVE_MAX_ACTIVE_PER_KEY": "100"}
    process = ServiceProcess(tmp_path_factory.mktemp("live"), env)
    try:
        yield process.ready()
    finally:
        process.close()


@pytest.fixture(autouse=True)
def closed_gate(live: ServiceProcess) -> None:
    live.gate.unlink(missing_ok=True)


@contextmanager
def watching(service: ServiceProcess, video: str) -> Iterator[tuple[httpx.Response, Iterator[bytes]]]:
    with service.client.stream("GET", f"/v1/videos/{video}/content", params={"variant": "live"}) as response:
        yield response, response.iter_raw()


def take(parts: Iterator[bytes], size: int) -> bytes:
    received = b""
    while len(received) < size:
        received += next(parts)
    return received


def fragments(count: int) -> bytes:
    return b"".join(bytes([index + 1]) * PART for index in range(count))


def files_of(service: ServiceProcess, video: str) -> list[str]:
    return sorted(path.name for path in (service.state / "jobs" / video).glob("*"))


def test_fragments_arrive_while_the_job_runs_and_late_clients_get_all(live: ServiceProcess) -> None:
    video = live.create(HELD)["id"]
    with watching(live, video) as (first, early), watching(live, video) as (_, late):
        assert first.status_code == 200
        assert first.headers["content-type"] == "video/mp4"
        assert "content-length" not in first.headers
        assert (first.headers["cache-control"], first.headers["accept-ranges"]) == ("no-store", "none")
        assert take(early, PART) == fragments(1)
        assert live.get(video)["status"] == "in_progress"
        assert take(late, PART) == fragments(1)
        live.gate.touch()
        assert b"".join(early) == b"".join(late) == fragments(2)[PART:]


def test_a_finished_video_is_the_plain_file_under_either_name(live: ServiceProcess, mp4: Path) -> None:
    live.gate.touch()
    video = live.finished(live.create(HELD)["id"])["id"]
    assert files_of(live, video) == ["video.mp4"]
    url = f"/v1/videos/{video}/content"
    response = live.client.get(url, params={"variant": "live"}, headers={"Range": "bytes=0-99"})
    assert (response.status_code, response.content) == (206, mp4.read_bytes()[:100])
    assert response.headers["etag"] == live.client.head(url).headers["etag"]


def test_who_asks_before_the_first_fragment_waits_for_it(live: ServiceProcess) -> None:
    blocker = live.create("[gate@1]")["id"]
    video = live.create("[live@1]")["id"]
    with socket.create_connection(("127.0.0.1", live.port), 30) as connection:
        connection.sendall(
            f"GET /v1/videos/{video}/content?variant=live HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {KEY}\r\nConnection: close\r\n\r\n".encode()
        )
        until(lambda: live.get(blocker)["phase"] == "denoise", "the blocker runs")
        assert live.get(video)["status"] == "queued"
        live.gate.touch()
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body.count(b"\x01") >= PART
    assert body.endswith(b"\r\n0\r\n\r\n")  # the chunk that says that nothing is missing


def test_a_job_that_fails_before_its_first_fragment_is_an_error(live: ServiceProcess) -> None:
    live.gate.touch()
    video = live.create("[broken]")["id"]
    response = live.client.get(f"/v1/videos/{video}/content", params={"variant": "live"})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "video_failed")


@pytest.mark.parametrize("ending", ["[crash@3]", "[broken]", "[garbage]", "cancelled", "deleted"])
def test_a_job_that_fails_later_breaks_the_connection(live: ServiceProcess, ending: str) -> None:
    """The body ends without its last chunk: no client can take what it got for the whole."""
    video = live.create(f"[live@1][gate@1]{ending}")["id"]
    with watching(live, video) as (_, parts):
        assert take(parts, PART) == fragments(1)
        if ending == "cancelled":
            live.client.post(f"/v1/videos/{video}/cancel")
            until(lambda: f"cancel {video}" in live.worker_lines(), "the worker knows")
        elif ending == "deleted":
            live.client.delete(f"/v1/videos/{video}")
        live.gate.touch()
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            list(parts)
    until(lambda: files_of(live, video) == [], "nothing is left")
    live.ready()


def test_a_client_that_leaves_stops_nothing(live: ServiceProcess) -> None:
    video = live.create(HELD)["id"]
    with watching(live, video) as (_, parts):
        take(parts, PART)
    live.gate.touch()
    assert live.finished(video)["status"] == "completed"


def test_a_client_that_reads_nothing_holds_up_nothing(
    start: Callable[..., ServiceProcess],
) -> None:
    """64 MB lie in the file, not in the service, while others watch and jobs go on."""
    size = 32 << 20
    service = start(**{**ENV, "FAKE_FRAGMENT_BYTES": str(size)}).ready()
    service.gate.touch()
    before = service.rss_bytes()
    video = service.create(HELD)["id"]
    with watching(service, video):
        assert service.finished(video)["status"] == "completed"
        assert service.finished(service.create("[live@1]")["id"])["status"] == "completed"
        assert service.rss_bytes() - before < size // 2


def test_another_attempt_is_another_video(start: Callable[..., ServiceProcess]) -> None:
    """The stream of the attempt that died breaks; one that begins afterwards is the new attempt's."""
    service = start(**ENV, COLDFRAME_SERVE_INTERRUPTED="rerun", COLDFRAME_SERVE_MAX_ATTEMPTS="2").ready()
    video = service.create("[live@1][gate@2]")["id"]
    worker = service.worker_pid()
    with watching(service, video) as (_, parts):
        assert take(parts, PART) == fragments(1)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(parts)
    with watching(service, video) as (_, parts):
        assert take(parts, PART) == fragments(1)
        service.gate.touch()
        assert b"".join(parts) == b""
    assert service.finished(video)["status"] == "completed"


def test_time_spent_watching_is_not_the_service_s(start: Callable[..., ServiceProcess]) -> None:
    service = start(**ENV).ready()
    service.gate.touch()
    video = service.create(HELD)["id"]
    with watching(service, video) as (_, parts):
        assert b"".join(parts) == fragments(2)

    def counted() -> list[str]:
        """A request is counted, with its duration, shortly after its last byte."""
        return [line for line in service.client.get("/metrics").text.splitlines() if "/content" in line]

    seen = until(counted, "the request is counted")
    assert any(line.startswith("h3_requests_total") for line in seen)
    assert not any(line.startswith("h3_request_duration_seconds") for line in seen)


def test_head_owner_and_limit(start: Callable[..., ServiceProcess]) -> None:
    service = start(**ENV, COLDFRAME_SERVE_SYNC_TIMEOUT_S="0.2").ready()
    url = f"/v1/videos/{service.create('[gate@1]')['id']}/content?variant=live"
    assert service.client.head(url).headers["content-type"] == "video/mp4"
    stranger = service.client.get(url, headers={"Authorization": f"Bearer {OTHER_KEY}"})
    assert stranger.status_code == 404
    late = service.client.get(url)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "wait_timeout")
