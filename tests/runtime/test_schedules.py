"""Step schedules against torch and diffusers, bit for bit; refusals name the schedule and the position."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import ArtifactError, RequestError
from runtime import schedules
from runtime.schedules import Schedule, explicit_schedule, named_schedule, schedule_from_bits


def bits(values: torch.Tensor) -> list[str]:
    return [f"{pattern & 0xFFFFFFFF:08x}" for pattern in values.view(torch.int32).tolist()]


@pytest.mark.oracle
@pytest.mark.parametrize("shift", [12.0, 3.0, 10.0])
def test_every_published_grid_has_the_bits_of_the_reference(shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    for points in range(2, 202):
        scheduler.set_timesteps(points)
        sigmas = schedules.shifted_grid(schedules.linear_grid(points), shift)
        assert [schedules.float32_bits(s) for s in sigmas] == bits(scheduler.sigmas), points


@pytest.mark.oracle
@pytest.mark.parametrize("evaluations", [1, 2, 8, 28, 49, 50, 200, 1000])
def test_named_base_schedules_follow_the_reference(evaluations: int) -> None:
    schedule = named_schedule(f"base-{evaluations}")
    video, audio = MiniMaxH3Scheduler(shift=12.0), MiniMaxH3Scheduler(shift=3.0)
    video.set_timesteps(evaluations + 1)
    audio.set_timesteps(evaluations + 1)
    assert schedule.evaluations == evaluations == len(video.timesteps)
    assert list(schedule.video_bits) == bits(video.sigmas)
    assert list(schedule.audio_bits) == bits(audio.sigmas)
    assert [schedules.float32_bits(t) for t in schedule.video_timesteps] == bits(video.timesteps)
    assert [schedules.float32_bits(t) for t in schedule.audio_timesteps] == bits(audio.timesteps)


def test_every_base_name_up_to_the_limit_has_that_many_evaluations() -> None:
    for evaluations in range(1, schedules.MAX_EVALUATIONS + 1, 37):
        assert named_schedule(f"base-{evaluations}").evaluations == evaluations


@pytest.mark.oracle
def test_fasth3_ladder() -> None:
    schedule = named_schedule("fasth3-8")
    base = torch.tensor([*schedules.FASTH3_STEPS, 0], dtype=torch.float32) / 1000
    for shift, ladder in ((10.0, schedule.video_bits), (3.0, schedule.audio_bits)):
        expected = shift * base / (1 + (shift - 1) * base)
        assert list(ladder) == bits(expected)
        scheduler = MiniMaxH3Scheduler(shift=shift)
        scheduler.set_timesteps(sigmas=expected)
        assert list(ladder) == bits(scheduler.sigmas)
    assert schedule.evaluations == 8
    assert schedule.video_sigmas[0] == pytest.approx(0.9998999, abs=5e-8)  # published to seven digits
    assert schedule.audio_sigmas == pytest.approx(
        (0.9996664, 0.9541484, 0.8995196, 0.8327401, 0.75, 0.6428571, 0.5, 0.3, 0), abs=5e-8
    )


def test_plans_are_the_distinct_timesteps_in_ascending_order() -> None:
    schedule = named_schedule("base-2")
    level = schedules.round_float32(0.999)
    assert schedule.plan(0) == (0.0,)
    assert schedule.plan(0, 0.999) == (0.0, level)
    assert schedule.plan(1) == (schedule.video_timesteps[1], 0.25)
    assert schedule.plan(1, 0.999) == (schedule.video_timesteps[1], 0.25, level)
    assert all(len(named_schedule("fasth3-8").plan(e)) == 2 for e in range(8))


def test_condition_timestep_never_falls_behind_the_video() -> None:
    schedule = explicit_schedule("late", [1.0, 2**-12, 0.0], [1.0, 0.5, 0.0])
    assert schedule.condition_timestep(0, 0.999) == schedules.round_float32(0.999)
    assert schedule.condition_timestep(1, 0.999) == 1 - 2**-12
    assert schedule.plan(1, 0.999) == (0.5, 1 - 2**-12)  # both collapse into one entry


def test_bit_patterns_round_trip() -> None:
    schedule = named_schedule("base-49")
    again = schedule_from_bits("copy", schedule.video_bits, schedule.audio_bits)
    assert again.same_trajectory(schedule)
    assert not named_schedule("base-48").same_trajectory(schedule)
    assert schedule.video_bits[0] == "3f800000"
    assert schedule.video_bits[-1] == "00000000"


@settings(deadline=None)
@given(st.floats(min_value=-1e38, max_value=1e38))
def test_rounding_equals_torch(value: float) -> None:
    assert schedules.round_float32(value) == torch.tensor(value, dtype=torch.float32).item()


@pytest.mark.parametrize(
    "name", ["base-0", "base-1001", "base--1", "base-07", "base-4.5", "base-", "fasth3-4", "", "base-٤"]
)
def test_unknown_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match="schedule") as caught:
        named_schedule(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([], "too few"),
        ([0.0], "too few"),
        ([1.0, 0.5], "end points"),
        ([1.5, 0.0], "end points"),
        ([float("nan"), 0.0], "end points"),
        ([1.0, 0.5, 0.5, 0.0], "value 2"),
        ([1.0, 0.5, float("nan"), 0.0], "value 2"),
        ([1.0, 0.5, 0.5 - 1e-12, 0.0], "value 2"),  # equal once rounded
        ([1.0, "x", 0.0], "not float32"),
    ],
)
def test_bad_explicit_ladders_are_refused(sigmas: list[float], message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        explicit_schedule("mine", sigmas, [1.0, 0.0])
    assert "mine" in str(caught.value)


def test_ladders_of_different_length_are_refused() -> None:
    with pytest.raises(ArtifactError, match="differ in length"):
        explicit_schedule("mine", [1.0, 0.5, 0.0], [1.0, 0.0])


def test_values_that_are_not_float32_are_refused() -> None:
    with pytest.raises(ArtifactError, match="float32"):
        Schedule("mine", (1.0, 0.1, 0.0), (1.0, 0.5, 0.0))
    with pytest.raises(ArtifactError, match="a float32"):
        Schedule("mine", (0.9, 0.5, 0.0), (1.0, 0.5, 0.0))


@pytest.mark.parametrize("bits_", ["3f80000", "3F800000", "3f8000000", "zzzzzzzz"])
def test_bad_bit_patterns_are_refused(bits_: str) -> None:
    with pytest.raises(ArtifactError, match="bit pattern"):
        schedule_from_bits("mine", [bits_, "00000000"], ["3f800000", "00000000"])


def test_module_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, runtime.schedules; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
