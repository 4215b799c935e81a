"""The job store: what survives, what is cleaned up, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loader.errors import CapabilityError
from runtime.server.errors import ApiError
from runtime.server.jobs import (
    COMPLETED,
    FAILED,
    QUEUED,
    RUNNING,
    Idempotency,
    Job,
    JobStore,
    document_of,
    new_job_id,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[JobStore]:
    store = JobStore(tmp_path / "state", clock)
    yield store
    store.close()


def job(owner: str = "a", **fields: Any) -> Job:
    return Job(new_job_id(), owner, "minimax-h3", 1000.0, {"prompt": "p"}, {"seed": 1}, **fields)


def reopened(store: JobStore, clock: Clock) -> JobStore:
    store.close()
    return JobStore(store.state, clock)


def test_a_created_job_is_there_after_a_restart_with_its_picture(store: JobStore, clock: Clock) -> None:
    made = job(pictures={"first_frame": "first_frame.png"})
    store.create(made, {"first_frame": b"png"})
    again = reopened(store, clock)
    assert again.get(made.id) == made
    assert again.picture(made, "first_frame") == b"png"
    assert again.next_queued() == made
    again.close()


def test_two_services_cannot_share_a_state_directory(store: JobStore) -> None:
    with pytest.raises(CapabilityError, match="another service uses"):
        JobStore(store.state)


@pytest.mark.parametrize(
    ("policy", "attempts", "cancelled", "status", "code"),
    [
        ("fail", 1, False, FAILED, "interrupted"),
        ("rerun", 1, False, QUEUED, None),
        ("rerun", 2, False, FAILED, "interrupted"),
        ("rerun", 1, True, FAILED, "cancelled"),
    ],
)
def test_running_jobs_are_settled_by_policy(
    store: JobStore, clock: Clock, policy: str, attempts: int, cancelled: bool, status: str, code: str | None
) -> None:
    made = job()
    store.create(made, {})
    store.update(made.id, status=RUNNING, attempts=attempts, cancel_requested=cancelled)
    again = reopened(store, clock)
    again.recover(policy, 2, 100.0)
    settled = again.get(made.id)
    assert settled is not None
    assert settled.status == status
    assert (settled.error or {}).get("code") == code
    again.close()


def test_recovery_removes_what_belongs_to_nobody(store: JobStore, clock: Clock) -> None:
    done, waiting = job(), job(pictures={"first_frame": "first_frame.png"})
    store.create(done, {})
    store.create(waiting, {"first_frame": b"png"})
    store.finish(done.id, ttl_s=100)
    store.video_path(done.id).parent.mkdir(exist_ok=True)
    for name in ("video.mp4", "video.mp4.part"):
        (store.directory(done.id) / name).write_bytes(b"x")
    (store.directory(waiting.id) / "video.mp4").write_bytes(b"half")
    (store.state / "jobs" / new_job_id()).mkdir()
    again = reopened(store, clock)
    again.recover("fail", 2, 100.0)
    left = sorted(str(path.relative_to(again.state / "jobs")) for path in (again.state / "jobs").rglob("*.*"))
    assert left == sorted([f"{done.id}/video.mp4", f"{waiting.id}/first_frame.png"])
    again.close()


def test_pages_follow_creation_order_and_stay_with_their_owner(store: JobStore) -> None:
    mine = [job("a") for _ in range(5)]
    for made in mine:
        store.create(made, {})
        store.create(job("b"), {})
    newest = [made.id for made in reversed(mine)]
    first, more = store.page("a", None, 2, newest_first=True)
    rest, last = store.page("a", first[-1].id, 10, newest_first=True)
    assert [j.id for j in first + rest] == newest
    assert (more, last) == (True, False)
    oldest, _ = store.page("a", mine[1].id, 2, newest_first=False)
    assert [j.id for j in oldest] == [mine[2].id, mine[3].id]
    with pytest.raises(ApiError, match="after"):
        store.page("b", mine[0].id, 2, newest_first=True)


def test_a_key_makes_one_job_per_owner_for_a_day(store: JobStore, clock: Clock) -> None:
    made, key = job("a"), Idempotency("k", "hash")
    store.create(made, {}, key)
    assert store.idempotent("a", key) == made
    assert store.idempotent("b", key) is None
    with pytest.raises(ApiError) as refusal:
        store.idempotent("a", Idempotency("k", "other"))
    assert (refusal.value.http_status, refusal.value.code) == (409, "idempotency_conflict")
    clock.now += 24 * 3600 + 1
    assert store.idempotent("a", key) is None


def test_results_expire_and_their_records_follow_later(store: JobStore, clock: Clock) -> None:
    made = job()
    store.create(made, {})
    store.video_path(made.id).write_bytes(b"mp4")
    store.finish(made.id, ttl_s=100)
    clock.now += 101
    store.sweep()
    expired = store.get(made.id)
    assert expired is not None
    assert expired.expired
    assert not store.directory(made.id).exists()
    clock.now += 200
    store.sweep()
    assert store.get(made.id) is None


def test_finishing_drops_inputs_and_a_failure_drops_everything(store: JobStore) -> None:
    good, bad = (job(pictures={"first_frame": "first_frame.png"}) for _ in range(2))
    for made in (good, bad):
        store.create(made, {"first_frame": b"png"})
        store.video_path(made.id).write_bytes(b"mp4")
    store.finish(good.id, ttl_s=0)
    store.finish(bad.id, ttl_s=0, error={"code": "x"})
    assert [path.name for path in store.directory(good.id).iterdir()] == ["video.mp4"]
    assert not store.directory(bad.id).exists()
    kept = store.get(good.id)
    assert kept is not None
    assert kept.status == COMPLETED


@pytest.mark.parametrize(
    "bad", ["..", "video_", "video_" + "0" * 31, "video_" + "G" * 32, "video_" + "0" * 32 + "\n", "../" * 3]
)
def test_only_our_ids_become_paths(store: JobStore, bad: str) -> None:
    assert store.get(bad) is None
    with pytest.raises(ValueError, match="not a job id"):
        store.directory(bad)


def test_a_job_of_another_replica_is_adopted_once(store: JobStore, tmp_path: Path) -> None:
    other = JobStore(tmp_path / "other")
    made = job()
    other.create(made, {})
    store.adopt(document_of(made))
    store.update(made.id, progress=7)
    store.adopt(document_of(made))
    adopted = store.get(made.id)
    assert adopted is not None
    assert adopted.progress == 7
    other.close()
