"""How a number of things (rows, heads, columns) is cut over ranks. Standard library only: prepare cuts the same way."""

from __future__ import annotations

from dataclasses import dataclass

GATHER_CHUNK_ROWS = 6144  # of a rank at once, going into attention: 64 MiB of hidden rows at D = 5376 in bf16
RETURN_CHUNK_ROWS = 4096  # coming back: 15 to 29 MiB for each peer at two to four ranks


def split_evenly(total: int, parts: int) -> tuple[range, ...]:
    """Contiguous ranges that cover 0 … total-1 in order; sizes differ by one at most, larger ones first."""
    base, extra = divmod(total, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return tuple(range(starts[part], starts[part + 1]) for part in range(parts))


@dataclass(frozen=True)
class Cut:
    """A rank's part of a tensor: row ranges one after the other, or one column range of all rows."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None


@dataclass(frozen=True)
class RowShards:
    """Rows of one sequence over P ranks: rank r holds `ranges[r]`, possibly none."""

    ranges: tuple[range, ...]

    @classmethod
    def of(cls, num_rows: int, num_ranks: int) -> RowShards:
        return cls(split_evenly(num_rows, num_ranks))

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return self.ranges[-1].stop

    @property
    def most(self) -> int:
        """Rows of the rank that holds most."""
        return max(len(rows) for rows in self.ranges)

    def chunk(self, rank: int, index: int, chunk_rows: int) -> range:
        """Chunk `index` of a rank's rows, as rows of the sequence; shorter at the end, empty behind it."""
        own = self.ranges[rank]
        return own[index * chunk_rows : (index + 1) * chunk_rows]

    def num_chunks(self, chunk_rows: int) -> int:
        """Chunks that every rank counts, so that collectives match."""
        return -(-self.most // chunk_rows)
