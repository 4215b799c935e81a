"""Progress of jobs as numbered events, kept for readers that are slow, late or reconnecting.

A feed is a bounded list that readers walk at their own pace, so a slow reader costs nothing and holds nothing up. Only jobs
that the store has as unfinished get one: nobody would end another.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from runtime.server.jobs import COMPLETED, FAILED, Job, JobStore

KEPT_EVENTS = 512
PING_S = 15.0


@dataclass(frozen=True)
class FeedEvent:
    """`kind` is status, phase, progress, completed or failed; the last two end a feed."""

    number: int
    kind: str
    data: dict[str, Any]

    @property
    def is_last(self) -> bool:
        return self.kind in (COMPLETED, FAILED)


@dataclass
class _Feed:
    last: Job
    number: int
    events: deque[FeedEvent] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Feeds:
    """Turns changes of jobs into events. Listens to the store."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._feeds: dict[str, _Feed] = {}
        store.listeners.append(self._on_job)
        store.on_delete.append(self._forget)

    def _on_job(self, job: Job) -> None:
        """Append what a change of a job means for a reader; a finished job's feed lives on in its readers only."""
        feed = self._feeds.get(job.id)
        if feed is None:
            if job.is_active:
                self._open(job)
            return
        kind = _kind(feed.last, job)
        feed.last = job
        if kind is not None:
            self._append(feed, kind, job)
        if not job.is_active:
            self._feeds.pop(job.id, None)

    def _forget(self, job_id: str) -> None:
        """End the feed of a deleted job."""
        feed = self._feeds.pop(job_id, None)
        if feed is not None and not (feed.events and feed.events[-1].is_last):
            self._append(feed, FAILED, feed.last)

    async def read(self, job: Job, after: int = 0) -> AsyncIterator[FeedEvent | None]:
        """Events with numbers above `after`, oldest kept first; None when nothing happened for `PING_S`.

        Ends after the last event. A job that has been finished or deleted by the time that this is read, whatever the one
        given here says, yields just its last event.
        """
        feed = self._feeds.get(job.id)
        if feed is None:
            now = self._store.get(job.id)
            if now is None or not now.is_active:
                last = now or job
                yield FeedEvent(
                    after + 1, COMPLETED if last.status == COMPLETED else FAILED, event_data(last)
                )
                return
            feed = self._open(now)
        if after > feed.number:  # a number of another life of the service: start over
            after = 0
        while True:
            for event in [event for event in feed.events if event.number > after]:
                yield event
                after = event.number
                if event.is_last:
                    return
            if feed.number > after:
                continue
            try:
                await asyncio.wait_for(feed.changed.wait(), PING_S)
            except TimeoutError:
                yield None

    async def ended(self, job: Job) -> None:
        """Return after the last event of a job."""
        async for _ in self.read(job):
            pass

    def _open(self, job: Job) -> _Feed:
        feed = self._feeds[job.id] = _Feed(job, 0)
        self._append(feed, "status", job)
        return feed

    def _append(self, feed: _Feed, kind: str, job: Job) -> None:
        feed.number += 1
        feed.events.append(FeedEvent(feed.number, kind, event_data(job)))
        # Wake every reader of the present event object, then give later readers a fresh one.
        feed.changed.set()
        feed.changed = asyncio.Event()


def _kind(before: Job, now: Job) -> str | None:
    if now.status in (COMPLETED, FAILED):
        return now.status
    if now.status != before.status:
        return "status"
    if now.phase != before.phase:
        return "phase"
    return "progress" if (now.progress, now.step) != (before.progress, before.step) else None


def event_data(job: Job) -> dict[str, Any]:
    """What a reader sees of a job at this moment."""
    data: dict[str, Any] = {
        "id": job.id,
        "status": job.status,
        "progress": job.progress,
        "phase": job.phase,
        "step": job.step,
        "steps": job.steps,
        "elapsed_s": round((job.completed_at or time.time()) - job.created_at, 3),
    }
    if job.error is not None:
        data["error"] = job.error
    return data
