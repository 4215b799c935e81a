"""A LoadPlan as the bytes that the reader understands, and the tables that turn its records back into names."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from loader import reader as wire
from loader.load_plan import LoadPlan, PlanChunk, PlanTensor
from loader.manifest import EDGE_BYTES

_NO_BLOCK = 0xFFFFFFFF  # -1 of the wire's signed field
VERIFY_LEVELS: Mapping[str, int] = {"edges": wire.EDGES, "full": wire.WHOLE, "auto": wire.AUTO}


class ReadSettings(NamedTuple):
    """How the reader works. `rate`: bytes per second, 0 = unthrottled; `pool_bytes`: ring or arenas.

    `most_threads`: how far it may grow where storage is slow and CPUs are idle. `part_bytes`: of a chunk, for one thread.
    """

    mode: int
    threads: int
    verify: int
    slot_bytes: int
    pool_bytes: int
    cpus: int
    most_threads: int = 0
    part_bytes: int = wire.PART_BYTES
    rate: float = 0.0
    fault: str = ""

    @property
    def filling_bytes(self) -> int:
        """What the threads keep from others at a time: a part each, or a slot each where each may hash a whole one."""
        return self.threads * wire.bytes_of_a_thread(self.verify, self.part_bytes, self.slot_bytes)


class WirePlan(NamedTuple):
    """`data` for the reader; `files`, `tensors`, `blocks` give the names behind its numbers."""

    data: bytes
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    tensors: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...]
    file_numbers: Mapping[int, int]


def arena_bases(plan: LoadPlan) -> list[int]:
    """Where each arena starts in one pool that holds them all; the last item is the pool's size."""
    return list(accumulate((arena.bytes for arena in plan.arenas), initial=0))


def encode_plan(plan: LoadPlan, directory: Path, settings: ReadSettings) -> WirePlan:
    """Encode `plan` for one reader. Only files that are read (tables included) are opened by it."""
    used = sorted({chunk.file for chunk in plan.chunks} | {table.file for table in plan.tables.values()})
    numbers = {file: number for number, file in enumerate(used)}
    names = tuple(plan.tensors) + tuple(plan.tables)
    edges = _edges_by_chunk(plan)
    blocks: dict[tuple[int, int], int] = {}
    chunk_words, read_words, edge_data = array("I"), array("Q"), bytearray()
    reads = edge_count = 0
    bases = arena_bases(plan)
    for index, chunk in enumerate(plan.chunks):
        file = numbers[chunk.file]
        parts = _reads(chunk, settings.mode, bases)
        block = _NO_BLOCK
        if chunk.block >= 0:
            block = blocks.setdefault((chunk.file, chunk.block), len(blocks))
        mine = edges.get(index, ())
        chunk_words.extend((file, reads, len(parts) // 3, edge_count, len(mine), block))
        read_words.extend(parts)
        for tensor, offset, size, digest in mine:
            edge_data += wire.EDGE.pack(file, size, offset, tensor, bytes.fromhex(digest))
        reads, edge_count = reads + len(parts) // 3, edge_count + len(mine)
    fault = settings.fault.encode()
    head = wire.HEAD.pack(
        wire.MAGIC, settings.mode, len(used), len(plan.chunks), reads, edge_count, settings.threads, settings.verify,
        len(fault), settings.slot_bytes, settings.pool_bytes, settings.cpus, plan.hold_chunk, len(blocks), settings.most_threads,
        settings.part_bytes, settings.rate,
    )  # fmt: skip
    files, chunk_data, read_data = _files(plan, directory, used), chunk_words.tobytes(), read_words.tobytes()
    data = b"".join([head, fault, files, chunk_data, read_data, edge_data, _blocks(plan, blocks)])
    return WirePlan(
        data=data,
        files=tuple(plan.files[file].path for file in used),
        sizes=tuple(plan.files[file].size for file in used),
        tensors=names,
        blocks=tuple(blocks),
        file_numbers=numbers,
    )


def table_edges(table: PlanTensor, file_number: int, tensor_index: int) -> bytes:
    """The digests of a gathered table's ends, for a GATHER message."""
    return b"".join(
        wire.EDGE.pack(file_number, size, offset, tensor_index, bytes.fromhex(digest))
        for offset, size, digest in _windows(table)
    )


def _reads(chunk: PlanChunk, mode: int, bases: list[int]) -> list[int]:
    """File offset, bytes and destination of each read: one read into a slot, or one per piece into the pool."""
    if mode != wire.DIRECT:
        return [chunk.offset, chunk.bytes, 0]
    words: list[int] = []
    for piece in chunk.pieces:
        words += (chunk.offset + piece.offset, piece.bytes, bases[piece.arena] + piece.arena_offset)
    return words


def _windows(tensor: PlanTensor) -> Iterator[tuple[int, int, str]]:
    """(file offset, bytes, digest) of the first and last KiB as stored; one window where they are the same."""
    stored, head, tail = tensor.stored
    size = min(EDGE_BYTES, stored)
    if not size or not head:
        return
    yield tensor.file_offset, size, head
    if stored > size:
        yield tensor.file_offset + stored - size, size, tail


def _edges_by_chunk(plan: LoadPlan) -> dict[int, list[tuple[int, int, int, str]]]:
    """chunk → (tensor, file offset, bytes, digest); a window belongs to the chunk that holds its last byte."""
    starts = sorted((chunk.file, chunk.offset, index) for index, chunk in enumerate(plan.chunks))
    table: dict[int, list[tuple[int, int, int, str]]] = {}
    for number, tensor in enumerate(plan.tensors.values()):
        for offset, size, digest in _windows(tensor):
            place = bisect_right(starts, (tensor.file, offset + size - 1, len(starts))) - 1
            table.setdefault(starts[place][2], []).append((number, offset, size, digest))
    return table


def _files(plan: LoadPlan, directory: Path, used: list[int]) -> bytes:
    data = bytearray()
    for index in used:
        file = plan.files[index]
        path = os.fsencode(Path(os.path.abspath(directory)) / file.path)  # noqa: PTH100 - links stay as they are
        data += wire.FILE.pack(file.size, file.data_start, len(path)) + path
    return bytes(data)


def _blocks(plan: LoadPlan, blocks: Mapping[tuple[int, int], int]) -> bytes:
    data = bytearray()
    for index, block in blocks:
        file = plan.files[index]
        start = file.data_start + block * file.digest_bytes
        size = min(file.digest_bytes, file.size - start)
        data += wire.BLOCK.pack(start, size, bytes.fromhex(file.digests[block]))
    return bytes(data)
