"""An independent model of the same fleet: one simpy process per worker. Shares no code with the simulator."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy


@dataclass
class Twin:
    """One pool; times of distinct events must differ, as simpy orders ties its own way."""

    arrivals: list[float]
    durations: list[float]
    startups: list[float]
    retention: float
    shared: bool
    newest: bool
    cap: int | None
    env: Any = field(default_factory=simpy.Environment)

    def __post_init__(self) -> None:
        self.waits = [-1.0] * len(self.arrivals)
        self.idle: list[tuple[float, Any]] = []
        self.queue: list[int] = []
        self.starts = self.alive = self.starting = self.useless = 0
        self.idle_s = 0.0

    def run(self) -> Twin:
        self.env.process(self._clients())
        self.env.run()
        return self

    def _clients(self) -> Generator[Any, Any, None]:
        for job, moment in enumerate(self.arrivals):
            yield self.env.timeout(moment - self.env.now)
            if self.idle:
                chosen = (max if self.newest else min)(self.idle, key=lambda item: item[0])
                self.idle.remove(chosen)
                chosen[1].succeed(job)
            elif not self.shared:
                self.env.process(self._worker(self.startups[job], job))
            else:
                self.queue.append(job)
                if len(self.queue) > self.starting and (self.cap is None or self.alive < self.cap):
                    self.env.process(self._worker(self.startups[job], None))

    def _worker(self, startup: float, job: int | None) -> Generator[Any, Any, None]:
        self.starts += 1
        self.alive += 1
        self.starting += 1
        yield self.env.timeout(startup)
        self.starting -= 1
        served = 0
        while True:
            if job is None and self.queue:
                job = self.queue.pop(0)
            if job is None:
                since, wake = self.env.now, self.env.event()
                entry = (since, wake)
                self.idle.append(entry)
                yield wake | self.env.timeout(self.retention)
                self.idle_s += self.env.now - since
                if not wake.triggered:
                    self.idle.remove(entry)
                    break
                job = wake.value
            self.waits[job] = self.env.now - self.arrivals[job]
            served += 1
            yield self.env.timeout(self.durations[job])
            job = None
        self.useless += served == 0
        self.alive -= 1
