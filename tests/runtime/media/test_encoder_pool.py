"""Encoder processes: same bytes as in this process, replaced when they die, gone when the pool is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loader.errors import CapabilityError, InternalError
from runtime.media.encode import Mp4Writer
from runtime.media.encoder_pool import EncoderPool, EncoderProcess
from runtime.media.picture_memory import PictureMemory
from runtime.media.unit_encoder import PictureOptions, encode_pictures
from tests.runtime.media.clips import moving_frames, tone

ROOT = Path(__file__).parents[3]
OPTIONS = PictureOptions(48, 32, threads=1)
FRAMES = moving_frames(17)


@pytest.fixture
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(2) as pool:
        pool.start(OPTIONS, 124)
        yield pool


def children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def encode(pool: EncoderPool, frames: np.ndarray = FRAMES, options: PictureOptions = OPTIONS) -> bytes:
    slot = pool.memory.acquire(10)
    assert slot is not None
    slot.view[: frames.size] = frames.tobytes()
    return pool.encode(slot, len(frames), "rgb24", options).result()


def test_a_process_makes_the_bytes_that_this_process_makes(pool: EncoderPool) -> None:
    assert encode(pool) == encode_pictures(memoryview(FRAMES.tobytes()), 17, "rgb24", OPTIONS)
    assert pool.fallback == ""
    assert pool.replaced == 0


def test_all_tasks_are_answered_by_a_few_processes(pool: EncoderPool) -> None:
    units = [moving_frames(2 + index) for index in range(6)]
    futures = []
    for unit in units:
        slot = pool.memory.acquire(10)
        assert slot is not None
        slot.view[: unit.size] = unit.tobytes()
        futures.append(pool.encode(slot, len(unit), "rgb24", OPTIONS))
    for unit, future in zip(units, futures, strict=True):
        assert future.result() == encode_pictures(memoryview(unit.tobytes()), len(unit), "rgb24", OPTIONS)
    assert len(pool._all) == 2


def test_processes_that_died_while_idle_are_replaced(pool: EncoderPool) -> None:
    expected = encode(pool)
    for process in pool._all:
        os.kill(process.child.pid, signal.SIGKILL)
        process.child.wait()

    assert [encode(pool), encode(pool)] == [expected, expected]

    assert pool.replaced == 2
    assert all(process.child.poll() is None for process in pool._all)


class StoppedProcess(EncoderProcess):
    """One that never gets to its first task."""

    def __init__(self, memory_descriptor: int) -> None:
        super().__init__(memory_descriptor)
        os.kill(self.child.pid, signal.SIGSTOP)


def test_a_process_that_hangs_is_stopped_and_its_task_fails_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.media.encoder_pool.EncoderProcess", StoppedProcess)
    with EncoderPool(1, timeout_s=0.2) as pool:
        pool.start()
        pool.memory.resize(FRAMES.size, 3)
        # the replacement hangs as well, so the task's second attempt ends the same way
        with pytest.raises(InternalError, match=r"encoder: .*did not answer in time.*did not answer in time"):
            encode(pool)
        assert pool.replaced == 2


def test_closing_ends_every_process() -> None:
    before = children()
    pool = EncoderPool(2)
    pool.start(OPTIONS, 22)
    pids = [str(process.child.pid) for process in pool._all]
    assert set(pids) <= set(children())
    pool.close()
    pool.close()
    assert children() == before


def test_a_pool_that_was_never_needed_has_no_process() -> None:
    before = children()
    with EncoderPool(4):
        assert children() == before


def test_without_child_processes_this_one_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that refuses to start programs."""
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with EncoderPool(2) as pool:
        pool.start(OPTIONS, 22)
        assert pool.fallback.startswith("no child process")
        assert encode(pool) == encode_pictures(memoryview(FRAMES.tobytes()), 17, "rgb24", OPTIONS)


@pytest.mark.parametrize("processes", [0, 1])
def test_options_are_tried_by_the_encoder_itself(processes: int) -> None:
    with EncoderPool(processes) as pool:
        with pytest.raises(
            CapabilityError, match=r"libx264: the H\.264 encoder cannot be opened.*preset warp"
        ):
            pool.probe(PictureOptions(48, 32, preset="warp"))
        pool.probe(OPTIONS)


def test_a_hardware_encoder_that_is_absent_is_named() -> None:
    with EncoderPool(0) as pool, pytest.raises(CapabilityError, match=r"h264_nvenc: .*cannot be opened"):
        pool.probe(PictureOptions(256, 256, codec="h264_nvenc", preset="p1"))


@pytest.mark.parametrize("fields", [{"codec": "h265"}, {"crf": 52}, {"crf": -1}, {"threads": 0}])
def test_unknown_options_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(CapabilityError, match="do not exist"):
        PictureOptions(48, 32, **fields)  # type: ignore[arg-type]


def test_an_error_of_the_encoder_is_an_answer_not_a_death(pool: EncoderPool) -> None:
    with pytest.raises(CapabilityError, match="preset warp"):
        encode(pool, options=PictureOptions(48, 32, preset="warp"))
    assert pool.replaced == 0
    assert encode(pool)


def test_slots_are_distinct_and_come_back() -> None:
    memory = PictureMemory()
    memory.resize(5000, 3)
    slots = [memory.acquire(0) for _ in range(3)]
    assert memory.acquire(0) is None
    for index, slot in enumerate(slots):
        assert slot is not None
        slot.view[:] = bytes([index + 1]) * len(slot.view)
    for index, slot in enumerate(slots):
        assert slot is not None
        assert set(slot.view) == {index + 1}
        memory.release(slot)
    first = memory.acquire(0)
    assert first is not None
    with pytest.raises(InternalError, match="in use"):
        memory.resize(1 << 20, 3)
    memory.release(first)
    del first, slot, slots
    memory.resize(1 << 20, 3)
    again = memory.acquire(0)
    assert again is not None
    assert len(again.view) >= 1 << 20
    memory.close()


def test_a_request_goes_on_when_one_encoder_dies(pool: EncoderPool, tmp_path: Path) -> None:
    frames = moving_frames(56)
    for name, kill in (("a", False), ("b", True)):
        with Mp4Writer(tmp_path / f"{name}.mp4", 48, 32, frames=56, encoders=pool, threads=1) as writer:
            writer.add_sound(tone(56))
            writer.add_frames(frames[:17])
            if kill:
                os.kill(pool._all[0].child.pid, signal.SIGKILL)
            writer.add_frames(frames[17:34])
            writer.add_frames(frames[34:])
            writer.finish()
    assert pool.replaced == 1
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_a_request_fails_and_leaves_nothing_when_encoders_keep_dying(tmp_path: Path) -> None:
    with EncoderPool(1, timeout_s=30) as pool:
        pool.start(OPTIONS, 39)
        encode(pool)

        def always_dead(memory: int) -> EncoderProcess:
            process = EncoderProcess(memory)
            os.kill(process.child.pid, signal.SIGKILL)
            process.child.wait()
            return process

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("runtime.media.encoder_pool.EncoderProcess", always_dead)
            os.kill(pool._all[0].child.pid, signal.SIGKILL)
            pool._all[0].child.wait()
            with Mp4Writer(tmp_path / "c.mp4", 48, 32, frames=39, encoders=pool, threads=1) as writer:
                writer.add_sound(tone(39))
                with pytest.raises(InternalError, match="encoder: encoder processes died on one task"):
                    add_units_and_finish(writer)
        assert list(tmp_path.iterdir()) == []


def add_units_and_finish(writer: Mp4Writer) -> None:
    """A failure of the first unit may be known when the second one is added."""
    writer.add_frames(moving_frames(17))
    writer.add_frames(moving_frames(22))
    writer.finish()


def test_encoders_end_with_their_worker_however_it_ends() -> None:
    program = (
        "import sys, time\n"
        "from runtime.media.encoder_pool import EncoderPool\n"
        "from runtime.media.unit_encoder import PictureOptions\n"
        "pool = EncoderPool(2)\n"
        "pool.probe(PictureOptions(48, 32, threads=1))\n"
        "print(*(process.child.pid for process in pool._all), flush=True)\n"
        "sys.stdin.read()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert worker.stdout is not None
    assert worker.stdin is not None
    descriptors = [os.pidfd_open(int(pid)) for pid in worker.stdout.readline().split()]
    worker.kill()
    worker.wait()
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        assert ended
    worker.stdin.close()
    worker.stdout.close()
    assert len(descriptors) == 2
