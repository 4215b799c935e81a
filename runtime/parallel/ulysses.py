"""Ulysses sequence parallelism: between attentions a rank holds rows, inside attention it holds heads.

Two ways in, one way out, behind one interface (`HeadExchange`). P ranks, S rows, D hidden, H heads, K head dim:

- `GatheredHidden`: hidden rows are gathered in chunks and every rank projects all rows to its own H/P heads, so it
  needs 1/P of the projection's rows. Received: (P-1)/P S D values.
- `ProjectedHeads`: every rank projects its own rows to all heads and the projected heads change places, one part (q, k,
  v, then gate) while the next is projected. Received: (P-1)/P S (parts H K / P) values; whole projections are needed.

With D = 5376, H K = 7168 and four parts the first receives 0.1875 P of what the second does: less up to P = 5.
FLOPs are the same. No padding row ever enters a projection, a norm or an attention: ranks hold balanced numbers of
rows, chunks that a collective must fill up are cut before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.parallel.ranks import Ranks, Work
from runtime.parallel.split import GATHER_CHUNK_ROWS, RETURN_CHUNK_ROWS, RowShards

Projection = Callable[[Tensor, range], Iterable[Tensor]]
"""(hidden rows [n, D], their place in the sequence) -> parts q, k, v[, gate], each [n, heads, K], ready for attention."""


@dataclass
class Arriving:
    """A tensor that is here, or will be when `get` returns."""

    tensor: Tensor
    work: Work | None = None

    def get(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor


class HeadExchange(Protocol):
    """Rows of all heads <-> all rows of some heads."""

    def attention_inputs(self, x: Tensor, project: Projection) -> list[Arriving]:
        """This rank's hidden rows [n, D] -> parts of all rows, [S, H/P, K] each, in the order of `project`."""
        ...

    def return_rows(self, heads: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Attention's output [S, H/P, K] -> (place among this rank's rows, [rows, H K]) chunk by chunk, in order."""
        ...


@dataclass(frozen=True)
class GatheredHidden:
    """Hidden rows travel; `project` has the weights of this rank's heads only.

    chunk_rows: rows of a rank that travel at once, going in; return_rows likewise coming back.
    """

    ranks: Ranks
    shards: RowShards
    chunk_rows: int = GATHER_CHUNK_ROWS
    return_chunk_rows: int = RETURN_CHUNK_ROWS

    def attention_inputs(self, x: Tensor, project: Projection) -> list[Arriving]:
        """Gathers start first, local rows are projected while they run, then chunks as they arrive."""
        chunks = self._start_gathers(x)
        own = self.shards.ranges[self.ranks.rank]
        local = list(project(x, own))
        parts = [part.new_empty((self.shards.num_rows, *part.shape[1:])) for part in local]
        _place(parts, local, own)
        for index, (gathered, work) in enumerate(chunks):
            work.wait()
            for step in range(1, self.ranks.size):
                source = (self.ranks.rank + step) % self.ranks.size
                rows = self.shards.chunk(source, index, self.chunk_rows)
                if rows:
                    _place(parts, project(gathered[source, : len(rows)], rows), rows)
        return [Arriving(part) for part in parts]

    def return_rows(self, heads: Tensor) -> Iterator[tuple[slice, Tensor]]:
        return _return_rows(self.ranks, self.shards, heads, self.return_chunk_rows)

    def _start_gathers(self, x: Tensor) -> list[tuple[Tensor, Work]]:
        if self.ranks.size == 1:
            return []
        chunks = []
        for index in range(self.shards.num_chunks(self.chunk_rows)):
            part = x[index * self.chunk_rows : (index + 1) * self.chunk_rows]
            size = min(self.chunk_rows, self.shards.most - index * self.chunk_rows)
            if len(part) < size:  # the collective moves equal parts; the receiver cuts this again
                filled = x.new_empty((size, x.shape[1]))
                filled[: len(part)] = part
                part = filled
            gathered = x.new_empty((self.ranks.size, size, x.shape[1]))
            chunks.append((gathered, self.ranks.all_gather(gathered, part.contiguous())))
        return chunks


@dataclass(frozen=True)
class ProjectedHeads:
    """Projected heads travel; `project` has the weights of all heads and yields one part after the other."""

    ranks: Ranks
    shards: RowShards
    return_chunk_rows: int = RETURN_CHUNK_ROWS

    def attention_inputs(self, x: Tensor, project: Projection) -> list[Arriving]:
        own = self.shards.ranges[self.ranks.rank]
        return [self._start_exchange(part) for part in project(x, own)]

    def return_rows(self, heads: Tensor) -> Iterator[tuple[slice, Tensor]]:
        return _return_rows(self.ranks, self.shards, heads, self.return_chunk_rows)

    def _start_exchange(self, part: Tensor) -> Arriving:
        """[n, H, K] -> [S, H/P, K]; every rank's rows are contiguous in the sequence, so they arrive in place."""
        rows, heads, width = part.shape
        size = self.ranks.size
        if size == 1:
            return Arriving(part)
        by_rank = part.view(rows, size, heads // size, width).transpose(0, 1)
        sent = by_rank.reshape(size * rows, heads // size, width)
        out = part.new_empty((self.shards.num_rows, heads // size, width))
        counts = [len(own) for own in self.shards.ranges]
        return Arriving(out, self.ranks.all_to_all(out, sent.contiguous(), counts, [rows] * size))


def _place(parts: list[Tensor], projected: Iterable[Tensor], rows: range) -> None:
    for part, values in zip(parts, projected, strict=True):
        part[rows.start : rows.stop] = values


def _return_rows(
    ranks: Ranks, shards: RowShards, heads: Tensor, chunk_rows: int
) -> Iterator[tuple[slice, Tensor]]:
    """All exchanges start at once, so a chunk is used while later ones travel. Exact row counts: no padding."""
    own, width = shards.ranges[ranks.rank], heads.shape[1] * heads.shape[2]
    if ranks.size == 1:
        yield slice(0, len(heads)), heads.flatten(1)
        return
    under_way = []
    for index in range(shards.num_chunks(chunk_rows)):
        rows = [shards.chunk(rank, index, chunk_rows) for rank in range(ranks.size)]
        sent = torch.cat([heads[part.start : part.stop] for part in rows])
        count = len(rows[ranks.rank])
        out = heads.new_empty((ranks.size * count, *heads.shape[1:]))
        work = ranks.all_to_all(out, sent, [count] * ranks.size, [len(part) for part in rows])
        under_way.append((rows[ranks.rank], out, work))
    for part, out, work in under_way:
        work.wait()
        place = slice(part.start - own.start, part.stop - own.start)
        # Source rank s sent heads s H/P … of these rows.
        yield (
            place,
            out.view(ranks.size, len(part), width).transpose(0, 1).reshape(len(part), ranks.size * width),
        )
