"""The startup graph: named nodes with needs, each run as early as its thread and its needs allow.

A node names the thread it runs on. `"main"` is the caller of `Graph.run`; every other name gets one thread, which
runs its nodes in the order of the list. The first failure decides: nodes that have not started never start, running
nodes are told through `Results.is_cancelled` and their `cancel`, and `Graph.run` raises that first cause after all of
them have stopped. Standard library only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loader.errors import InternalError
from runtime.timeline import Timeline

MAIN = "main"


@dataclass(frozen=True)
class Node:
    """One piece of the start.

    Args:
        name: also the name of its span on the timeline.
        run: called with the results so far; its return value becomes the node's result.
        needs: names of nodes whose results must exist first.
        thread: thread to run on.
        cancel: called once, from the failing thread, if another node fails while or after this one ran; must be
            quick, must not raise, and must be callable also if `run` has not returned.
    """

    name: str
    run: Callable[[Results], Any]
    needs: tuple[str, ...] = ()
    thread: str = MAIN
    cancel: Callable[[], None] | None = None


class Results(Mapping[str, Any]):
    """Results by node name; a node sees those of its needs. `is_cancelled` turns true when the start has failed."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._cancelled = threading.Event()

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()


class Graph:
    """A set of nodes, checked when built: unique names, known needs, no cycle within the threads' orders.

    Raises: InternalError: the nodes cannot be ordered (names the node).
    """

    def __init__(self, nodes: Sequence[Node], timeline: Timeline) -> None:
        self._nodes = list(nodes)
        self._timeline = timeline
        self._changed = threading.Condition()
        self._results = Results()
        self._started: list[Node] = []
        self._cause: BaseException | None = None
        _check_order(self._nodes)

    def run(self) -> Results:
        """Run every node; returns all results. Raises the first failure of any node, unchanged.

        An interrupt of the caller, and a thread that is not to be had, are failures like a node's.
        """
        names = dict.fromkeys(node.thread for node in self._nodes if node.thread != MAIN)
        threads = [threading.Thread(target=self._run_thread, args=(name,), name=name) for name in names]
        try:
            for thread in threads:
                thread.start()
            self._run_thread(MAIN)
            _join(threads)
        except BaseException as error:  # noqa: BLE001 (a border: the cause is kept and raised below)
            self._fail(error)
            _join(threads)
        if self._cause is not None:
            raise self._cause
        return self._results

    def _run_thread(self, thread: str) -> None:
        for node in self._nodes:
            if node.thread == thread and not self._run_node(node):
                return

    def _run_node(self, node: Node) -> bool:
        """Wait for the node's needs, run it, publish its result. False: the start has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._results.is_cancelled or all(need in self._results for need in node.needs)
            )
            if self._results.is_cancelled:
                return False
            self._started.append(node)
        start_ns = time.monotonic_ns()
        try:
            value = node.run(self._results)
        except BaseException as error:  # noqa: BLE001 (a border: the cause is kept and raised by `run`)
            self._timeline.add_span(node.name, start_ns, time.monotonic_ns(), failed=repr(error))
            self._fail(error)
            return False
        self._timeline.add_span(node.name, start_ns, time.monotonic_ns())
        with self._changed:
            self._results._values[node.name] = value
            self._changed.notify_all()
            return not self._results.is_cancelled

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._cause is not None:
                return
            self._cause = error
            self._results._cancelled.set()
            cancels = [node.cancel for node in self._started if node.cancel is not None]
            self._changed.notify_all()
        for cancel in cancels:
            cancel()


def _join(threads: Sequence[threading.Thread]) -> None:
    """Those that run, and one whose start was interrupted: it will run, but cannot be joined yet."""
    for thread in threads:
        while thread in threading.enumerate():
            if thread.is_alive():
                thread.join()
            else:
                time.sleep(0.001)


def _check_order(nodes: Sequence[Node]) -> None:
    names = [node.name for node in nodes]
    for name in names:
        if names.count(name) > 1:
            raise InternalError("two startup nodes share a name", where=name)
    done: set[str] = set()
    waiting = {thread: [n for n in nodes if n.thread == thread] for thread in {n.thread for n in nodes}}
    while any(waiting.values()):
        ready = [queue for queue in waiting.values() if queue and done.issuperset(queue[0].needs)]
        if not ready:
            stuck = {queue[0].name: sorted(set(queue[0].needs) - done) for queue in waiting.values() if queue}
            raise InternalError("startup nodes wait for each other or for an unknown node", found=stuck)
        for queue in ready:
            done.add(queue.pop(0).name)
