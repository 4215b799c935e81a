"""Deaths, floods, full disks, rude clients: the answer that is promised, nothing lost, nothing left."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.service import KEY, ServiceProcess, is_running, raw_exchange, running, until

Start = Callable[..., ServiceProcess]
HEAD = f"POST /v1/videos HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()


# ---- the worker dies


def test_a_killed_worker_fails_its_job_and_the_next_one_runs_on_a_new_worker(start: Start) -> None:
    service = start()
    victim = service.create("[gate@3]")["id"]
    waiting = service.create("next")["id"]
    service.at_step(victim, 2)
    first = service.worker_pid()
    os.kill(first, signal.SIGKILL)
    failed = service.finished(victim)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "interrupted")
    assert "worker died" in failed["error"]["message"]
    assert service.finished(waiting)["status"] == "completed"
    assert service.worker_pid() != first
    assert not (service.state / "jobs" / victim).exists()
    told = service.worker_lines().index(
        "request follows"
    )  # of a worker that is started for a job, not of the first
    assert service.worker_lines()[told - 1 : told + 2] == [
        f"start {service.worker_pid()}", "request follows", f"generate {waiting}",
    ]  # fmt: skip
    assert service.worker_lines().count("request follows") == 1


def test_a_crash_can_mean_another_attempt_but_not_for_ever(start: Start) -> None:
    service = start(COLDFRAME_SERVE_INTERRUPTED="rerun")
    job = service.finished(service.create("[crash@2]")["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "interrupted")
    assert service.worker_lines().count(f"generate {job['id']}") == 2


def test_a_lost_rank_is_a_dead_worker_not_a_failed_job(start: Start) -> None:
    service = start(COLDFRAME_SERVE_INTERRUPTED="rerun")
    job, waiting = service.create("[lostrank@2]")["id"], service.create()["id"]
    until(lambda: "job failed in the worker" in service.log(), "the rank is lost")
    assert [service.get(video)["status"] for video in (job, waiting)] == ["in_progress", "queued"]
    service.gate.touch()
    assert service.finished(job)["error"]["code"] == "interrupted"
    assert service.worker_lines().count(f"generate {job}") == 2
    assert service.finished(waiting)["status"] == "completed"


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_job_keeps_the_cause_that_its_worker_gave(start: Start, code: int) -> None:
    service = start(FAKE_DAMAGED_EXIT=str(code), COLDFRAME_SERVE_INTERRUPTED="rerun")
    job = service.finished(service.create("[damaged@2]")["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "bad_artifact")
    assert service.worker_lines().count(f"generate {job['id']}") == 1


def test_a_job_of_a_worker_that_failed_inside_runs_again(start: Start) -> None:
    service = start(FAKE_DAMAGED_EXIT="1", FAKE_DAMAGED_KIND="internal", COLDFRAME_SERVE_INTERRUPTED="rerun")
    job = service.finished(service.create("[damaged@2]")["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "interrupted")
    assert service.worker_lines().count(f"generate {job['id']}") == 2


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_worker_that_cannot_run_here_is_not_restarted(start: Start, code: int) -> None:
    service = start(FAKE_START_EXIT=str(code))
    until(lambda: service.client.get("/health").status_code == 503, "the failure shows")
    assert service.client.get("/livez").status_code == 200
    assert service.client.get("/ready").status_code == 503
    response = service.client.post("/v1/videos", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == {
        2: "worker_misconfigured", 3: "bad_artifact", 4: "unavailable_capability",
    }[code]  # fmt: skip
    assert "/secret/path" not in response.text
    assert ("h3_checksum_failures_total 1" in service.client.get("/metrics").text) == (code == 3)
    assert len([line for line in service.worker_lines() if line.startswith("start")]) == 1


def test_a_worker_that_crashes_at_start_is_tried_again(start: Start) -> None:
    service = start(FAKE_START_EXIT="9")
    until(lambda: len([line for line in service.worker_lines() if line.startswith("start")]) >= 3, "restarts")
    assert service.client.get("/health").status_code == 200
    text = service.client.get("/metrics").text
    assert 'h3_worker_exits_total{code="9"}' in text


def test_a_worker_that_talks_nonsense_is_replaced(start: Start) -> None:
    service = start()
    job = service.finished(service.create("[malformed]")["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "interrupted")
    assert service.finished(service.create("after")["id"])["status"] == "completed"


def test_a_silent_worker_is_replaced(start: Start) -> None:
    service = start(COLDFRAME_SERVE_STALL_TIMEOUT_S="2")
    stuck = service.create("[hang@2]")["id"]
    after = service.create("after")["id"]
    job = service.finished(stuck)
    assert (job["status"], job["error"]["code"]) == ("failed", "worker_stalled")
    assert service.finished(after)["status"] == "completed"


def test_a_job_that_takes_too_long_is_stopped(start: Start) -> None:
    service = start(COLDFRAME_SERVE_JOB_TIMEOUT_S="0.3")
    job = service.finished(service.create("[gate@2]")["id"])
    assert (job["status"], job["error"]["code"]) == ("failed", "timeout")
    assert len([line for line in service.worker_lines() if line.startswith("start")]) == 1


# ---- cancellation


def test_a_running_job_stops_at_a_step_and_the_next_one_is_unaffected(start: Start, mp4: Path) -> None:
    service = start()
    running = service.create("[gate@4]")["id"]
    after = service.create("after")["id"]
    service.at_step(running, 3)
    answer = service.client.post(f"/v1/videos/{running}/cancel")
    assert answer.status_code == 200
    job = service.finished(running)
    assert (job["status"], job["error"]["code"]) == ("failed", "cancelled")
    done = service.finished(after)
    assert service.client.get(done["url"]).content == mp4.read_bytes()
    assert len([line for line in service.worker_lines() if line.startswith("start")]) == 1


def test_a_queued_job_is_cancelled_at_once_and_never_reaches_the_worker(start: Start) -> None:
    service = start()
    running = service.create("[gate@1]")["id"]
    queued = service.create("never")["id"]
    job = service.client.post(f"/v1/videos/{queued}/cancel").json()
    assert (job["status"], job["error"]["code"]) == ("failed", "cancelled")
    service.gate.touch()
    assert service.finished(running)["status"] == "completed"
    assert f"generate {queued}" not in service.worker_lines()


def test_deleting_a_queued_job_waits_for_nobody(start: Start) -> None:
    service = start()
    service.create("[gate@1]")
    queued = service.create("never")["id"]
    answer = service.client.delete(f"/v1/videos/{queued}", timeout=8)  # a slow worker would be given 10 s
    assert answer.json()["deleted"] is True
    assert service.client.get(f"/v1/videos/{queued}").status_code == 404


def test_deleting_a_running_job_frees_the_worker(start: Start) -> None:
    service = start()
    running = service.create("[gate@2]")["id"]
    service.at_step(running, 1)
    assert service.client.delete(f"/v1/videos/{running}").json()["deleted"] is True
    assert service.client.get(f"/v1/videos/{running}").status_code == 404
    assert service.finished(service.create("after")["id"])["status"] == "completed"
    assert not (service.state / "jobs" / running).exists()


def test_a_worker_that_ignores_a_cancellation_is_killed(start: Start) -> None:
    service = start(COLDFRAME_SERVE_CANCEL_GRACE_S="0.2")
    running = service.create("[deaf] [gate@2]")["id"]
    service.at_step(running, 1)
    service.client.post(f"/v1/videos/{running}/cancel")
    job = service.finished(running)
    assert job["error"]["code"] == "cancelled"
    assert service.finished(service.create("after")["id"])["status"] == "completed"


# ---- the service dies


@pytest.mark.parametrize(("policy", "status"), [("fail", "failed"), ("rerun", "completed")])
def test_kill_9_of_the_service_loses_nothing(start: Start, policy: str, status: str) -> None:
    first = start()
    done = first.finished(first.create("done", seed=1)["id"])
    running = first.create("[gate@3]", seed=2)["id"]
    queued = first.create("queued", seed=3, first_frame=PICTURE)["id"]
    first.at_step(running, 2)
    orphan = first.worker_pid()
    first.kill()
    first.gate.touch()
    second = start(COLDFRAME_SERVE_INTERRUPTED=policy)
    until(lambda: not is_running(orphan), "the old worker ends")
    assert second.get(done["id"]) == done
    assert second.client.get(done["url"]).status_code == 200
    settled = second.finished(running)
    assert settled["status"] == status
    assert settled["error"] is None or settled["error"]["code"] == "interrupted"
    after = second.finished(queued)
    assert (after["status"], after["seed"]) == ("completed", 3)
    assert "pictures ['first_frame']" in second.worker_lines()


def test_a_hung_worker_of_a_killed_service_is_killed_by_the_next_one(start: Start) -> None:
    first = start()
    first.at_step(first.create("[hang@2]")["id"], 1)
    orphan = first.worker_pid()
    os.kill(orphan, signal.SIGSTOP)  # it will not even notice that its input has ended
    first.kill()
    second = start()
    until(lambda: not is_running(orphan), "the leftover is gone")
    second.ready()


def test_a_port_that_is_taken_costs_no_start(start: Start, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            AssertionError, match=f"127.0.0.1:{port}: cannot listen here; found Address already"
        ):
            start(COLDFRAME_SERVE_PORT=str(port))
    assert not (tmp_path / "worker.log").exists()


def test_two_services_on_one_state_directory(start: Start) -> None:
    first = start()
    with pytest.raises(AssertionError, match="another service uses this state directory"):
        start()
    assert first.client.get("/livez").status_code == 200


# ---- shutdown


def test_sigterm_finishes_the_running_job_and_keeps_the_queue(start: Start) -> None:
    first = start()
    running = first.create("[gate@3]")["id"]
    queued = first.create("later")["id"]
    first.at_step(running, 2)
    first.process.send_signal(signal.SIGTERM)
    until(lambda: first.client.get("/ready").json()["phase"] == "draining", "draining shows")
    refused = first.client.post("/v1/videos", json={"prompt": "late"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"]
    assert first.get(running)["status"] == "in_progress"
    first.gate.touch()
    assert first.process.wait(20) == 0
    second = start()
    assert second.get(running)["status"] == "completed"
    assert second.finished(queued)["status"] == "completed"


def test_a_drain_has_a_limit(start: Start) -> None:
    first = start(COLDFRAME_SERVE_DRAIN_TIMEOUT_S="0.2")
    running = first.create("[gate@3]")["id"]
    first.at_step(running, 2)
    assert first.terminate() == 0
    second = start()
    job = second.get(running)
    assert (job["status"], job["error"]["code"]) == ("failed", "interrupted")


# ---- floods


def test_200_submissions_over_the_limit(start: Start) -> None:
    service = start(COLDFRAME_SERVE_MAX_QUEUED="10", COLDFRAME_SERVE_MAX_ACTIVE_PER_KEY="1000")
    service.at_step(service.create("[gate@1]")["id"], 0)
    headers = {"Authorization": f"Bearer {KEY}"}
    # With fewer, httpcore's pool closes connections that it has just given to another thread.
    limits = httpx.Limits(max_connections=50, max_keepalive_connections=50)
    with (
        httpx.Client(base_url=service.url, headers=headers, timeout=60, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(50) as pool,
    ):
        answers = list(pool.map(lambda i: client.post("/v1/videos", json={"prompt": f"job {i}"}), range(200)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) == 10
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(answer.json()["error"]["type"] == "rate_limit_error" for answer in refused)
    assert all(1 <= int(answer.headers["retry-after"]) <= 120 for answer in refused)
    service.gate.touch()
    for answer in answers:
        if answer.status_code == 200:
            assert service.finished(answer.json()["id"])["status"] == "completed"
    assert len(list((service.state / "jobs").iterdir())) == 11


def test_limits_of_one_key(start: Start) -> None:
    service = start(COLDFRAME_SERVE_MAX_ACTIVE_PER_KEY="2", COLDFRAME_SERVE_REQUESTS_PER_MINUTE="3")
    for _ in range(2):
        service.create("[gate@1]")
    refused = service.client.post("/v1/videos", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
    service.gate.touch()
    until(lambda: service.client.get("/v1/status").json()["queue"]["running"] == 0, "the jobs end")
    service.finished(service.create("third")["id"])
    refused = service.client.post("/v1/videos", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    assert int(refused.headers["retry-after"]) >= 1


def test_concurrent_repeats_with_one_key_make_one_job(start: Start) -> None:
    service = start()
    headers = {"Idempotency-Key": "same"}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda _: service.client.post("/v1/videos", json={"prompt": "once"}, headers=headers),
                range(16),
            )
        )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    job = service.finished(answers[0].json()["id"])
    again = service.client.post("/v1/videos", json={"prompt": "once"}, headers=headers)
    assert (again.json()["id"], again.headers["idempotency-replayed"]) == (job["id"], "true")
    other = service.client.post("/v1/videos", json={"prompt": "twice"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


# ---- bodies


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, mp4: Path) -> Iterator[ServiceProcess]:
    """A service that takes small bodies and smaller pictures only."""
    limits = {"COLDFRAME_SERVE_MAX_BODY_BYTES": "100000", "COLDFRAME_SERVE_MAX_PICTURE_BYTES": "1000"}
    with running(tmp_path_factory.mktemp("narrow"), {"FAKE_MP4": str(mp4), **limits}) as process:
        yield process


def test_a_body_over_the_limit_without_a_length(narrow: ServiceProcess) -> None:
    before = narrow.rss_bytes()
    chunks = (b"x" * 100_000 for _ in range(300))
    response = narrow.client.post("/v1/videos", content=chunks, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert narrow.rss_bytes() - before < 20e6


def test_a_declared_length_over_the_limit(narrow: ServiceProcess) -> None:
    response = narrow.client.post(
        "/v1/videos", content=b"x" * 200_000, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413


def test_a_picture_over_the_limit(narrow: ServiceProcess) -> None:
    files = {"first_frame": ("a.png", b"\x89PNG\r\n\x1a\n" + b"x" * 2000)}
    response = narrow.client.post("/v1/videos", data={"prompt": "a"}, files=files)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "first_frame")


@pytest.mark.parametrize(
    "body",
    [b"", b"--b", b"--b\r\n", b"--b\r\n\r\nx", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--", b"--c\r\n\r\n--c--",
     b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"x" * 50, b"\x00" * 100,
     b"--b\r\n" + b"H: " + b"x" * 10_000 + b"\r\n\r\nx\r\n--b--",
     b'--b\r\nContent-Disposition: form-data; name="a[b"\r\n\r\nx\r\n--b--', b'--b\r\nContent-Disposition: form-data; name="[]"\r\n\r\nx\r\n--b--'],
    ids=range(11),
)  # fmt: skip
def test_malformed_multipart(service: ServiceProcess, body: bytes) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    response = service.client.post("/v1/videos", content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_too_many_parts(service: ServiceProcess) -> None:
    many = {f"field{index}": (None, "x") for index in range(70)}
    assert service.client.post("/v1/videos", files=many).status_code == 400
    files = [("input_references", (f"{index}.png", b"x")) for index in range(6)]
    assert service.client.post("/v1/videos", files=[("prompt", (None, "a")), *files]).status_code == 400


def test_a_client_that_sends_slowly_is_answered_and_let_go(start: Start) -> None:
    service = start(COLDFRAME_SERVE_BODY_TIMEOUT_S="0.3")
    answer = raw_exchange(
        service.port,
        HEAD + b"Content-Type: application/json\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{",
    )
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive in time" in answer


def test_a_client_that_leaves_while_sending_leaves_nothing(service: ServiceProcess) -> None:
    before = len(service.client.get("/v1/videos", params={"limit": 100}).json()["data"])
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(HEAD + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    assert len(service.client.get("/v1/videos", params={"limit": 100}).json()["data"]) == before
    assert service.client.get("/livez").status_code == 200


def test_a_blocking_client_that_leaves_cancels_its_job(start: Start) -> None:
    service = start()
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        body = b'{"prompt": "[gate@3]"}'
        head = HEAD.replace(b"/v1/videos", b"/v1/videos/sync")
        connection.sendall(
            head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        video = until(
            lambda: [v["id"] for v in service.client.get("/v1/videos").json()["data"]], "the job exists"
        )[0]
        service.at_step(video, 2)
        assert service.client.get("/livez").status_code == 200
    job = service.finished(video)
    assert (job["status"], job["error"]["code"]) == ("failed", "cancelled")


def test_a_job_with_a_key_outlives_the_clients_that_wait_for_it(start: Start, mp4: Path) -> None:
    service = start()
    body = b'{"prompt": "[gate@3]"}'
    head = HEAD.replace(b"/v1/videos", b"/v1/videos/sync") + b"Idempotency-Key: one\r\n"
    for expected in (1, 2):
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(
                head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: service.client.get("/v1/status").json()["queue"]["running"], "the job runs")
        until(lambda n=expected: service.log().count("client_gone") == n, "the service sees it leave")
    service.gate.touch()
    headers = {"Idempotency-Key": "one"}
    answer = service.client.post("/v1/videos/sync", json={"prompt": "[gate@3]"}, headers=headers)
    assert (answer.status_code, answer.content) == (200, mp4.read_bytes())
    assert answer.headers["idempotency-replayed"] == "true"


def test_a_reader_that_does_not_read_holds_nothing_up(start: Start, mp4: Path) -> None:
    service = start()
    video = service.finished(service.create()["id"])["id"]
    request = (
        f"GET /v1/videos/{video}/content HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    )
    idle = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(20)]
    for connection in idle:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request)
    assert service.client.get(f"/v1/videos/{video}/content").content == mp4.read_bytes()
    for connection in idle:
        connection.close()


# ---- the disk is full


def test_a_full_disk_refuses_new_jobs_and_keeps_the_old_ones(start: Start) -> None:
    service = start()
    before = service.finished(service.create("before")["id"])
    running = service.create("[gate@2]")["id"]
    service.at_step(running, 1)
    service.limit_files(1)
    refused = service.client.post("/v1/videos", json={"prompt": "x", "first_frame": PICTURE})
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
    assert refused.headers["retry-after"] == "60"
    assert service.client.post("/v1/videos", json={"prompt": "x" * 60_000}).status_code == 507
    directories = {path.name for path in (service.state / "jobs").iterdir()}
    assert directories == {before["id"], running}
    assert service.get(before["id"]) == before
    assert service.client.delete(f"/v1/videos/{before['id']}").status_code == 200  # how a client makes space
    assert service.client.get(f"/v1/videos/{before['id']}").status_code == 404
    assert [video["id"] for video in service.client.get("/v1/videos").json()["data"]] == [running]
    assert {path.name for path in (service.state / "jobs").iterdir()} == {running}
    service.gate.touch()
    assert service.finished(running)["status"] == "completed"  # kept in memory until there is space again
    service.limit_files(1 << 40)
    assert service.finished(service.create("after")["id"])["status"] == "completed"
    service.terminate()
    again = start()
    assert again.get(running)["status"] == "completed"
    assert again.client.get(f"/v1/videos/{before['id']}").status_code == 404


def test_mixed_jobs_leave_no_files(start: Start) -> None:
    service = start()
    marks = ["", "[broken]", "[refuse]", "[nofile]", "[garbage]", "[noise]"]
    made = [
        service.create(f"{mark} {index}", first_frame=PICTURE)["id"] for index in range(2) for mark in marks
    ]
    outcomes = [service.finished(video)["status"] for video in made]
    assert outcomes.count("completed") == 4
    for video, outcome in zip(made, outcomes, strict=True):
        if outcome == "completed":
            service.client.delete(f"/v1/videos/{video}")
    assert list((service.state / "jobs").iterdir()) == []
    until(lambda: "something else than a message" in service.log(), "the line")


PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR4nGNwaDiAFTEMLQkAYvNgAXSglMMAAAAASUVORK5CYII="
