"""The HTTP service on Modal: a CPU container whose jobs are calls of the GPU class.

modal is imported inside functions: this package also lives without it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.platforms.modal_gpu import PROGRESS
from runtime.platforms.remote import CallState, RemoteEngine

if TYPE_CHECKING:
    from starlette.applications import Starlette

RECORD = "record:"
LOST = "the platform lost this call"


def build_gateway(bundle: Path, state: Path, worker: Any, jobs: Any, outputs: Any) -> Starlette:
    """The HTTP service with calls of the GPU class behind it.

    Args:
        worker: instance of the GPU class. outputs: the volume with finished files.
    """
    from runtime.logs import configure
    from runtime.server.app import build_app
    from runtime.server.config import ServerConfig
    from runtime.server.service import Service

    configure("json")
    config = ServerConfig.from_environment(os.environ, bundle=bundle, state=state)
    calls = ModalCalls(worker, jobs, outputs)
    return build_app(Service(config, make_engine=lambda service: RemoteEngine(service, calls)))


class ModalCalls:
    """`Calls` on Modal: spawn and poll by call id, progress and records in a Dict, files in a Volume."""

    def __init__(self, worker: Any, jobs: Any, outputs: Any) -> None:
        self._worker = worker
        self._jobs = jobs
        self._outputs = outputs

    async def spawn(self, payload: Mapping[str, Any]) -> str:
        call = await self._worker.generate.spawn.aio(dict(payload))
        return str(call.object_id)

    async def state(self, call_id: str) -> CallState:
        import modal  # type: ignore[import-not-found, unused-ignore]
        from modal import exception  # type: ignore[import-not-found, unused-ignore]

        call = modal.FunctionCall.from_id(call_id)
        try:
            return CallState("done", await call.get.aio(timeout=0))
        except exception.OutputExpiredError:  # a TimeoutError too: it must come first
            return CallState("lost", reason="the result has expired on the platform")
        except exception.FunctionTimeoutError:
            return CallState("timeout", reason="the job took longer than the platform's limit")
        except (TimeoutError, exception.TimeoutError):
            return CallState("running")
        except exception.InputCancellation:
            return CallState("cancelled")
        except exception.RemoteError as error:
            return CallState("cancelled" if "cancel" in str(error).lower() else "lost", reason=LOST)
        except Exception:  # noqa: BLE001 (border: whatever `generate` raised is raised again here)
            return CallState("failed", reason="generation failed; see the worker's log under the job id")

    async def cancel(self, call_id: str) -> None:
        import modal  # type: ignore[import-not-found, unused-ignore]

        await modal.FunctionCall.from_id(call_id).cancel.aio()

    async def progress(self, job_id: str) -> Mapping[str, Any]:
        return await self._jobs.get.aio(PROGRESS + job_id, None) or {}

    async def download(self, job_id: str) -> AsyncIterator[bytes]:
        async for chunk in self._outputs.read_file.aio(f"{job_id}/video.mp4"):
            yield chunk

    async def remove_output(self, job_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._outputs.remove_file.aio(job_id, recursive=True)

    async def records(self) -> list[Mapping[str, Any]]:
        return [value async for key, value in self._jobs.items.aio() if str(key).startswith(RECORD)]

    async def put_record(self, job_id: str, document: Mapping[str, Any] | None) -> None:
        if document is not None:
            await self._jobs.put.aio(RECORD + job_id, dict(document))
            return
        for prefix in (RECORD, PROGRESS):
            await self._jobs.pop.aio(prefix + job_id, None)
