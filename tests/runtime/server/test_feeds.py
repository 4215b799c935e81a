"""Feeds of jobs that end while somebody is about to read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.server.errors import job_error
from runtime.server.feeds import FeedEvent, Feeds
from runtime.server.jobs import COMPLETED, FAILED, RUNNING, Job, JobStore, new_job_id


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path / "state")
    yield store
    store.close()


def created(store: JobStore) -> Job:
    job = Job(new_job_id(), "a", "m", store.clock(), {"prompt": "p"}, {})
    store.create(job, {})
    return job


def complete(store: JobStore, job: Job) -> None:
    store.finish(job.id, ttl_s=60.0)


def fail(store: JobStore, job: Job) -> None:
    store.finish(job.id, ttl_s=60.0, error=job_error("cancelled", "cancelled by the client"))


def delete(store: JobStore, job: Job) -> None:
    store.delete(job.id)


def expire(store: JobStore, job: Job) -> None:
    complete(store, job)
    store.update(job.id, expired=True)


async def events(feeds: Feeds, job: Job) -> list[FeedEvent | None]:
    async with asyncio.timeout(10):  # a feed that nobody ends
        return [event async for event in feeds.read(job)]


ENDS = [(complete, COMPLETED), (fail, FAILED), (delete, FAILED), (expire, COMPLETED)]


@pytest.mark.parametrize(("end", "kind"), ENDS)
def test_a_reader_with_an_old_job_gets_its_end(
    store: JobStore, end: Callable[[JobStore, Job], None], kind: str
) -> None:
    feeds = Feeds(store)
    stale = created(store)
    end(store, stale)
    (event,) = asyncio.run(events(feeds, stale))
    assert event is not None
    assert (event.kind, event.is_last) == (kind, True)


@pytest.mark.parametrize(("end", "kind"), ENDS)
def test_a_reader_that_waits_is_told_the_end(
    store: JobStore, end: Callable[[JobStore, Job], None], kind: str
) -> None:
    async def scenario() -> list[str]:
        feeds = Feeds(store)
        job = created(store)
        reading = asyncio.create_task(events(feeds, job))
        await asyncio.sleep(0)
        store.update(job.id, status=RUNNING)
        end(store, job)
        return [event.kind for event in await reading if event is not None]

    assert asyncio.run(scenario()) == ["status", "status", kind]


def test_a_job_that_another_life_of_the_service_ended_has_no_feed(store: JobStore) -> None:
    """Its first change that this feed hears of is its last one."""
    job = created(store)
    feeds = Feeds(store)
    fail(store, job)
    (event,) = asyncio.run(events(feeds, job))
    assert event is not None
    assert event.kind == FAILED
