"""Update rules of the denoising loop. torch tensors in, torch tensors out; no torch import needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.schedules import round_float32

if TYPE_CHECKING:
    from torch import Tensor


def euler_step(latents: Tensor, velocity: Tensor, timestep: float, sigma: float, next_sigma: float) -> Tensor:
    """One rectified-flow Euler step without noise, equal in every bit to diffusers' MiniMaxH3Scheduler.step.

    The velocity points towards the data: x0 = x + s * v, then x' = r * x + (1 - r) * x0 with r = next_sigma / sigma.
    `s` is float32 `1 - timestep`, recomputed although it names sigma: below 0.5 the two differ in the last bits and
    the reference keeps them apart. In the last step r is 0 and the result is x0.

    Args:
        latents: float32, any shape; only rows that are generated (keyframe rows are never stepped).
        velocity: same shape, any float dtype; taken to float32 first.
        timestep, sigma, next_sigma: exact float32 values of the schedule for this evaluation.

    Returns: float32, a new tensor.
    """
    # Python floats that are float32 exactly: no scalar has to travel to the device
    step_sigma = round_float32(1.0 - timestep)
    ratio = round_float32(next_sigma / sigma)
    clean = latents + step_sigma * velocity.to(latents.dtype)
    return ratio * latents + round_float32(1.0 - ratio) * clean
