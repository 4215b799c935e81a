"""`Ranks` over a communicator that was made before torch (`runtime.parallel.early`).

Collectives run on a stream of their own: behind what the caller's stream held when they were called, beside what it gets
next, and before what it gets after `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from loader.errors import InternalError
from runtime.native_nccl import Communicator
from runtime.parallel.guard import Guard
from runtime.parallel.ranks import Work


class Order(Protocol):
    """The order between the caller's stream and the communicator's."""

    def begin(self) -> None:
        """What the communicator is given next comes after what the caller's stream holds."""
        ...

    def end(self) -> Callable[[], None]:
        """A call that makes the caller's stream wait for what the communicator holds now."""
        ...


class StreamOrder:
    """On CUDA, by events. stream: the handle of the communicator's."""

    def __init__(self, stream: int) -> None:
        self._stream = torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        self._stream.wait_event(ready)

    def end(self) -> Callable[[], None]:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return lambda: torch.cuda.current_stream().wait_event(done)


class NcclRanks:
    """See `Ranks`. guard: asked for a known failure at every wait; a failure of the library becomes its cause."""

    def __init__(self, communicator: Communicator, order: Order, guard: Guard) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.received_bytes = 0
        self._communicator, self._order, self._guard = communicator, order, guard

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        assert out.is_contiguous(), "parts arrive one after the other"
        self.received_bytes += part.nbytes * (self.size - 1)
        return self._start(
            "all-gather",
            (out, part),
            lambda: self._communicator.all_gather(part.data_ptr(), out.data_ptr(), part.nbytes),
        )

    def all_to_all(
        self, out: Tensor, rows: Tensor, out_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Work:
        assert out.is_contiguous(), "rows arrive one after the other"
        sent, received = _places(rows, sent_rows), _places(out, out_rows)
        self.received_bytes += sum(count for rank, _, count in received if rank != self.rank)
        return self._start("all-to-all", (out, rows), lambda: self._communicator.exchange(sent, received))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start(
            f"broadcast of rank {source}",
            (tensor,),
            lambda: self._communicator.broadcast(tensor.data_ptr(), tensor.nbytes, source),
        )

    def send(self, tensor: Tensor, target: int) -> Work:
        message = (target, tensor.data_ptr(), tensor.nbytes)
        return self._start(
            f"send to rank {target}", (tensor,), lambda: self._communicator.exchange([message], [])
        )

    def receive(self, tensor: Tensor, source: int) -> Work:
        self.received_bytes += tensor.nbytes
        message = (source, tensor.data_ptr(), tensor.nbytes)
        return self._start(
            f"receive from rank {source}", (tensor,), lambda: self._communicator.exchange([], [message])
        )

    def _start(self, name: str, tensors: tuple[Tensor, ...], queue: Callable[[], None]) -> Work:
        assert all(tensor.is_contiguous() for tensor in tensors), f"{name} moves memory as it lies"
        try:
            self._order.begin()
            if any(tensor.nbytes for tensor in tensors):
                queue()
        except InternalError as error:
            raise self._guard.explain(f"{name}: {error}") from error
        return _QueuedWork(tensors, self._order.end(), self._guard)


class _QueuedWork:
    """Keeps the tensors until they have been waited for: torch does not know that another stream uses their memory."""

    def __init__(self, tensors: tuple[Tensor, ...], wait: Callable[[], None], guard: Guard) -> None:
        self._tensors, self._wait, self._guard = tensors, wait, guard

    def wait(self) -> None:
        self._guard.check()
        self._wait()
        self._tensors = ()


def _places(tensor: Tensor, rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """(rank, address, bytes) of every rank's rows, which lie one after the other; ranks without rows are left out."""
    row_bytes = tensor.nbytes // len(tensor) if len(tensor) else 0
    starts = accumulate(rows, initial=0)
    return [
        (rank, tensor.data_ptr() + start * row_bytes, count * row_bytes)
        for rank, (start, count) in enumerate(zip(starts, rows, strict=False))
        if count
    ]
