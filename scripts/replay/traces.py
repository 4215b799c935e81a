"""A request trace in memory, and the operations that change one: thinning, stretching, service times."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from loader.errors import RequestError
from scripts.replay.laws import Law, stream

Floats = NDArray[np.float64]
Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Args:
        arrivals: [N] float64, seconds from the first event, ascending; equal stamps keep file order.
        durations: [N] float64, generation time of each request in seconds, ≥ 0.
        pools: [N] int32, index into `pool_names`; workers never serve another pool's requests.
        label: how the trace is named in results.
        facts: what reading or drawing it found and changed, JSON-ready.
        clock_s: seconds of the first event past a full hour of the wall clock, where stamps were dates.
        sizes: other numeric columns by name, [N] each (for service times proportional to a size).
        startups: measured startup times that came with the trace.
    """

    arrivals: Floats
    durations: Floats
    pools: Codes
    pool_names: tuple[str, ...]
    label: str
    facts: Mapping[str, object] = field(default_factory=dict)
    clock_s: float = 0.0
    sizes: Mapping[str, Floats] = field(default_factory=dict)
    startups: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.arrivals)

    def digest(self) -> str:
        """SHA-256 over the columns that a simulation reads."""
        found = hashlib.sha256()
        for column in (self.arrivals, self.durations, self.pools):
            found.update(np.ascontiguousarray(column).view(np.uint8).data)
        return found.hexdigest()

    def pool_rows(self) -> list[NDArray[np.int64]]:
        """Row numbers of each pool, ascending; one entry per name."""
        if len(self.pool_names) == 1:
            return [np.arange(len(self), dtype=np.int64)]
        order = np.argsort(self.pools, kind="stable")
        borders = np.searchsorted(self.pools[order], np.arange(1, len(self.pool_names)))
        return list(np.split(order.astype(np.int64), borders))

    def noted(self, **facts: object) -> Trace:
        """The same trace with more facts."""
        return replace(self, facts={**self.facts, **facts})

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Trace:
        """The chosen rows; the clock does not move."""
        return replace(
            self,
            arrivals=self.arrivals[rows],
            durations=self.durations[rows],
            pools=self.pools[rows],
            sizes={name: column[rows] for name, column in self.sizes.items()},
        )


def single_pool(arrivals: Floats, durations: Floats, label: str = "given") -> Trace:
    """A trace of one pool from two columns (sorted by arrival)."""
    return Trace(
        np.asarray(arrivals, dtype=np.float64),
        np.asarray(durations, dtype=np.float64),
        np.zeros(len(arrivals), dtype=np.int32),
        ("all",),
        label,
    )


def thin(trace: Trace, share: Fraction, seed: int) -> Trace:
    """Keeps each request with probability `share`: bursts stay, the volume changes. 1/1 is the identity."""
    if not 0 < share <= 1:
        raise RequestError("a share outside its range", where="--thin", found=share, expected="0 < share ≤ 1")
    if share == 1:
        return trace
    kept = trace.take(stream(seed, "thin").random(len(trace)) < float(share))
    if len(kept) == 0:
        raise RequestError("no request left", where="--thin", found=share, expected="a larger share")
    return kept.noted(thin=str(share), thinned_from=len(trace))


def stretch(trace: Trace, factor: float) -> Trace:
    """Multiplies the gaps between arrivals, never the service times."""
    _require_factor(factor, "--interval-scale")
    if factor == 1:
        return trace
    return replace(trace, arrivals=trace.arrivals * factor).noted(interval_scale=factor)


def _require_factor(factor: float, option: str) -> None:
    if not 0 < factor < np.inf:
        raise RequestError("not a positive factor", where=option, found=factor, expected="> 0")


def merge_pools(trace: Trace) -> Trace:
    """All requests in one pool."""
    return replace(trace, pools=np.zeros(len(trace), dtype=np.int32), pool_names=("all",)).noted(
        pools="merged"
    )


def with_durations(trace: Trace, law: Law, seed: int) -> Trace:
    """Service times drawn independently from `law`; the law is noted in the trace."""
    drawn = law.draw(stream(seed, "duration"), len(trace))
    return replace(trace, durations=drawn).noted(duration=law.text)


def scale_durations(trace: Trace, factor: float) -> Trace:
    """Multiplies the service times, never the gaps."""
    _require_factor(factor, "--duration-scale")
    return replace(trace, durations=trace.durations * factor).noted(duration_scale=factor)


def durations_by_size(trace: Trace, column: str, mean_s: float) -> Trace:
    """Service times proportional to a size column, mean·size/mean(size), clipped to [0.2, 5]·mean."""
    if column not in trace.sizes:
        raise RequestError(
            "no such numeric column",
            where="--duration by",
            found=repr(column),
            expected=", ".join(trace.sizes) or "none",
        )
    sizes = trace.sizes[column]
    average = float(np.mean(sizes))
    if average <= 0:
        raise RequestError(
            "sizes without a positive mean", where=f"column {column}", found=average, expected="> 0"
        )
    scaled = np.clip(mean_s * sizes / average, 0.2 * mean_s, 5 * mean_s)
    return replace(trace, durations=scaled).noted(duration=f"by:{column},mean={mean_s:g}")
