"""Videos while they are made: fragmented MP4s that the worker appends to files, read by clients at their own pace.

A file belongs to one attempt of one job and loses its name when that ends; readers keep it open and get the rest. So a
slow client holds a file open, but neither the worker up nor memory, and one that comes late begins at the beginning.
All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.server.errors import ApiError
from runtime.server.jobs import COMPLETED, RUNNING, Job, JobStore

PART = 1 << 18
HEADERS = {"Cache-Control": "no-store", "Accept-Ranges": "none", "X-Accel-Buffering": "no"}


class Broken(Exception):
    """The video will not be finished: its job failed, or begins again."""


@dataclass
class _Growing:
    """`size` bytes at `path` are whole fragments. is_whole: None while it grows, then whether it came to its end."""

    path: Path
    size: int = 0
    is_whole: bool | None = None


class LiveVideos:
    """What the worker is writing, and who waits for it. Listens to the store."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._growing: dict[str, _Growing] = {}
        self._changed = asyncio.Event()
        store.listeners.append(self._on_job)
        store.on_delete.append(lambda job_id: self._end(job_id, is_whole=False))

    def begin(self, job: Job) -> Path:
        """Where this attempt of the job is to be written."""
        path = self._store.directory(job.id).absolute() / f"live-{job.attempts}.mp4"
        self._growing[job.id] = _Growing(path)
        return path

    def note(self, job_id: str, size: int) -> None:
        """The worker's word that so many bytes are there."""
        growing = self._growing.get(job_id)
        if growing is not None and size > growing.size:
            growing.size = size
            self._wake()

    async def open(self, job_id: str) -> LiveReader | None:
        """A reader from the beginning, once the first fragment is there; None if the job ended before."""
        while (job := self._store.get(job_id)) is not None and job.is_active:
            growing = self._growing.get(job_id)
            if growing is not None and growing.size:
                try:
                    return LiveReader(self, growing)
                except FileNotFoundError:
                    pass  # the worker has given the job up and will say so
            await self.changed()
        return None

    async def changed(self) -> None:
        """Return when anything has happened to any video."""
        await self._changed.wait()

    def _on_job(self, job: Job) -> None:
        if job.status != RUNNING:
            self._end(job.id, is_whole=job.status == COMPLETED)

    def _end(self, job_id: str, *, is_whole: bool) -> None:
        growing = self._growing.pop(job_id, None)
        if growing is not None:
            growing.is_whole = is_whole
            growing.path.unlink(missing_ok=True)
        self._wake()

    def _wake(self) -> None:
        """Wake all who wait on the present event object; later ones wait on a fresh one."""
        self._changed.set()
        self._changed = asyncio.Event()


class LiveReader:
    """One client's place in a growing video."""

    def __init__(self, live: LiveVideos, growing: _Growing) -> None:
        self._live, self._growing = live, growing
        self._descriptor = os.open(growing.path, os.O_RDONLY | os.O_CLOEXEC)

    async def parts(self) -> AsyncIterator[bytes]:
        """Bytes as they come, to the end. Raises: Broken."""
        at, growing = 0, self._growing
        while growing.is_whole is not False:
            if at < growing.size:
                part = await asyncio.to_thread(os.pread, self._descriptor, min(PART, growing.size - at), at)
                if not part:
                    raise Broken  # somebody cut the file
                yield part
                at += len(part)
            elif growing.is_whole:
                return
            else:
                await self._live.changed()
        raise Broken

    def close(self) -> None:
        """Works twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LiveResponse(StreamingResponse):
    """A video as it grows. If it breaks, the connection is closed before the end of the body: no client can take what
    it got for the whole."""

    def __init__(self, reader: LiveReader, job: Job) -> None:
        headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{job.id}.mp4"'}
        super().__init__(reader.parts(), headers=headers, media_type="video/mp4")
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reader.close()

    async def stream_response(self, send: Send) -> None:
        with contextlib.suppress(Broken):
            await super().stream_response(send)


async def first_fragment(live: LiveVideos, job: Job, request: Request, timeout_s: float) -> LiveReader | None:
    """`LiveVideos.open` for a client that may leave meanwhile; its leaving stops nothing but the waiting.

    Raises: ApiError: 504 after `timeout_s`; the client left.
    """
    opened = asyncio.create_task(live.open(job.id))
    gone = asyncio.create_task(_disconnected(request))
    try:
        done, _ = await asyncio.wait({opened, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not opened.done():
            opened.cancel()
    if opened in done:
        return opened.result()
    if gone in done:
        raise ApiError("the client left", code="client_gone")
    raise ApiError("the video does not begin yet; the job goes on", status=504, code="wait_timeout")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
