"""The collectives that this package uses, as one small interface, and their form over `torch.distributed`.

All are asynchronous: a `Work` is waited for before the result is read, and the sent tensor must not change before
that. Received bytes are counted, because a scheme is chosen by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.parallel.guard import Guard


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result may be used (on CUDA: in the order of the current stream). Raises: InternalError."""
        ...


class Ranks(Protocol):
    """One rank's view of P ranks; all of them call the same methods in the same order."""

    rank: int
    size: int
    received_bytes: int

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """out [P, *part.shape], contiguous: every rank's `part`, in rank order."""
        ...

    def all_to_all(
        self, out: Tensor, rows: Tensor, out_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Work:
        """Rows for rank d are the d-th part of `rows`; the s-th part of `out` comes from rank s. Both contiguous."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """The source's values in everybody's tensor."""
        ...

    def send(self, tensor: Tensor, target: int) -> Work: ...

    def receive(self, tensor: Tensor, source: int) -> Work: ...


class GroupRanks:
    """`Ranks` over a process group of torch.

    Args:
        group: None = all ranks of the run. guard: told which collective is waited for; turns its failure into the
            cause. None: torch's own errors.
    """

    def __init__(self, group: Any = None, guard: Guard | None = None) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.received_bytes = 0
        self._group = group
        self._guard = guard

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        self.received_bytes += part.nbytes * (self.size - 1)
        # The newer name of one collective; the older one warns where both exist.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._work("all-gather", gather(out.flatten(0, 1), part, group=self._group, async_op=True))

    def all_to_all(
        self, out: Tensor, rows: Tensor, out_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Work:
        if len(out):
            self.received_bytes += out.nbytes // len(out) * (len(out) - out_rows[self.rank])
        work = dist.all_to_all_single(
            out, rows, list(out_rows), list(sent_rows), group=self._group, async_op=True
        )
        return self._work("all-to-all", work)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        work = dist.broadcast(tensor, group_src=source, group=self._group, async_op=True)
        return self._work(f"broadcast of rank {source}", work)

    def send(self, tensor: Tensor, target: int) -> Work:
        return self._work(f"send to rank {target}", dist.isend(tensor, group_dst=target, group=self._group))

    def receive(self, tensor: Tensor, source: int) -> Work:
        self.received_bytes += tensor.nbytes
        work = dist.irecv(tensor, group_src=source, group=self._group)
        return self._work(f"receive from rank {source}", work)

    def _work(self, name: str, work: Any) -> Work:
        return _GroupWork(name, work, self._guard)


class _GroupWork:
    def __init__(self, name: str, work: Any, guard: Guard | None) -> None:
        self._name, self._work, self._guard = name, work, guard

    def wait(self) -> None:
        if self._guard is None:
            self._work.wait()
            return
        with self._guard.waiting(self._name):
            self._work.wait()


class OneRank:
    """`Ranks` of a single rank; nothing is sent."""

    rank = 0
    size = 1
    received_bytes = 0

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        out[0].copy_(part)
        return _Done()

    def all_to_all(
        self, out: Tensor, rows: Tensor, out_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Work:
        out.copy_(rows)
        return _Done()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _Done()

    def send(self, tensor: Tensor, target: int) -> Work:
        raise AssertionError("one rank has nobody to send to")

    def receive(self, tensor: Tensor, source: int) -> Work:
        raise AssertionError("one rank has nobody to receive from")


class SilentRanks:
    """`Ranks` that send and receive nothing, so results are whatever memory held: for warming up."""

    received_bytes = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        return _Done()

    def all_to_all(
        self, out: Tensor, rows: Tensor, out_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Work:
        return _Done()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _Done()

    def send(self, tensor: Tensor, target: int) -> Work:
        return _Done()

    def receive(self, tensor: Tensor, source: int) -> Work:
        return _Done()


class _Done:
    def wait(self) -> None:
        return None


def gather_parts(ranks: Ranks, part: Tensor) -> Tensor:
    """[P, *part.shape] of equal parts."""
    out = torch.empty((ranks.size, *part.shape), dtype=part.dtype, device=part.device)
    ranks.all_gather(out, part.contiguous()).wait()
    return out
