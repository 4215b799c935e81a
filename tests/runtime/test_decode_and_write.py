"""The request loop's last phase: units to encoders, cancellation between units, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.errors import InternalError
from runtime.encoders import Encoders
from runtime.family import MediaPlan
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.pipeline import Cancelled, Hooks, decode_and_write
from runtime.settings import Settings
from runtime.timeline import Timeline
from tests.runtime.media.clips import moving_frames, tone

MEDIA = MediaPlan(48, 32, 56, 24, 32_000)


class Units:
    """Gives out the parts it was given and counts those that were taken."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts, self.taken = parts, 0

    def units(self, latents: Mapping[str, Any]) -> Iterator[Any]:
        for part in self.parts:
            self.taken += 1
            yield part


class FakeJob:
    media = MEDIA

    def __init__(self, pictures: list[np.ndarray] | None = None) -> None:
        frames = moving_frames(56)
        self.video = Units(pictures or [frames[:17], frames[17:34], frames[34:]])
        self.audio = Units([tone(56)])

    def decoders(self) -> Mapping[str, Any]:
        return {"video": self.video, "audio": self.audio}


@pytest.fixture(scope="module")
def encoders() -> Iterator[Encoders]:
    encoders = Encoders(Settings(encoder_processes=1), "cpu")
    encoders.start(MEDIA)
    yield encoders
    encoders.close()
    encoders.close()


def run(job: FakeJob, output: Path, hooks: Hooks, encoders: Encoders | None = None) -> dict[str, object]:
    pool, options = (encoders.pool, encoders.options) if encoders else (None, {})
    return decode_and_write(job, {}, output, hooks, options, pool)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_pool", [False, True])
def test_a_clip_is_written_and_marked(has_pool: bool, encoders: Encoders, tmp_path: Path) -> None:
    frames: list[tuple[int, int]] = []
    hooks = Hooks(Timeline(), threading.Event(), on_frames=lambda *counts: frames.append(counts))
    figures = run(FakeJob(), tmp_path / "clip.mp4", hooks, encoders if has_pool else None)
    assert (figures["num_frames"], figures["size_bytes"]) == (56, (tmp_path / "clip.mp4").stat().st_size)
    assert check_mp4(tmp_path / "clip.mp4", Mp4Expectation(48, 32, 56)).problems == []
    assert [mark.name for mark in hooks.timeline.marks] == ["first_frame_out"]
    assert frames == [(17, 56), (34, 56), (56, 56)]
    assert [span.name for span in hooks.timeline.spans] == ["audio decode", *["hand over"] * 3, "finish file"]


def test_cancelling_stops_at_the_next_unit_and_leaves_nothing(encoders: Encoders, tmp_path: Path) -> None:
    job, cancelled = FakeJob(), threading.Event()

    class CancelsInItsSecondUnit(Units):
        def units(self, latents: Mapping[str, Any]) -> Iterator[Any]:
            for part in super().units(latents):
                if self.taken == 2:
                    cancelled.set()
                yield part

    job.video = CancelsInItsSecondUnit(job.video.parts)
    with pytest.raises(Cancelled):
        run(job, tmp_path / "clip.mp4", Hooks(Timeline(), cancelled), encoders)
    assert job.video.taken == 2
    assert list(tmp_path.iterdir()) == []
    assert len(encoders.pool.memory._free) == encoders.pool.memory.slots


def test_a_decoder_that_fails_leaves_nothing_and_the_next_request_works(
    encoders: Encoders, tmp_path: Path
) -> None:
    job = FakeJob([moving_frames(17), np.zeros((17, 8, 8, 3), np.uint8)])
    hooks = Hooks(Timeline(), threading.Event())
    with pytest.raises(InternalError, match="video decoder: wrong frames"):
        run(job, tmp_path / "clip.mp4", hooks, encoders)
    assert list(tmp_path.iterdir()) == []
    run(FakeJob(), tmp_path / "clip.mp4", Hooks(Timeline(), threading.Event()), encoders)
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_a_missing_unit_fails_the_request(encoders: Encoders, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="wrong number of frames; found 17; allowed: 56"):
        run(FakeJob([moving_frames(17)]), tmp_path / "c.mp4", Hooks(Timeline(), threading.Event()), encoders)
    assert list(tmp_path.iterdir()) == []


def test_processes_are_chosen_from_the_machine_and_the_settings() -> None:
    chosen, given = (
        Encoders(Settings(), "cpu"),
        Encoders(Settings(encoder_processes=7, encoder_crf=30), "cpu"),
    )
    try:
        assert 1 <= chosen.pool.processes <= 4
        assert 1 <= chosen.options["threads"] <= 8
        assert (given.pool.processes, given.options["crf"]) == (7, 30)
    finally:
        chosen.close()
        given.close()
