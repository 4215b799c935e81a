"""Chunks that several threads read together."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from loader import reader as wire
from loader.plain_files import plan_files
from tests.loader.rungs import Rung, raw_bytes


def reader_with(sizes: list[int], mode: int = wire.RING) -> wire.Reader:
    """Of one chunk with reads of `sizes`; nothing is opened."""
    head = wire.HEAD.pack(
        wire.MAGIC, mode, 0, 1, len(sizes), 0, 1, wire.EDGES, 0, 1 << 24, 0, 1, 1, 0, 1, wire.PART_BYTES, 0.0
    )
    reads, at = b"", 0
    for size in sizes:
        reads += wire.READ.pack(at * 3, size, at)
        at += size
    reader = wire.Reader(-1, -1, -1, lambda place, data: None, lambda text: None)
    reader.plan = wire.Plan(head + wire.CHUNK.pack(0, 0, len(sizes), 0, 0, -1) + reads)
    return reader


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * wire.PART_BYTES), min_size=1, max_size=12))
def test_parts_cover_a_chunk_once_and_in_order(sizes: list[int]) -> None:
    cuts = reader_with(sizes).cut(0)
    at = dict.fromkeys(range(len(sizes)), 0)
    for cut in cuts:
        assert 0 < sum(count for _, _, count in cut) <= wire.PART_BYTES
        for index, first, count in cut:
            assert first == at[index]
            at[index] += count
    assert list(at.values()) == sizes
    assert len(cuts) == -(-sum(sizes) // wire.PART_BYTES)


def test_a_chunk_that_is_only_hashed_stays_whole() -> None:
    assert reader_with([40 << 20], wire.HASH).cut(0) == [[(0, 0, 40 << 20)]]


def test_a_chunk_without_reads_has_one_part() -> None:
    assert reader_with([]).cut(0) == [[]]


def test_a_part_is_touched_right_before_the_first_read_into_its_slot(tmp_path: Path) -> None:
    content = random.Random(3).randbytes(9_000_001)
    (tmp_path / "file").write_bytes(content)
    pool = memoryview(bytearray(2 << 24))
    reader = reader_with([len(content)])
    touched: list[tuple[int, int]] = []

    def touch(first: int, count: int) -> None:
        assert not any(pool[first : first + count]), "touched after the read"
        touched.append((first, count))

    fd, (records, reader.full) = os.open(tmp_path / "file", os.O_RDONLY), os.pipe()
    reader.fds, reader.pool, reader.touch, reader.untouched = [fd], pool, touch, {1}
    reader.throttle, reader.faults = wire.Throttle(0), wire.Faults("")
    reader.left = reader.num_workers = 4  # more than are read here
    reader.start_s, reader.start_cpu = time.monotonic(), 0.0
    for slot in (1, 1, 0):  # new, used, and one that others have touched
        for segments in reader.cut(0):
            reader.fill(0, slot, segments)
        reader.complete(0, slot, 0)
    assert touched == [((1 << 24) + first, count) for ((_, first, count),) in reader.cut(0)]
    assert bytes(pool[1 << 24 :][: len(content)]) == content == bytes(pool[: len(content)])
    for open_fd in (fd, records, reader.full):
        os.close(open_fd)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 MB in one file: a chunk and a half, six parts."""
    import torch

    folder = tmp_path_factory.mktemp("large")
    draw = random.Random(struct.pack("<I", 7))
    sizes = {"a": 9_000_001, "b": 3, "c": 12_000_000}
    content = {
        name: torch.frombuffer(bytearray(draw.randbytes(size)), dtype=torch.uint8)
        for name, size in sizes.items()
    }
    save_file(content, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["U", "A", "B", "C", "D", "E", "E-threads"])
def test_large_chunks_arrive_whole(large: Path, name: str) -> None:
    rung = Rung(name)
    with rung.start(plan_files(large), large, threads=5) as stream:
        found = rung.contents(stream)
    expected = load_file(large / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key] == raw_bytes(tensor)
    rung.finish()
