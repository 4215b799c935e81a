"""The base model as two plain loops, one pool at a time; the same body runs in CPython and under Numba.

`bound_pool`: a cold request waits for the worker it started. `shared_pool`: cold requests queue, and whichever worker
becomes free first takes the head. Both use lists and `heapq` only, no objects per event: a request costs one push and
one pop. Order of events at equal times: finishes, then workers that become ready, then arrivals in file order, then
retention timers; so an arrival exactly at free + retention still gets the worker.

Everything beyond constant retention, a cap and these two bindings is in `fleet.py`, which is slower and must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import chain, repeat
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.replay.optional import is_installed, require

Floats = NDArray[np.float64]
Flags = NDArray[np.uint8]
CHUNK = 1 << 16  # rows converted to Python floats at a time: keeps memory flat
# Below this many rows the compiled loop does not win back Numba's import (0.5–1 s).
NUMBA_MIN_ROWS = 3_000_000


@dataclass(frozen=True)
class PoolRun:
    """One pool's requests served.

    Args:
        service: [n] float64, begin of service.
        waits: [n] float64 seconds.
        cold: [n] 1 if served by a worker that had just started.
        started: [n] 1 if the request's arrival started a worker.
        idle_s: idle seconds that ended (reused or released); the workers in `left` are not in it.
        left: free times of the workers still alive after the last completion, ascending.
        fresh_left: how many of those never served.
        gaps: [2, k] begin and end of every idle interval in `idle_s`, or None if not recorded.
    """

    service: Floats
    waits: Floats
    cold: Flags
    started: Flags
    idle_s: float
    starts: int
    useless: int
    peak: int
    left: list[float]
    fresh_left: int
    gaps: Floats | None


def bound_pool(
    arrivals: Any, durations: Any, delays: Any, retention: float, newest: bool, record: bool, cold: Any
) -> Any:
    """Serves one pool with a worker bound to each cold request.

    Args:
        arrivals, durations, delays: n values each; delay = time from arrival to a started worker's readiness.
        cold: [n] zeros of uint8, written.
    Returns: idle seconds, starts, peak workers, free times of the workers left, interval begins, interval ends.
    """
    # Lists begin with a value that is taken out again: from an empty one Numba cannot tell the type.
    busy = [0.0]
    busy.pop()
    idle = [0.0]
    idle.pop()
    begins = [0.0]
    begins.pop()
    ends = [0.0]
    ends.pop()
    head = 0  # idle[head:] are the idle workers' free times, ascending
    idle_s = 0.0
    starts = 0
    peak = 0
    index = 0
    for t, g, delay in zip(arrivals, durations, delays):  # noqa: B905 - Numba knows no `strict`
        while busy and busy[0] <= t:
            idle.append(heappop(busy))
        count = len(idle)
        while head < count and idle[head] + retention < t:
            idle_s += retention
            if record:
                begins.append(idle[head])
                ends.append(idle[head] + retention)
            head += 1
        if head < count:
            if newest:
                free = idle.pop()
            else:
                free = idle[head]
                head += 1
                if head > 4096 and head * 2 > count:
                    idle = idle[head:]
                    head = 0
            idle_s += t - free
            if record:
                begins.append(free)
                ends.append(t)
            heappush(busy, t + g)
        else:
            if head > 4096:  # all of them expired
                idle.clear()
                head = 0
            cold[index] = 1
            starts += 1
            heappush(busy, t + delay + g)
            if len(busy) > peak:
                peak = len(busy)
        index += 1  # noqa: SIM113 - enumerate over zip is slower compiled
    left = idle[head:]
    while busy:
        left.append(heappop(busy))
    return idle_s, starts, peak, left, begins, ends


def shared_pool(
    arrivals: Any,
    durations: Any,
    delays: Any,
    retention: float,
    newest: bool,
    record: bool,
    cold: Any,
    cap: int,
    service: Any,
    started: Any,
) -> Any:
    """Serves one pool whose cold requests share a FIFO queue; at most `cap` workers.

    An arrival starts a worker only if more requests are queued than workers starting. Delays are drawn by the request
    whose arrival starts the worker. `cold`, `started`: [n] zeros, written; `service`: [n] the
    arrivals, overwritten with the begin of service of those that wait.
    Returns: as `bound_pool`, then useless starts and how many of the workers left never served.
    """
    infinity = math.inf
    # Lists begin with a value that is taken out again, as above. One body: calls would slow CPython down.
    busy = [0.0]
    busy.pop()
    starting = [0.0]
    starting.pop()
    idle = [0.0]
    idle.pop()
    fresh = [0]
    fresh.pop()
    queue_t = [0.0]
    queue_t.pop()
    queue_g = [0.0]
    queue_g.pop()
    begins = [0.0]
    begins.pop()
    ends = [0.0]
    ends.pop()
    head = 0
    served = 0  # queue_*[served:] are waiting; request numbers of the queued are in queue_i
    queue_i = [0]
    queue_i.pop()
    idle_s = 0.0
    starts = 0
    useless = 0
    peak = 0
    index = 0
    for t, g, delay in zip(arrivals, durations, delays):  # noqa: B905
        while True:
            x = busy[0] if len(busy) > 0 else infinity
            ready = 0
            if len(starting) > 0 and starting[0] < x:
                x = starting[0]
                ready = 1
            if x > t or x == infinity:
                break
            if ready == 1:
                heappop(starting)
            else:
                heappop(busy)
            if served < len(queue_t):
                service[queue_i[served]] = x
                cold[queue_i[served]] = ready
                heappush(busy, x + queue_g[served])
                served += 1
            else:
                idle.append(x)
                fresh.append(ready)
        while head < len(idle) and idle[head] + retention < t:
            idle_s += retention
            useless += fresh[head]
            if record:
                begins.append(idle[head])
                ends.append(idle[head] + retention)
            head += 1
        if head < len(idle):
            if newest:
                free = idle.pop()
                fresh.pop()
            else:
                free = idle[head]
                head += 1
            idle_s += t - free
            if record:
                begins.append(free)
                ends.append(t)
            heappush(busy, t + g)
        else:
            if served == len(queue_t):
                queue_t.clear()
                queue_g.clear()
                queue_i.clear()
                served = 0
            queue_t.append(t)
            queue_g.append(g)
            queue_i.append(index)
            if len(queue_t) - served > len(starting) and len(busy) + len(starting) < cap:
                heappush(starting, t + delay)
                started[index] = 1
                starts += 1
                if len(busy) + len(starting) > peak:
                    peak = len(busy) + len(starting)
        if head > 4096 and head * 2 > len(idle):
            idle = idle[head:]
            fresh = fresh[head:]
            head = 0
        index += 1  # noqa: SIM113 - enumerate over zip is slower compiled
    while len(busy) > 0 or len(starting) > 0:
        x = busy[0] if len(busy) > 0 else infinity
        ready = 0
        if len(starting) > 0 and starting[0] < x:
            x = heappop(starting)
            ready = 1
        else:
            heappop(busy)
        if served < len(queue_t):
            service[queue_i[served]] = x
            cold[queue_i[served]] = ready
            heappush(busy, x + queue_g[served])
            served += 1
        else:
            # No expiry here: whoever is idle after the last arrival idles out its full retention.
            idle.append(x)
            fresh.append(ready)
    fresh_left = 0
    for flag in fresh[head:]:
        fresh_left += flag
    return idle_s, starts, peak, idle[head:], begins, ends, useless, fresh_left


def clairvoyant_pool(arrivals: Floats, durations: Floats, delays: Floats, limit: float, cold: Flags) -> Any:
    """Newest-idle with foresight: a worker is kept only if its own next use comes within `limit` seconds.

    The decision is taken when the next use is known and applied backwards: a gap longer than the limit costs no idle
    time and a new start. A lower bound for policies under newest-idle dispatch, exact for zero startup.
    Returns: as `bound_pool`, with intervals; workers left cost nothing.
    """
    busy: list[float] = []
    idle: list[float] = []
    begins: list[float] = []
    ends: list[float] = []
    starts = peak = 0
    for index, (t, g, delay) in enumerate(
        zip(arrivals.tolist(), durations.tolist(), delays.tolist(), strict=True)
    ):
        while busy and busy[0] <= t:
            idle.append(heappop(busy))
        free = idle.pop() if idle else -math.inf
        if t - free <= limit:
            begins.append(free)
            ends.append(t)
            heappush(busy, t + g)
        else:
            cold[index] = 1
            starts += 1
            heappush(busy, t + delay + g)
        peak = max(peak, len(busy))
    return math.fsum(ends) - math.fsum(begins), starts, peak, [], begins, ends


def push_wide(heap: Any, value: float) -> None:
    """Adds a value to a heap in which each node has four children."""
    heap.append(value)
    at = len(heap) - 1
    while at > 0:
        parent = (at - 1) >> 2
        if not value < heap[parent]:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = value


def pop_wide(heap: Any) -> Any:
    """Takes the smallest value off such a heap."""
    last = heap.pop()
    count = len(heap)
    if count == 0:
        return last
    top = heap[0]
    at, child = 0, 1
    while child < count:
        best, smallest = child, heap[child]
        for other in range(child + 1, min(child + 4, count)):
            if heap[other] < smallest:
                best, smallest = other, heap[other]
        if not smallest < last:
            break
        heap[at] = smallest
        at = best
        child = 4 * at + 1
    heap[at] = last
    return top


def _compiled(name: str) -> Any:
    """A loop compiled once. Raises: CapabilityError: Numba is not installed."""
    require("numba", "the compiled engine")
    return _compile(name)


@cache
def _compile(name: str) -> Any:
    """A loop compiled, with `heappush` and `heappop` replaced by heaps of four children: fewer cache misses.

    Both heaps return the same values in the same order, so results stay equal to the bit.
    """
    numba = require("numba", "the compiled engine")
    push, pop = numba.njit(cache=True)(push_wide), numba.njit(cache=True)(pop_wide)
    body = globals()[name]
    return numba.njit(cache=True)(
        FunctionType(body.__code__, {**globals(), "heappush": push, "heappop": pop}, name)
    )


def choose_engine(engine: str, rows: int) -> str:
    """`auto` → numba for large traces where it is installed, else python."""
    if engine != "auto":
        return engine
    return "numba" if rows >= NUMBA_MIN_ROWS and is_installed("numba") else "python"


def _values(column: Floats) -> Iterable[float]:
    """A column as Python floats, a chunk at a time."""
    pieces = (column[at : at + CHUNK].tolist() for at in range(0, len(column), CHUNK))
    return chain.from_iterable(pieces)


def run_bound(
    arrivals: Floats,
    durations: Floats,
    delays: Floats | float,
    retention: float,
    *,
    newest: bool,
    record: bool,
    engine: str,
) -> PoolRun:
    """`bound_pool` on one pool under either engine; results are equal to the bit."""
    count = len(arrivals)
    if engine == "numba":
        cold = np.zeros(count, dtype=np.uint8)
        delay_column = np.ascontiguousarray(np.broadcast_to(delays, count), dtype=np.float64)
        found = _compiled("bound_pool")(arrivals, durations, delay_column, retention, newest, record, cold)
    else:
        flags = bytearray(count)
        delay_values = repeat(delays) if isinstance(delays, float) else _values(delays)
        found = bound_pool(
            _values(arrivals), _values(durations), delay_values, retention, newest, record, flags
        )
        cold = np.frombuffer(flags, dtype=np.uint8)
    idle_s, starts, peak, left, begins, ends = found
    waits = np.where(cold, delays, 0.0)
    gaps = np.array([begins, ends]) if record else None
    return PoolRun(arrivals + waits, waits, cold, cold, idle_s, starts, 0, peak, list(left), 0, gaps)


def run_shared(
    arrivals: Floats,
    durations: Floats,
    delays: Floats | float,
    retention: float,
    *,
    newest: bool,
    record: bool,
    engine: str,
    cap: int | None,
) -> PoolRun:
    """`shared_pool` on one pool under either engine."""
    count = len(arrivals)
    service, cold, started = arrivals.copy(), np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.uint8)
    limit = count + 1 if cap is None else cap
    tail = (retention, newest, record)
    if engine == "numba":
        delay_column = np.ascontiguousarray(np.broadcast_to(delays, count), dtype=np.float64)
        found = _compiled("shared_pool")(
            arrivals, durations, delay_column, *tail, cold, limit, service, started
        )
    else:
        delay_values = repeat(delays) if isinstance(delays, float) else _values(delays)
        # Memory views: item assignment is twice as fast as on the arrays.
        found = shared_pool(
            _values(arrivals),
            _values(durations),
            delay_values,
            *tail,
            cold.data,
            limit,
            service.data,
            started.data,
        )
    idle_s, starts, peak, left, begins, ends, useless, fresh_left = found
    gaps = np.array([begins, ends]) if record else None
    return PoolRun(
        service,
        service - arrivals,
        cold,
        started,
        idle_s,
        starts,
        useless,
        peak,
        list(left),
        fresh_left,
        gaps,
    )
