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
from runtime.server.jobs import COMPLETED, FAILED, QUEUED, RUNNING, Job, new_job_id
from runtime.server.service import Service

pytestmark = pytest.mark.usefixtures("_fast")


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FOLLOW_PERIOD_S", 0.005)


class Platform:
    """Calls that end when a test says so; records outlive gateways."""

    def __init__(self, mp4: Path) -> None:
        self.mp4 = mp4
        self.payloads: dict[str, Mapping[str, Any]] = {}
        self.states: dict[str, CallState] = {}
        self.published: dict[str, Mapping[str, Any]] = {}
        self.stored: dict[str, Mapping[str, Any]] = {}
        self.spawn_error: Exception | None = None

    async def spawn(self, payload: Mapping[str, Any]) -> str:
        if self.spawn_error is not None:
            raise self.spawn_error
        call = f"call-{payload['id']}"
        self.payloads[call] = payload
        self.states[call] = CallState("running")
        return call

    async def state(self, call_id: str) -> CallState:
        return self.states[call_id]

    async def cancel(self, call_id: str) -> None:
        self.states[call_id] = CallState("cancelled")

    async def progress(self, job_id: str) -> Mapping[str, Any]:
        return self.published.get(job_id, {})

    async def download(self, job_id: str) -> AsyncIterator[bytes]:
        data = self.mp4.read_bytes()
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

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

    def __init__(self, state: Path, platform: Platform) -> None:
        config = ServerConfig(bundle=state, state=state, allow_unauthenticated=True)
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
