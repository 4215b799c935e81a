"""`Ranks` as threads of one process: any number of ranks at the price of none. Collectives copy at `wait`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.parallel.control import Control


class _Hub:
    def __init__(self, size: int) -> None:
        self.size = size
        self.ready = threading.Condition()
        self.boxes: dict[Any, Any] = {}

    def put(self, key: Any, value: Any) -> None:
        with self.ready:
            assert key not in self.boxes, f"{key} twice"
            self.boxes[key] = value
            self.ready.notify_all()

    def get(self, key: Any) -> Any:
        with self.ready:
            assert self.ready.wait_for(lambda: key in self.boxes, timeout=60), f"nobody sent {key}"
            return self.boxes[key]


class _Work:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self.finish is not None:
            self.finish()
        self.finish = None


class ThreadRanks:
    """One rank. Calls are matched by their number; an operation or shape that differs between ranks fails."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size
        self.received_bytes = 0
        self.calls = 0
        self.messages: dict[tuple[int, int], int] = {}

    def all_gather(self, out: Tensor, part: Tensor) -> _Work:
        assert out.is_contiguous()
        assert part.is_contiguous()
        key = self._key("all_gather", tuple(part.shape))
        self.hub.put((*key, self.rank), part)
        self.received_bytes += part.nbytes * (self.size - 1)

        def finish() -> None:
            for source in range(self.size):
                out[source].copy_(self.hub.get((*key, source)))

        return _Work(finish)

    def all_to_all(self, out: Tensor, rows: Tensor, out_rows: Any, sent_rows: Any) -> _Work:
        assert out.is_contiguous()
        assert rows.is_contiguous()
        assert len(out) == sum(out_rows)
        assert len(rows) == sum(sent_rows)
        key = self._key("all_to_all", None)
        for target, part in enumerate(rows.split(list(sent_rows))):
            self.hub.put((*key, self.rank, target), part)

        def finish() -> None:
            for source, part in enumerate(out.split(list(out_rows))):
                sent = self.hub.get((*key, source, self.rank))
                assert sent.shape == part.shape, f"rank {source} sent {sent.shape}, expected {part.shape}"
                part.copy_(sent)
                self.received_bytes += 0 if source == self.rank else part.nbytes

        return _Work(finish)

    def broadcast(self, tensor: Tensor, source: int) -> _Work:
        key = self._key("broadcast", tuple(tensor.shape))
        if self.rank == source:
            self.hub.put(key, tensor)
            return _Work(lambda: None)

        def finish() -> None:
            tensor.copy_(self.hub.get(key))

        return _Work(finish)

    def send(self, tensor: Tensor, target: int) -> _Work:
        self.hub.put(self._message(self.rank, target), tensor)
        return _Work(lambda: None)

    def receive(self, tensor: Tensor, source: int) -> _Work:
        key = self._message(source, self.rank)
        self.received_bytes += tensor.nbytes

        def finish() -> None:
            sent = self.hub.get(key)
            assert sent.shape == tensor.shape
            assert sent.dtype == tensor.dtype
            tensor.copy_(sent)

        return _Work(finish)

    def _key(self, operation: str, shape: Any) -> tuple[Any, ...]:
        self.calls += 1
        return (self.calls, operation, shape)

    def _message(self, source: int, target: int) -> tuple[Any, ...]:
        self.messages[source, target] = self.messages.get((source, target), 0) + 1
        return ("message", source, target, self.messages[source, target])


def on_threads(size: int, function: Callable[[ThreadRanks, Control], Any]) -> list[Any]:
    """Call `function(ranks, control)` on `size` ranks at once; the results by rank. The first exception is raised."""
    data, control = _Hub(size), _Hub(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = function(ThreadRanks(data, rank), Control(ThreadRanks(control, rank)))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank is stuck"
    return results
