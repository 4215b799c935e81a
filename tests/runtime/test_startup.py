"""The startup graph: order, overlap, failure."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import InternalError
from runtime.startup import Graph, Node, Results
from runtime.timeline import Timeline


def run(*nodes: Node) -> Results:
    return Graph(nodes, Timeline()).run()


def test_results_reach_the_nodes_that_need_them() -> None:
    results = run(
        Node("sum", lambda r: r["a"] + r["b"], needs=("a", "b")),
        Node("a", lambda r: 1, thread="x"),
        Node("b", lambda r: 2, thread="y"),
    )
    assert dict(results) == {"a": 1, "b": 2, "sum": 3}


def test_threads_overlap_with_main() -> None:
    meet = threading.Barrier(2, timeout=10)
    results = run(Node("main", lambda r: meet.wait()), Node("other", lambda r: meet.wait(), thread="x"))
    assert sorted([results["main"], results["other"]]) == [0, 1]


def test_first_failure_is_raised_and_later_nodes_never_start() -> None:
    ran: list[str] = []

    def fail(results: Results) -> None:
        raise ValueError("first")

    def late(results: Results) -> None:
        ran.append("late")

    with pytest.raises(ValueError, match="first"):
        run(Node("fails", fail, thread="x"), Node("late", late, needs=("fails",)))
    assert ran == []


def test_running_nodes_are_cancelled_and_waited_for() -> None:
    release = threading.Event()
    stopped: list[bool] = []

    def long(results: Results) -> None:
        stopped.append(release.wait(timeout=10) and results.is_cancelled)

    def fail(results: Results) -> None:
        raise RuntimeError("cause")

    with pytest.raises(RuntimeError, match="cause"):
        run(
            Node("long", long, thread="x", cancel=release.set),
            Node("gate", lambda r: None),
            Node("fails", fail),
        )
    assert stopped in ([True], [])  # not started at all is as good as stopped


@pytest.mark.parametrize("where", ["wait", "thread start"])
def test_an_interrupt_of_the_caller_is_a_failure_like_any_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C; a node on another thread that waits for ever is told, and waited for."""
    told, runs = threading.Event(), threading.Event()
    found: list[bool] = []
    caller, start = threading.current_thread(), threading.Thread.start

    class Changed(threading.Condition):
        def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
            if threading.current_thread() is not caller:
                return super().wait_for(predicate, timeout)
            self.release()
            assert runs.wait(60)
            self.acquire()
            raise KeyboardInterrupt

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        assert runs.wait(60)
        raise KeyboardInterrupt

    def waits(results: Results) -> None:
        runs.set()
        found.append(told.wait(60) and results.is_cancelled)

    graph = Graph(
        [Node("waits", waits, thread="x", cancel=told.set), Node("late", lambda r: None, needs=("waits",))],
        Timeline(),
    )
    if where == "wait":
        graph._changed = Changed()
    else:
        monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        graph.run()
    assert found == [True]


def test_a_thread_that_cannot_be_had_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    told, real = threading.Event(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "second":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        run(
            Node("first", lambda r: told.wait(1), thread="first", cancel=told.set),
            Node("second", lambda r: None, thread="second"),
        )
    assert not [thread for thread in threading.enumerate() if thread.name == "first"]


def test_a_second_failure_does_not_replace_the_first() -> None:
    first_failed = threading.Event()

    def first(results: Results) -> None:
        raise ValueError("cause")

    def second(results: Results) -> None:
        first_failed.wait(timeout=10)
        raise KeyError("consequence")

    with pytest.raises(ValueError, match="cause"):
        run(Node("second", second, thread="x", cancel=first_failed.set), Node("first", first))


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([Node("a", lambda r: 0), Node("a", lambda r: 0)], id="same name twice"),
        pytest.param([Node("a", lambda r: 0, needs=("b",))], id="unknown need"),
        pytest.param([Node("a", lambda r: 0, needs=("b",)), Node("b", lambda r: 0)], id="thread order"),
        pytest.param(
            [
                Node("a", lambda r: 0, needs=("b",), thread="x"),
                Node("b", lambda r: 0, needs=("a",), thread="y"),
            ],
            id="cycle",
        ),
    ],
)
def test_graphs_that_can_never_finish_are_refused(nodes: list[Node]) -> None:
    with pytest.raises(InternalError):
        Graph(nodes, Timeline())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_graphs_respect_every_need(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    needs = [tuple(f"n{j}" for j in range(i) if data.draw(st.booleans())) for i in range(count)]
    threads = [data.draw(st.sampled_from(["main", "x", "y"])) for _ in range(count)]
    order: list[str] = []
    lock = threading.Lock()

    def node(index: int) -> Node:
        def work(results: Results) -> int:
            with lock:
                order.append(f"n{index}")
            return index

        return Node(f"n{index}", work, needs[index], threads[index])

    run(*[node(i) for i in range(count)])
    for index in range(count):
        assert all(order.index(need) < order.index(f"n{index}") for need in needs[index])
