"""The gateway's engine against a platform in memory: calls go on without it, and a new gateway finds everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runtime.platforms import remote
from runtime.platforms.remote import CallState, RemoteEngine
from runtime.server.config import ServerConfig
from runtime.server.errors import ApiError
from runtime.server.jobs import COMPLETED, FAILED, QUEUED, RUNNING, Job, new_job_id
from runtime.server.service import Service

pytestmark = pytest.mark.usefixtures("_fast")


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FOLLOW_PERIOD_S", 0.005)
    monkeypatch.setattr(remote, "SWEEP_PERIOD_S", 0.005)


class Platform:
    """Calls that end when a test says so; records outlive gateways."""

    def __init__(self, mp4: Path) -> None:
        self.mp4 = mp4
        self.payloads: dict[str, Mapping[str, Any]] = {}
        self.states: dict[str, CallState] = {}
        self.published: dict[str, Mapping[str, Any]] = {}
        self.stored: dict[str, Mapping[str, Any]] = {}
        self.spawn_error: Exception | None = None
        self.download_error: Exception | None = None
        self.num_downloads = 0
        self.outputs: set[str] = set()
        self.removal_errors: list[Exception] = []
        self.cancel_errors: list[Exception] = []
        self.on_spawn: Callable[[str], None] = lambda job_id: None

    async def spawn(self, payload: Mapping[str, Any]) -> str:
        if self.spawn_error is not None:
            raise self.spawn_error
        job_id = str(payload["id"])
        attempt = sum(str(earlier["id"]) == job_id for earlier in self.payloads.values())
        call = f"call-{job_id}" + attempt * "-again"
        self.on_spawn(job_id)
        self.payloads[call] = payload
        self.states[call] = CallState("running")
        return call

    async def state(self, call_id: str) -> CallState:
        return self.states[call_id]

    async def cancel(self, call_id: str) -> None:
        if self.cancel_errors:
            raise self.cancel_errors.pop()
        self.states[call_id] = CallState("cancelled")

    async def progress(self, job_id: str) -> Mapping[str, Any]:
        return self.published.get(job_id, {})

    async def download(self, job_id: str) -> AsyncIterator[bytes]:
        self.num_downloads += 1
        if self.download_error is not None:
            raise self.download_error
        data = self.mp4.read_bytes()
        for start in range(0, len(data), 1000):
            await asyncio.sleep(0)  # others get their turn
            yield data[start : start + 1000]

    async def remove_output(self, job_id: str) -> None:
        if self.removal_errors:
            raise self.removal_errors.pop()
        self.outputs.discard(job_id)

    def end(self, call: str) -> None:
        """The call is done and has written its file."""
        self.outputs.add(call.removeprefix("call-"))
        self.states[call] = CallState("done", {"result": {}})

    async def records(self) -> list[Mapping[str, Any]]:
        return list(self.stored.values())

    async def put_record(self, job_id: str, document: Mapping[str, Any] | None) -> None:
        if document is None:
            self.stored.pop(job_id, None)
        else:
            self.stored[job_id] = document


@pytest.fixture
def platform(mp4: Path) -> Platform:
    return Platform(mp4)


class Gateway:
    """A service whose engine is remote, inside a test's event loop."""

    def __init__(self, state: Path, platform: Platform, interrupted: str = "fail") -> None:
        config = ServerConfig(bundle=state, state=state, allow_unauthenticated=True, interrupted=interrupted)
        self.service = Service(config, make_engine=lambda service: RemoteEngine(service, platform))

    async def create(self, **pictures: bytes) -> str:
        names = {name: f"{name}.png" for name in pictures}
        job = Job(
            new_job_id(),
            "anonymous",
            "m",
            self.service.store.clock(),
            {"prompt": "x"},
            {"num_frames": 124},
            names,
        )
        self.service.store.create(job, pictures)
        self.service.engine.pump()
        await self.until(job.id, lambda j: j.status == RUNNING)
        return job.id

    async def until(self, job_id: str, check: Callable[[Job], bool]) -> Job:
        async with asyncio.timeout(10):
            while True:
                job = self.service.store.get(job_id)
                if job is not None and check(job):
                    return job
                await asyncio.sleep(0.002)


def run(scenario: Awaitable[None]) -> None:
    async def main() -> None:
        await scenario

    asyncio.run(main())


def test_a_job_becomes_a_call_and_its_file_comes_back(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job_id = await gateway.create(first_frame=b"png")
        call = f"call-{job_id}"
        assert platform.payloads[call]["pictures"] == {"first_frame": b"png"}
        platform.published[job_id] = {"phase": {"phase": "denoising"}, "step": {"step": 4, "steps": 8}}
        job = await gateway.until(job_id, lambda j: j.step == 4)
        assert (job.phase, job.progress) == ("denoise", 47)
        platform.states[call] = CallState(
            "done", {"result": {"seed": 1}, "start": {"headline": {"first_dit_entry": 5.0}}}
        )
        job = await gateway.until(job_id, lambda j: not j.is_active)
        assert (job.status, job.progress, job.result["bytes"]) == (
            COMPLETED,
            100,
            platform.mp4.stat().st_size,
        )
        assert gateway.service.store.video_path(job_id).read_bytes() == platform.mp4.read_bytes()
        assert gateway.service.starts.all()[0]["headline"] == {"first_dit_entry": 5.0}
        await gateway.service.close()

    run(scenario())


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (
            CallState(
                "done",
                {"error": {"kind": "bad_request", "message": "no", "where": "seed", "http_status": 400}},
            ),
            "invalid_request",
        ),
        (CallState("lost", reason="the platform lost this call"), "interrupted"),
        (CallState("timeout", reason="too long"), "timeout"),
        (CallState("failed", reason="generation failed"), "internal"),
        (CallState("cancelled"), "cancelled"),
    ],
)
def test_ends_that_are_no_success(tmp_path: Path, platform: Platform, state: CallState, code: str) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job_id = await gateway.create()
        platform.states[f"call-{job_id}"] = state
        job = await gateway.until(job_id, lambda j: not j.is_active)
        assert (job.status, (job.error or {})["code"]) == (FAILED, code)
        await gateway.service.close()

    run(scenario())


def test_cancelling_reaches_the_platform(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job_id = await gateway.create()
        await gateway.service.engine.cancel(job_id)
        job = await gateway.until(job_id, lambda j: not j.is_active)
        assert (job.error or {})["code"] == "cancelled"
        await gateway.service.close()

    run(scenario())


def test_a_cancellation_that_the_platform_did_not_take_can_be_asked_for_again(
    tmp_path: Path, platform: Platform
) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job_id = await gateway.create()
        platform.cancel_errors = [ConnectionError("token=abc")]
        with pytest.raises(ApiError, match="cannot cancel this job now") as refusal:
            await gateway.service.engine.cancel(job_id)
        assert (refusal.value.http_status, "abc" in str(refusal.value)) == (503, False)
        await gateway.service.engine.cancel(job_id)
        job = await gateway.until(job_id, lambda j: not j.is_active)
        assert (job.error or {})["code"] == "cancelled"
        await gateway.service.close()

    run(scenario())


def test_a_platform_that_refuses_the_call_fails_the_job(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        platform.spawn_error = ConnectionError("no route, token=abc")
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job = Job(new_job_id(), "anonymous", "m", 0.0, {"prompt": "x"}, {})
        gateway.service.store.create(job, {})
        gateway.service.engine.pump()
        ended = await gateway.until(job.id, lambda j: not j.is_active)
        assert (ended.error or {})["code"] == "platform"
        assert "abc" not in str(ended.error)
        await gateway.service.close()

    run(scenario())


def test_a_new_gateway_follows_the_calls_of_the_old_one(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        old = Gateway(tmp_path / "old", platform)
        await old.service.engine.start()
        done, running = await old.create(), await old.create()
        platform.states[f"call-{done}"] = CallState("done", {"result": {}})
        await old.until(done, lambda j: j.status == COMPLETED)
        await old.service.close()

        new = Gateway(tmp_path / "new", platform)  # another machine: an empty state directory
        await new.service.engine.start()
        adopted = new.service.store.get(done)
        assert adopted is not None
        assert adopted.status == COMPLETED
        await new.service.engine.restore_result(adopted)
        assert new.service.store.video_path(done).read_bytes() == platform.mp4.read_bytes()
        platform.states[f"call-{running}"] = CallState("done", {"result": {}})
        await new.until(running, lambda j: j.status == COMPLETED)
        new.service.store.delete(done)
        await new.service.close()
        assert set(platform.stored) == {running}

    run(scenario())


async def made_by_an_earlier_gateway(directory: Path, platform: Platform) -> tuple[Gateway, Job]:
    """A new gateway, and a finished job whose file it does not have."""
    old = Gateway(directory / "old", platform)
    await old.service.engine.start()
    job_id = await old.create()
    platform.states[f"call-{job_id}"] = CallState("done", {"result": {}})
    await old.until(job_id, lambda j: j.status == COMPLETED)
    await old.service.close()
    new = Gateway(directory / "new", platform)
    await new.service.engine.start()
    job = new.service.store.get(job_id)
    assert job is not None
    return new, job


def test_requests_for_one_file_share_one_download(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway, job = await made_by_an_earlier_gateway(tmp_path, platform)
        before = platform.num_downloads
        gone = asyncio.create_task(gateway.service.engine.restore_result(job))
        await asyncio.sleep(0)
        gone.cancel()  # its client left
        await asyncio.gather(*(gateway.service.engine.restore_result(job) for _ in range(3)))
        path = gateway.service.store.video_path(job.id)
        assert platform.num_downloads == before + 1
        assert path.read_bytes() == platform.mp4.read_bytes()
        assert [file.name for file in path.parent.iterdir()] == ["video.mp4"]
        await gateway.service.close()

    run(scenario())


def test_a_file_that_is_not_the_one_that_was_made_is_not_served(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway, job = await made_by_an_earlier_gateway(tmp_path, platform)
        data = platform.mp4.read_bytes()
        platform.mp4 = tmp_path / "other.mp4"
        platform.mp4.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ApiError, match="not the one that was made") as refusal:
            await gateway.service.engine.restore_result(job)
        assert refusal.value.http_status == 503
        assert list(gateway.service.store.directory(job.id).iterdir()) == []
        await gateway.service.close()

    run(scenario())


@pytest.mark.parametrize(
    ("error", "status"),
    [(FileNotFoundError("video_1/video.mp4"), 410), (ConnectionError("token=abc"), 503), (ValueError("x"), 503)],
    ids=["gone", "unreachable", "anything"],
)  # fmt: skip
def test_a_platform_without_the_file_is_an_error_of_its_own(
    tmp_path: Path, platform: Platform, error: Exception, status: int
) -> None:
    async def scenario() -> None:
        gateway, job = await made_by_an_earlier_gateway(tmp_path, platform)
        platform.download_error = error
        with pytest.raises(ApiError) as refusal:
            await gateway.service.engine.restore_result(job)
        assert (refusal.value.http_status, "abc" in str(refusal.value)) == (status, False)
        platform.download_error = None
        await gateway.service.engine.restore_result(job)  # the next one tries again
        assert gateway.service.store.video_path(job.id).exists()
        await gateway.service.close()

    run(scenario())


def test_a_job_whose_file_is_not_there_fails(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        platform.download_error = FileNotFoundError("video_1/video.mp4")
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job_id = await gateway.create()
        platform.states[f"call-{job_id}"] = CallState("done", {"result": {}})
        job = await gateway.until(job_id, lambda j: not j.is_active)
        assert (job.error or {})["code"] == "invalid_output"
        await gateway.service.close()

    run(scenario())


async def happens(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.002)


def test_results_expire_here_and_on_the_platform(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        store = gateway.service.store
        await gateway.service.engine.start()
        job_id = await gateway.create()
        platform.end(f"call-{job_id}")
        job = await gateway.until(job_id, lambda j: j.status == COMPLETED)
        assert platform.outputs == {job_id}
        store.clock = lambda: job.created_at + 8 * 24 * 3600
        await gateway.until(job_id, lambda j: j.expired)
        await happens(lambda: not platform.outputs)
        assert not store.directory(job_id).exists()
        store.clock = lambda: job.created_at + 15 * 24 * 3600
        await happens(lambda: store.get(job_id) is None and not platform.stored)
        await gateway.service.close()

    run(scenario())


def test_a_deleted_video_leaves_the_platform_even_if_it_has_to_be_tried_again(
    tmp_path: Path, platform: Platform
) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job_id = await gateway.create()
        platform.end(f"call-{job_id}")
        await gateway.until(job_id, lambda j: j.status == COMPLETED)
        platform.removal_errors = [ConnectionError("no route")]
        gateway.service.store.delete(job_id)
        await happens(lambda: not platform.outputs and not platform.stored)
        await gateway.service.close()

    run(scenario())


def test_a_call_that_outlives_its_job_leaves_nothing(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        job_id = await gateway.create()
        gateway.service.store.delete(job_id)
        await happens(lambda: job_id not in platform.stored)
        platform.end(f"call-{job_id}")
        await happens(lambda: not platform.outputs)
        await gateway.service.close()

    run(scenario())


def test_a_job_that_is_deleted_while_it_is_handed_over_costs_no_gpu(
    tmp_path: Path, platform: Platform
) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        platform.on_spawn = gateway.service.store.delete
        job = Job(new_job_id(), "anonymous", "m", 0.0, {"prompt": "x"}, {})
        gateway.service.store.create(job, {})
        gateway.service.engine.pump()
        await happens(lambda: platform.states.get(f"call-{job.id}") == CallState("cancelled"))
        await gateway.service.close()

    run(scenario())


def test_a_lost_call_can_mean_another_one_but_not_for_ever(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform, interrupted="rerun")
        await gateway.service.engine.start()
        job_id = await gateway.create(first_frame=b"png")
        platform.published[job_id] = {"step": {"step": 4, "steps": 8}}
        await gateway.until(job_id, lambda j: j.step == 4)
        platform.states[f"call-{job_id}"] = CallState("lost", reason="the platform lost this call")
        again = f"call-{job_id}-again"
        job = await gateway.until(job_id, lambda j: j.call_id == again)
        assert (job.status, job.attempts, job.step) == (RUNNING, 2, 0)
        assert platform.payloads[again] == platform.payloads[f"call-{job_id}"]
        platform.states[again] = CallState("lost", reason="the platform lost this call")
        job = await gateway.until(job_id, lambda j: not j.is_active)
        assert (job.error or {})["code"] == "interrupted"
        assert len(platform.payloads) == 2
        await gateway.service.close()

    run(scenario())


def test_another_gateway_cannot_run_a_job_with_pictures_again(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        old = Gateway(tmp_path / "old", platform)
        await old.service.engine.start()
        job_id = await old.create(first_frame=b"png")
        await old.service.close()
        new = Gateway(tmp_path / "new", platform, interrupted="rerun")
        await new.service.engine.start()
        platform.states[f"call-{job_id}"] = CallState("lost", reason="the platform lost this call")
        job = await new.until(job_id, lambda j: not j.is_active)
        assert (job.error or {})["code"] == "inputs_lost"
        await new.service.close()

    run(scenario())


def test_nothing_is_handed_over_while_draining(tmp_path: Path, platform: Platform) -> None:
    async def scenario() -> None:
        gateway = Gateway(tmp_path / "a", platform)
        await gateway.service.engine.start()
        await gateway.service.engine.drain(1.0)
        job = Job(new_job_id(), "anonymous", "m", 0.0, {"prompt": "x"}, {})
        gateway.service.store.create(job, {})
        gateway.service.engine.pump()
        await asyncio.sleep(0)
        stored = gateway.service.store.get(job.id)
        assert stored is not None
        assert stored.status == QUEUED
        assert platform.payloads == {}
        await gateway.service.close()

    run(scenario())
