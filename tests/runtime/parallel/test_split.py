"""Ranges that ranks hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.parallel.split import RowShards, split_evenly


@given(st.integers(0, 300), st.integers(1, 60))
def test_ranges_cover_everything_once_and_differ_by_one_at_most(total: int, parts: int) -> None:
    ranges = split_evenly(total, parts)
    assert [row for part in ranges for row in part] == list(range(total))
    assert len(ranges) == parts
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 50))
def test_chunks_of_all_ranks_cover_the_sequence(total: int, parts: int, chunk_rows: int) -> None:
    shards = RowShards.of(total, parts)
    chunks = [
        shards.chunk(rank, index, chunk_rows)
        for rank in range(parts)
        for index in range(shards.num_chunks(chunk_rows))
    ]
    assert [row for chunk in chunks for row in chunk] == list(range(total))
    assert max(map(len, chunks)) <= chunk_rows
    assert shards.num_rows == total
