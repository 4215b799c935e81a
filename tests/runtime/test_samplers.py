"""The Euler step against diffusers' scheduler over whole schedules, bit for bit."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from runtime.samplers import euler_step
from runtime.schedules import named_schedule


def scheduler_of(sigmas: tuple[float, ...]) -> MiniMaxH3Scheduler:
    scheduler = MiniMaxH3Scheduler(shift=12.0)
    scheduler.set_timesteps(sigmas=torch.tensor(sigmas, dtype=torch.float32))
    return scheduler


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["base-1", "base-2", "base-28", "base-49", "fasth3-8"])
@pytest.mark.parametrize("stream", ["video", "audio"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_step_has_the_bits_of_the_reference(name: str, stream: str, dtype: torch.dtype) -> None:
    schedule = named_schedule(name)
    sigmas = getattr(schedule, f"{stream}_sigmas")
    timesteps = getattr(schedule, f"{stream}_timesteps")
    generator = torch.Generator().manual_seed(len(name))
    ours = theirs = torch.randn(37, 16, generator=generator)
    scheduler = scheduler_of(sigmas)
    for index, timestep in enumerate(timesteps):
        velocity = torch.randn(37, 16, generator=generator).to(dtype)
        theirs = scheduler.step(velocity.float(), scheduler.timesteps[index], theirs, return_dict=False)[0]
        ours = euler_step(ours, velocity, timestep, sigmas[index], sigmas[index + 1])
        assert torch.equal(ours, theirs), index
    assert ours.dtype == torch.float32


def test_last_step_is_the_clean_estimate() -> None:
    x, v = torch.randn(5, 4), torch.randn(5, 4)
    assert torch.equal(euler_step(x, v, 0.75, 0.25, 0.0), x + 0.25 * v)


def test_inputs_are_not_written() -> None:
    x, v = torch.randn(5, 4), torch.randn(5, 4)
    before = x.clone(), v.clone()
    euler_step(x, v, 0.5, 0.5, 0.25)
    assert torch.equal(x, before[0])
    assert torch.equal(v, before[1])
