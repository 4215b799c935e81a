"""What has arrived, who waits for it, what went wrong first, and the marks of one load. One lock, no I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from loader.errors import InternalError, WorkerError
from loader.load_plan import LoadPlan


class LoadMark(NamedTuple):
    """A span of the timeline; times are `time.monotonic_ns`. `bytes` is 0 where it means nothing."""

    name: str
    thread: str
    start_ns: int
    end_ns: int
    bytes: int = 0


class LoadProgress:
    """Groups of one plan on their way. All methods may be called from any thread."""

    def __init__(self, plan: LoadPlan, on_failure: Callable[[WorkerError], None] | None = None) -> None:
        self.plan = plan
        self._on_failure = on_failure
        self.started_ns = time.monotonic_ns()
        self.arrived_bytes = 0
        self.verified_bytes = 0  # whole chunks hashed, not only edges
        self._changed = threading.Condition()
        self._missing = [len(group.chunks) for group in plan.groups]
        self._first_ns = [0] * len(plan.groups)
        self._is_ready = [False] * len(plan.groups)
        self._unready = len(plan.groups)
        self._failure: WorkerError | None = None
        self._marks: list[LoadMark] = []
        if plan.is_moved:
            self.mark("warning: unaligned files, tensors are copied one by one")
        self.mark_ready([index for index, group in enumerate(plan.groups) if not group.chunks])

    def arrived(self, chunk: int, start_ns: int, end_ns: int, is_verified: bool) -> list[int]:
        """Count a chunk; returns the groups that it completed."""
        complete = []
        with self._changed:
            if not self.arrived_bytes:
                self._marks.append(LoadMark("first byte", "reader", self.started_ns, end_ns, 0))
            size = self.plan.chunks[chunk].bytes
            self.arrived_bytes += size
            self.verified_bytes += size if is_verified else 0
            for group in self.plan.chunks[chunk].groups:
                self._missing[group] -= 1
                self._first_ns[group] = self._first_ns[group] or start_ns
                if self._missing[group] == 0:
                    complete.append(group)
        return complete

    def mark_ready(self, groups: Iterable[int], since_ns: int | None = None) -> None:
        """`wait` may return for these groups: their bytes are in place, or an event after their copies is recorded.

        Args:
            since_ns: when that was noticed elsewhere; None = now.
        """
        now = since_ns or time.monotonic_ns()
        with self._changed:
            for index in groups:
                group = self.plan.groups[index]
                self._is_ready[index] = True
                self._unready -= 1
                self._marks.append(
                    LoadMark(f"group {group.name}", "loader", self._first_ns[index] or now, now, group.bytes)
                )
            if self._unready == 0:
                self._marks += [
                    LoadMark("all weights", "loader", self.started_ns, now, self.arrived_bytes),
                    LoadMark("hashed whole", "loader", now, now, self.verified_bytes),
                ]
            self._changed.notify_all()

    def fail(self, error: WorkerError) -> None:
        """Keep the first failure and wake everyone."""
        with self._changed:
            is_first = self._failure is None
            if is_first:
                self._failure = error
            self._changed.notify_all()
        if is_first and self._on_failure is not None and not isinstance(error, StreamClosed):
            self._on_failure(error)

    @property
    def failure(self) -> WorkerError | None:
        return self._failure

    @property
    def is_complete(self) -> bool:
        return self._unready == 0

    def is_ready(self, group: int) -> bool:
        with self._changed:
            return self._is_ready[group] and self._failure is None

    def wait(self, group: int, timeout_s: float | None = None) -> bool:
        """Block until `group` is ready; False: it is not after `timeout_s`. Raises: the first failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready[group] or self._failure is not None, timeout_s)
            if self._failure is not None:
                raise self._failure
            return self._is_ready[group]

    def wait_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._unready == 0 or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def mark(
        self,
        name: str,
        start_ns: int | None = None,
        end_ns: int | None = None,
        size: int = 0,
        thread: str | None = None,
    ) -> None:
        """Add a mark of the calling thread, unless another is named; without times it is a point in time."""
        now = time.monotonic_ns()
        thread = thread or threading.current_thread().name
        end = now if end_ns is None else end_ns
        with self._changed:
            self._marks.append(LoadMark(name, thread, end if start_ns is None else start_ns, end, size))

    def marks(self) -> list[LoadMark]:
        with self._changed:
            return list(self._marks)


class StreamClosed(InternalError):
    """Not a failure: somebody closed the stream while others still wanted from it."""


def closed_error() -> StreamClosed:
    return StreamClosed("weight stream was closed", hint="keep the stream open while its groups are needed")
