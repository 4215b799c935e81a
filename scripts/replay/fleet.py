"""The general simulator: one event loop over all pools, with every extension and adaptive policies.

Slower than `engine.py` and equal to it wherever both apply. Order at equal times: finishes, workers that become ready
or fail, preemptions, arrivals in file order, timers. Longer than most files here: the transitions of a worker's life
(starting → busy ⇄ idle → released) call each other and are read together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

import numpy as np

from loader.errors import RequestError
from scripts.replay.laws import Crowded, Law, stream
from scripts.replay.options import Options
from scripts.replay.outcome import ABANDONED, REFUSED, Intervals, Outcome, peak_overlap
from scripts.replay.policy import Controller, Plan, Setup
from scripts.replay.traces import Trace

FINISH, READY, PREEMPT, ARRIVAL, TIMER = 0, 1, 2, 3, 4
BACKOFF_STEP_S, BACKOFF_MAX_S = 30.0, 600.0  # after failed starts: 30, 60, 90 … 600 s
EXTRA_DRAWS = 1 << 14


class Worker:
    """One worker; `epoch` invalidates events scheduled for an earlier state."""

    __slots__ = ("active", "billed", "bound", "endless", "epoch", "expired", "free", "number", "pool", "served", "state", "updated")  # fmt: skip

    def __init__(self, number: int, pool: Pool, begun: float, bound: int) -> None:
        self.number = number
        self.pool = pool
        self.billed = begun  # from when it counts as allocated
        self.endless = False  # idle without a timer
        self.bound = bound  # request that waits for this worker, or -1
        self.state = "starting"
        self.epoch = 0
        self.served = 0
        self.free = 0.0
        self.expired = False
        self.active: dict[int, float] = {}  # request → work left, in seconds alone
        self.updated = 0.0


class Pool:
    """Workers and waiting requests of one pool."""

    __slots__ = ("backoff", "backoff_until", "blocked", "created", "expired", "idle", "in_flight", "number", "queue", "queued", "rate_from", "rate_used", "roomy", "running", "scale_due", "starting", "ticking", "wanted")  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.idle: dict[Worker, None] = {}  # insertion order = order of becoming idle
        self.created: list[tuple[int, Worker]] = []  # heap of (−number, idle worker), for newest-created
        self.starting: dict[Worker, None] = {}
        self.roomy: dict[Worker, None] = {}  # busy workers with room for another request
        self.running = 0  # busy workers
        self.in_flight = 0  # requests in service or bound to a starting worker
        self.queue: deque[int] = deque()
        self.queued = 0
        self.expired = 0
        self.backoff = 0
        self.backoff_until = -math.inf
        self.rate_from = -math.inf
        self.rate_used = 0
        self.scale_due = math.inf
        self.ticking = False
        self.wanted = 0  # the policy's latest answer
        self.blocked = False

    @property
    def alive(self) -> int:
        return self.running + len(self.idle) + len(self.starting)


class Fleet:
    """A run in progress; `run` is the only public method and may be called once."""

    def __init__(self, trace: Trace, startup: Law, plan: Plan, options: Options) -> None:
        count = len(trace)
        self.options, self.plan = options, plan
        self.shared = options.is_shared
        self.pools = [Pool(number) for number in range(len(trace.pool_names))]
        self.arrivals: list[float] = trace.arrivals.tolist()
        self.durations: list[float] = trace.durations.tolist()
        self.pool_of: list[int] = trace.pools.tolist()
        self.startups: list[float] = startup.draw(stream(options.seed, "startup"), count).tolist()
        self.extra_startups = self._cycle(startup, "extra startup")
        law = options.scheduling
        self.crowded = law if isinstance(law, Crowded) else None
        self.delays: list[float] = (
            law.draw(stream(options.seed, "scheduling"), count).tolist() if law else [0.0] * count
        )
        self.extra_delays = self._cycle(law, "extra scheduling")
        self.luck = stream(options.seed, "failures")
        self.control: Controller = plan.policy.controller(Setup(startup.median(), trace.pool_names))
        if self.control.governs and not self.shared:
            raise RequestError(
                "this policy starts workers by load",
                where=plan.text,
                found="binding bound",
                expected="--binding shared",
            )
        self.slots = len(options.slowdown)
        self.cap = math.inf if options.max_workers is None else options.max_workers
        self.global_cap = (
            math.inf if options.max_gpus is None else options.max_gpus // options.gpus_per_worker
        )
        self.events: list[tuple[float, int, int, str, Any, int]] = []
        self.sequence = 0
        self.alive = self.workers = 0
        self.open_requests = 0
        self.next_arrival = 0
        self.closing = False
        self.waits = np.full(count, math.nan)
        self.cold = np.zeros(count, dtype=np.uint8)
        self.status = np.zeros(count, dtype=np.uint8)
        self.spans: dict[str, tuple[list[float], list[float], list[int]]] = {
            kind: ([], [], []) for kind in ("generating", "starting", "idle", "lost")
        }
        self.serving: dict[int, float] = {}  # request → begin of its current service
        self.outcome = Outcome(self.waits, self.cold, self.status, 0.0, 0.0, 0.0, 0, engine="fleet")

    def _cycle(self, law: Law | None, purpose: str) -> Iterator[float]:
        """Draws for starts that no arrival caused: buffers, floors, pre-starts, retries."""
        values = [0.0] if law is None else law.draw(stream(self.options.seed, purpose), EXTRA_DRAWS).tolist()
        while True:
            yield from values

    # --- loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Replays the whole trace; every worker is followed to its release."""
        for pool in self.pools:
            warm = max(self.plan.floor, 0 if self.plan.while_active else self.plan.buffer)
            for _ in range(int(min(warm, self.cap))):
                self._prewarm(pool)
            if self.control.tick_s:
                self._tick(pool, 0.0, 0)
        count, events = len(self.arrivals), self.events
        while True:
            due = events[0] if events else None
            if self.next_arrival < count:
                t = self.arrivals[self.next_arrival]
                if due is None or due[0] > t or (due[0] == t and due[1] > ARRIVAL):
                    request = self.next_arrival
                    self.next_arrival += 1
                    self._arrive(request, t)
                    continue
            if due is None:
                break
            heappop(events)
            getattr(self, due[3])(due[4], due[0], due[5])
        return self._result()

    def _at(self, t: float, rank: int, handler: str, subject: Any, epoch: int = 0) -> None:
        heappush(self.events, (t, rank, self.sequence, handler, subject, epoch))
        self.sequence += 1

    def _prewarm(self, pool: Pool) -> None:
        """A worker that was warm before the trace began; its start is not charged."""
        if self.alive >= self.global_cap:
            return
        worker = Worker(self.workers, pool, 0.0, -1)
        self.workers += 1
        self.alive += 1
        self.outcome.prewarmed += 1
        self._become_idle(worker, 0.0)

    # --- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, request: int, t: float) -> None:
        pool = self.pools[self.pool_of[request]]
        self.open_requests += 1
        self.control.arrival(pool.number, pool.in_flight + pool.queued + 1, t)
        worker = next(iter(pool.roomy), None) or self._take_idle(pool, t)
        if worker is not None:
            self._serve(worker, request, t, cold=0)
        elif not self.shared:
            pool.in_flight += 1
            self._start(pool, t, cause=request, bound=request)
        else:
            pool.queue.append(request)
            pool.queued += 1
            if self.options.queue_timeout_s is not None:
                self._at(t + self.options.queue_timeout_s, TIMER, "_abandon", request)
        self._load_changed(pool, t)
        if self.control.tick_s and not pool.ticking:
            self._tick(pool, t, 0)
        self._scale(pool, t, cause=request)
        self._refuse(pool, request, t)

    def _refuse(self, pool: Pool, request: int, t: float) -> None:
        """Turns the newest request away if the queue, without those that starting workers will take, is full."""
        limit = self.options.queue_limit
        if limit is not None and pool.queued > limit + len(pool.starting) and pool.queue[-1] == request:
            pool.queue.pop()
            pool.queued -= 1
            self._drop(request, REFUSED, pool, t)

    def _drop(self, request: int, status: int, pool: Pool, t: float) -> None:
        self.status[request] = status
        self._closed(t)
        self._load_changed(pool, t)

    def _abandon(self, request: int, t: float, epoch: int) -> None:
        if not math.isnan(self.waits[request]) or self.status[request]:
            return
        pool = self.pools[self.pool_of[request]]
        pool.queued -= 1
        pool.queue.remove(request)
        self._drop(request, ABANDONED, pool, t)

    def _closed(self, t: float) -> None:
        """One request less; after the last one, floors and buffers end and idle workers run out their retention."""
        self.open_requests -= 1
        if self.open_requests == 0 and self.next_arrival == len(self.arrivals):
            self.closing = True
            for pool in self.pools:
                self._trim(pool, t)
                for worker in [idle for idle in pool.idle if idle.endless and not self.control.governs]:
                    self._release(worker, t)

    def _serve(self, worker: Worker, request: int, t: float, cold: int) -> None:
        pool = worker.pool
        self.waits[request] = t - self.arrivals[request]
        self.cold[request] = cold
        if worker.state != "busy":
            worker.state = "busy"
            worker.free = t  # from here on: begin of the busy stretch
            pool.running += 1
        if worker.bound != request:
            pool.in_flight += 1
        worker.bound = -1
        worker.served += 1
        self._advance(worker, t)
        worker.active[request] = self.durations[request]
        self.serving[request] = t
        if len(worker.active) < self.slots:
            pool.roomy[worker] = None
        else:
            pool.roomy.pop(worker, None)
        self._schedule_finish(worker, t)

    def _advance(self, worker: Worker, t: float) -> None:
        """Takes the elapsed time off the work left of every request that runs together."""
        if worker.active and t > worker.updated:
            done = (t - worker.updated) / self.options.slowdown[len(worker.active) - 1]
            for request in worker.active:
                worker.active[request] -= done
        worker.updated = t

    def _schedule_finish(self, worker: Worker, t: float) -> None:
        worker.epoch += 1
        slow = self.options.slowdown[len(worker.active) - 1]
        self._at(t + max(min(worker.active.values()), 0.0) * slow, FINISH, "_finish", worker, worker.epoch)

    def _finish(self, worker: Worker, t: float, epoch: int) -> None:
        if epoch != worker.epoch or worker.state != "busy":
            return
        pool = worker.pool
        request = min(worker.active, key=worker.active.__getitem__)
        self._advance(worker, t)
        del worker.active[request]
        del self.serving[request]
        level = pool.in_flight + pool.queued
        pool.in_flight -= 1
        if worker.active:
            pool.roomy[worker] = None
            self._schedule_finish(worker, t)
            if pool.queued:
                self._serve(worker, self._next_queued(pool), t, cold=0)
        else:
            self._span("generating", worker, worker.free, t)
            worker.state = "free"
            pool.running -= 1
            pool.roomy.pop(worker, None)
            self._offer(worker, t, cold=0, level=level)
        self._load_changed(pool, t)
        self._closed(t)
        self._trim(pool, t)

    def _offer(self, worker: Worker, t: float, cold: int, level: int) -> None:
        """A worker is free: the head of the queue takes it, or it is idle."""
        pool = worker.pool
        if not pool.queued:
            self._become_idle(worker, t, level)
            return
        self._serve(worker, self._next_queued(pool), t, cold)
        while pool.queued and len(worker.active) < self.slots:
            self._serve(worker, self._next_queued(pool), t, cold)
        if self.options.cancel_surplus and not cold and len(pool.starting) > pool.queued:
            self._cancel(next(reversed(pool.starting)), t)

    def _next_queued(self, pool: Pool) -> int:
        pool.queued -= 1
        return pool.queue.popleft()

    def _load_changed(self, pool: Pool, t: float) -> None:
        self.control.load(pool.number, t, pool.in_flight + pool.queued)

    # --- idle workers ----------------------------------------------------------------------------------------------

    def _become_idle(self, worker: Worker, t: float, level: int = 0) -> None:
        pool = worker.pool
        worker.state, worker.free, worker.expired = "idle", t, False
        worker.epoch += 1
        pool.idle[worker] = None
        if self.options.dispatch == "newest-created":
            heappush(pool.created, (-worker.number, worker))
        keep = self.control.idle(pool.number, level, t)
        for_s = keep.for_s
        if worker.served == 0 and self.options.fresh_idle_s is not None:
            for_s = min(for_s, self.options.fresh_idle_s)
        if keep.restart_s is not None and not self.closing:
            self._at(t + keep.restart_s, TIMER, "_restart", pool, level)
        worker.endless = for_s == math.inf
        if not worker.endless:
            self._at(t + for_s, TIMER, "_expire", worker, worker.epoch)
        elif self.closing and not self.control.governs:
            self._release(worker, t)

    def _take_idle(self, pool: Pool, t: float) -> Worker | None:
        if not pool.idle:
            return None
        if self.options.dispatch == "oldest-idle":
            worker = next(iter(pool.idle))
        elif self.options.dispatch == "newest-idle":
            worker = next(reversed(pool.idle))
        else:
            while pool.created[0][1] not in pool.idle:
                heappop(pool.created)
            worker = heappop(pool.created)[1]
        self._leave_idle(worker, t)
        return worker

    def _leave_idle(self, worker: Worker, t: float) -> None:
        pool = worker.pool
        del pool.idle[worker]
        pool.expired -= worker.expired
        worker.expired = False
        worker.epoch += 1
        self._span("idle", worker, worker.free, t)

    def _expire(self, worker: Worker, t: float, epoch: int) -> None:
        if epoch != worker.epoch or worker.state != "idle":
            return
        if self._is_protected(worker.pool, t):
            worker.expired = True
            worker.pool.expired += 1
            return
        self._release(worker, t)

    def _is_protected(self, pool: Pool, t: float) -> bool:
        return not self.closing and pool.alive - 1 < self._needed(pool, t)

    def _release(self, worker: Worker, t: float) -> None:
        self._leave_idle(worker, t)
        self._gone(worker, t)

    def _gone(self, worker: Worker, t: float) -> None:
        worker.state = "released"
        worker.epoch += 1
        self.alive -= 1
        self.outcome.useless += worker.served == 0
        if self.global_cap < math.inf:
            waiting = [
                pool for pool in self.pools if pool.blocked and pool.queued and pool is not worker.pool
            ]
            for pool in sorted(waiting, key=lambda pool: pool.queue[0]):
                pool.blocked = False
                self._scale(pool, t)

    def _trim(self, pool: Pool, t: float) -> None:
        """Releases workers whose retention ended while a floor or buffer held them, oldest first."""
        while pool.expired and not self._is_protected(pool, t):
            self._release(next(worker for worker in pool.idle if worker.expired), t)

    # --- starting workers ------------------------------------------------------------------------------------------

    def _needed(self, pool: Pool, t: float) -> int:
        """Workers that demand, spare rule, floor and policy ask for."""
        demand = math.ceil((pool.in_flight + pool.queued) / self.slots)
        floor = 0 if self.closing else self.plan.floor
        if self.control.governs:
            return max(pool.wanted, 1 if demand and not pool.alive else 0, floor)
        if self.closing:
            return demand
        return max(demand + self.plan.spare(pool.in_flight, pool.queued), floor, pool.wanted)

    def _scale(self, pool: Pool, t: float, cause: int = -1, *, late: bool = False) -> None:
        """Starts what is missing, within delay, rate, back-off and caps."""
        if self._needed(pool, t) <= pool.alive:
            return
        delay = self.options.scale_delay_s
        if delay > 0 and not late:
            if pool.scale_due == math.inf:
                pool.scale_due = t + delay
                self._at(t + delay, TIMER, "_late_scale", pool)
            return
        if t < pool.backoff_until:
            return
        # Making room may release workers, which may start others: look again after each start.
        while self._needed(pool, t) > pool.alive:
            if pool.alive >= self.cap or not self._within_rate(pool, t) or not self._has_room(pool, t):
                return
            pool.rate_used += 1
            self._start(pool, t, cause)
            cause = -1

    def _late_scale(self, pool: Pool, t: float, epoch: int) -> None:
        pool.scale_due = math.inf
        self._scale(pool, t, late=True)

    def _has_room(self, pool: Pool, t: float) -> bool:
        while self.alive >= self.global_cap:
            others = [next(iter(other.idle)) for other in self.pools if other is not pool and other.idle]
            if not others or not self.options.evict:
                pool.blocked = True
                return False
            self.outcome.evicted += 1
            self._release(min(others, key=lambda worker: worker.free), t)
        return True

    def _within_rate(self, pool: Pool, t: float) -> bool:
        if self.options.scale_rate is None:
            return True
        allowed, interval_s = self.options.scale_rate
        if t >= pool.rate_from + interval_s:
            pool.rate_from, pool.rate_used = t, 0
        if pool.rate_used < allowed:
            return True
        if pool.scale_due == math.inf:
            pool.scale_due = pool.rate_from + interval_s
            self._at(pool.scale_due, TIMER, "_late_scale", pool)
        return False

    def _start(self, pool: Pool, t: float, cause: int = -1, bound: int = -1) -> None:
        worker = Worker(self.workers, pool, t, bound)
        self.workers += 1
        self.alive += 1
        pool.starting[worker] = None
        self.outcome.starts += 1
        startup = self.startups[cause] if cause >= 0 else next(self.extra_startups)
        wait = self.delays[cause] if cause >= 0 else next(self.extra_delays)
        if self.crowded is not None:
            wait = self.crowded.delay(wait, sum(len(other.starting) for other in self.pools))
        if not self.options.bill_scheduling:
            worker.billed = t + wait
        preempt = self.options.preempt_mean_s
        if preempt is not None:
            self._at(t + float(self.luck.exponential(preempt)), PREEMPT, "_preempt", worker)
        failure = self.options.start_failure
        if failure is not None and self.luck.random() < failure[0]:
            self._at(t + wait + failure[1], READY, "_fail", worker, worker.epoch)
        else:
            self._at(t + wait + startup, READY, "_ready", worker, worker.epoch)

    def _ready(self, worker: Worker, t: float, epoch: int) -> None:
        if epoch != worker.epoch or worker.state != "starting":
            return
        pool = worker.pool
        del pool.starting[worker]
        self._span("starting", worker, worker.billed, t)
        pool.backoff = 0
        if worker.bound >= 0:
            self._serve(worker, worker.bound, t, cold=1)
        else:
            self._offer(worker, t, cold=1, level=0)
            self._trim(pool, t)
        self._load_changed(pool, t)

    def _cancel(self, worker: Worker, t: float) -> None:
        self.outcome.cancelled += 1
        self._stop_starting(worker, t)

    def _stop_starting(self, worker: Worker, t: float) -> None:
        del worker.pool.starting[worker]
        if t > worker.billed:
            self._span("starting", worker, worker.billed, t)
        self._gone(worker, t)

    def _fail(self, worker: Worker, t: float, epoch: int) -> None:
        if epoch != worker.epoch or worker.state != "starting":
            return
        pool = worker.pool
        self.outcome.failed_starts += 1
        self._stop_starting(worker, t)
        pool.backoff += 1
        pause = min(BACKOFF_STEP_S * pool.backoff, BACKOFF_MAX_S)
        pool.backoff_until = max(pool.backoff_until, t + pause)
        self._at(pool.backoff_until, TIMER, "_late_scale", pool)

    def _preempt(self, worker: Worker, t: float, epoch: int) -> None:
        """The platform takes the worker; its requests start again elsewhere, ahead of the queue."""
        if worker.state == "released":
            return
        pool = worker.pool
        self.outcome.preempted += 1
        requests = sorted(worker.active)
        if worker.state == "idle":
            self._release(worker, t)
        elif worker.state == "starting":
            requests = [worker.bound] if worker.bound >= 0 else []
            pool.in_flight -= len(requests)
            self._stop_starting(worker, t)
        else:
            self._span("lost", worker, worker.free, t)
            pool.running -= 1
            pool.roomy.pop(worker, None)
            pool.in_flight -= len(requests)
            for request in requests:
                del self.serving[request]
            worker.active.clear()
            self._gone(worker, t)
        for request in reversed(requests):
            self._again(pool, request, t)
        self._scale(pool, t)

    def _again(self, pool: Pool, request: int, t: float) -> None:
        self.waits[request] = math.nan
        worker = self._take_idle(pool, t)
        if worker is not None:
            self._serve(worker, request, t, cold=0)
        elif self.shared:
            pool.queue.appendleft(request)
            pool.queued += 1
        else:
            pool.in_flight += 1
            self._start(pool, t, bound=request)

    # --- timers of policies ----------------------------------------------------------------------------------------

    def _restart(self, pool: Pool, t: float, level: int) -> None:
        """Pre-starts the worker of a level, unless a request or a start has filled it meanwhile."""
        if not self.closing and pool.alive < min(level, self.cap) and self._has_room(pool, t):
            self._start(pool, t)

    def _tick(self, pool: Pool, t: float, epoch: int) -> None:
        pool.ticking = False
        if self.closing and not self.control.governs:
            return
        pool.wanted = self.control.wanted(pool.number, t, pool.alive)
        self._scale(pool, t)
        self._trim(pool, t)
        if self.control.governs:
            surplus = pool.alive - self._needed(pool, t)
            for worker in list(pool.idle)[: max(surplus, 0)]:
                self._release(worker, t)
        following = self.control.next_tick(pool.number, t, pool.alive > 0 or pool.queued > 0)
        if following is not None:
            pool.ticking = True
            self._at(following, TIMER, "_tick", pool)

    # --- accounting ------------------------------------------------------------------------------------------------

    def _span(self, kind: str, worker: Worker, begin: float, end: float) -> None:
        begins, ends, workers = self.spans[kind]
        begins.append(begin)
        ends.append(end)
        workers.append(worker.number)

    def _result(self) -> Outcome:
        """Totals from the recorded spans."""
        if self.open_requests:
            raise RequestError(
                f"{self.open_requests} requests can never be served: idle workers of other pools hold all GPUs",
                where="max_gpus",
                found=self.options.max_gpus,
                hint="allow eviction, or a finite retention",
            )
        assert self.alive == 0, f"{self.alive} workers left at the end"
        spans = {kind: np.array([begins, ends]) for kind, (begins, ends, _) in self.spans.items()}
        workers = {kind: np.array(numbers, dtype=np.int64) for kind, (_, _, numbers) in self.spans.items()}
        intervals = Intervals(spans, workers)
        found = self.outcome
        found.intervals = intervals
        found.generating_s, found.starting_s = intervals.seconds("generating"), intervals.seconds("starting")
        found.idle_s, found.lost_s = intervals.seconds("idle"), intervals.seconds("lost")
        found.peak_workers = peak_overlap(intervals)
        return found
