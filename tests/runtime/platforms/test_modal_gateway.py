"""The gateway on Modal: built as a container builds it, and its calls on objects shaped like modal's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from runtime.platforms.modal_gateway import ModalCalls, build_gateway
from tests.fakes.service import ROOT

PYTHON = os.environ.get("PLATFORMS_PYTHON", sys.executable)


class FakeDict:
    """`modal.Dict` as far as it is used: every method has an `aio` twin."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.get = SimpleNamespace(aio=self._get)
        self.put = SimpleNamespace(aio=self._put)
        self.pop = SimpleNamespace(aio=self._pop)
        self.items = SimpleNamespace(aio=self._items)

    async def _get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    async def _put(self, key: str, value: Any) -> None:
        self.values[key] = value

    async def _pop(self, key: str, default: Any) -> Any:
        return self.values.pop(key, default)

    async def _items(self) -> AsyncIterator[tuple[str, Any]]:
        for item in list(self.values.items()):
            yield item


class FakeWorker:
    def __init__(self) -> None:
        self.payloads: list[dict[str, Any]] = []
        self.generate = SimpleNamespace(spawn=SimpleNamespace(aio=self._spawn))

    async def _spawn(self, payload: dict[str, Any]) -> Any:
        self.payloads.append(payload)
        return SimpleNamespace(object_id=f"fc-{len(self.payloads)}")


class FakeVolume:
    def __init__(self) -> None:
        self.read_file = SimpleNamespace(aio=self._read)
        self.remove_file = SimpleNamespace(aio=self._remove)
        self.removed: list[tuple[str, bool]] = []

    async def _read(self, path: str) -> AsyncIterator[bytes]:
        yield path.encode()

    async def _remove(self, path: str, recursive: bool = False) -> None:
        if (path, recursive) in self.removed:
            raise FileNotFoundError(path)
        self.removed.append((path, recursive))


def test_calls_on_modals_objects() -> None:
    async def scenario() -> None:
        worker, jobs, volume = FakeWorker(), FakeDict(), FakeVolume()
        calls = ModalCalls(worker, jobs, volume)
        assert await calls.spawn({"id": "video_1"}) == "fc-1"
        assert await calls.progress("video_1") == {}
        jobs.values["progress:video_1"] = {"step": {"step": 1, "steps": 8}}
        assert await calls.progress("video_1") == {"step": {"step": 1, "steps": 8}}
        await calls.put_record("video_1", {"id": "video_1"})
        assert await calls.records() == [{"id": "video_1"}]
        await calls.put_record("video_1", None)
        assert jobs.values == {}
        assert [chunk async for chunk in calls.download("video_1")] == [b"video_1/video.mp4"]
        await calls.remove_output("video_1")
        await calls.remove_output("video_1")
        assert volume.removed == [("video_1", True)]

    asyncio.run(scenario())


def test_the_gateway_app_answers_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setenv("COLDFRAME_API_KEYS", "gateway-key")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        app = build_gateway(tmp_path, tmp_path / "state", FakeWorker(), FakeDict(), FakeVolume())
    finally:
        root.handlers[:], root.level = handlers, level

    async def scenario() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
        ):
            assert (await client.get("/health")).json()["phase"] == "ready"
            assert (await client.get("/v1/videos")).status_code == 401
            listed = await client.get("/v1/videos", headers={"Authorization": "Bearer gateway-key"})
            assert listed.json()["data"] == []

    asyncio.run(scenario())


STATES = """
import asyncio, json, modal, sys
from modal import exception
from runtime.platforms.modal_gateway import ModalCalls

class Call:
    def __init__(self, error): self.error, self.get = error, self
    async def aio(self, timeout):
        assert timeout == 0
        if self.error: raise self.error
        return {"result": {}}

errors = {"done": None, "running": TimeoutError(), "expired": exception.OutputExpiredError("x"), "slow": exception.FunctionTimeoutError("x"),
          "cancelled": exception.InputCancellation("x"), "failed": ValueError("/secret"), "remote": exception.RemoteError("Function Call was canceled")}
modal.FunctionCall.from_id = lambda name: Call(errors[name])
calls = ModalCalls(None, None, None)
states = {name: asyncio.run(calls.state(name)) for name in errors}
assert "/secret" not in states["failed"].reason
print(json.dumps({name: state.kind for name, state in states.items()}))
"""


@pytest.mark.slow
def test_states_of_a_call_with_modals_own_exceptions() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, "-c", STATES], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "done": "done",
        "running": "running",
        "expired": "lost",
        "slow": "timeout",
        "cancelled": "cancelled",
        "failed": "failed",
        "remote": "cancelled",
    }
