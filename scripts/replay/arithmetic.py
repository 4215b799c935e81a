"""Closed arithmetic of one request, one wave, one price: the figures a simulator must reproduce."""

from __future__ import annotations

import math
from statistics import NormalDist


def cycle_share(generation_s: float, startup_s: float, multiple: float) -> float:
    """Share of GPU time generating in one start–generate–idle cycle with retention `multiple`·startup."""
    return generation_s / (generation_s + startup_s * (1 + multiple))


def first_over_warm(generation_s: float, startup_s: float) -> float:
    """Time to the first result over the time to a warm one."""
    return (startup_s + generation_s) / generation_s


def wave_wait(position: int, workers: int, generation_s: float) -> float:
    """Wait of request `position` (from 0) of simultaneous equal requests on a fleet that frees up together."""
    return position // workers * generation_s


def idle_share_at_peak(multiple_of_mean: float) -> float:
    """Idle share of a fleet sized `multiple_of_mean` times the mean load."""
    return 1 - 1 / multiple_of_mean


def overhead_cut(before: float, after: float) -> float:
    """Cut of starting + idle seconds per request that follows from two generating shares alone."""
    return 1 - (1 / after - 1) / (1 / before - 1)


def time_saved(before: float, after: float) -> float:
    """Cut of allocated GPU time that follows from two generating shares alone."""
    return 1 - before / after


def break_even_retention(startup_s: float, wait_value: float) -> float:
    """Retention at which keeping costs as much as a start; a second of waiting priced as `wait_value` GPU-seconds."""
    return startup_s * (1 + wait_value)


def price(seconds: float, gpus: int, usd_per_gpu_s: float) -> float:
    """Cost of `gpus` held for `seconds`."""
    return seconds * gpus * usd_per_gpu_s


def erlang_c(load: float, workers: int) -> float:
    """Probability of waiting in M/M/C with `load` erlangs (recurrence of Erlang B; stable for large C)."""
    blocking = 1.0
    for count in range(1, workers + 1):
        blocking = load * blocking / (count + load * blocking)
    return blocking / (1 - load / workers * (1 - blocking))


def poisson_quantile(mean: float, quantile: float) -> int:
    """Smallest k with P(Poisson(mean) ≤ k) ≥ quantile."""
    if mean > 700:  # exp(-mean) underflows; the normal approximation is good to one part in a hundred here
        return math.ceil(NormalDist(mean, math.sqrt(mean)).inv_cdf(quantile))
    term = math.exp(-mean)
    total, count = term, 0
    while total < quantile and count < 10_000:
        count += 1
        term *= mean / count
        total += term
    return count
