"""Cuts a file with coded tensors into chunks that end between pieces. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from loader.codec.pieces import UNIT_BYTES
from loader.errors import InternalError
from loader.header import PAGE_BYTES, round_up
from loader.load_plan import CodedSpan, LoadPlan, Piece, PlanChunk, Run


def coded_chunks(plan: LoadPlan, file: int, runs: Sequence[Run], chunk_bytes: int) -> list[PlanChunk]:
    """One file's chunks in file order, without their groups: runs and the filler between them, cut inside digest blocks.

    Args:
        runs: of this file, ascending.
    Raises: InternalError: a piece is longer than `chunk_bytes`.
    """
    record, cutter = plan.files[file], _Cutter(plan, runs)
    chunks = []
    for start, end in _spans(runs):
        while start < end:
            block_end = start + record.digest_bytes - (start - record.data_start) % record.digest_bytes
            stop, pieces, coded = cutter.take(start, min(end, block_end, start + chunk_bytes))
            if stop <= start:
                raise InternalError(
                    "chunk size is less than a coded piece",
                    where=record.path,
                    found=chunk_bytes,
                    hint="choose larger slots",
                )
            block = (start - record.data_start) // record.digest_bytes
            chunks.append(PlanChunk(file, start, stop - start, block, tuple(pieces), (), tuple(coded)))
            start = stop
    return chunks


def _spans(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Runs, neighbours that only filler separates (less than a page) as one."""
    spans: list[tuple[int, int]] = []
    for run in runs:
        if spans and run.offset <= round_up(spans[-1][1], PAGE_BYTES):
            spans[-1] = (spans[-1][0], run.offset + run.bytes)
        else:
            spans.append((run.offset, run.offset + run.bytes))
    return spans


class _Cutter:
    """Walks through the runs once, from chunk to chunk."""

    def __init__(self, plan: LoadPlan, runs: Sequence[Run]) -> None:
        assert plan.codec is not None, "a plan with coded tensors has a codec"
        self._table, self._piece_bytes = plan.codec.table, plan.codec.piece_bytes
        self._runs = runs
        self._plan = plan
        self._run = 0  # the first that is not all behind
        self._piece = -1  # row of the first piece of that run that is not behind; -1 = its first

    def take(self, start: int, stop: int) -> tuple[int, list[Piece], list[CodedSpan]]:
        """(end of the chunk, what is copied, what is unpacked); the end is `stop`, or the start of a piece before it."""
        pieces: list[Piece] = []
        coded: list[CodedSpan] = []
        while self._run < len(self._runs) and self._runs[self._run].offset < stop:
            run = self._runs[self._run]
            if run.coded >= 0:
                stop = self._take_pieces(run, stop, coded)
            else:
                low, high = max(start, run.offset), min(stop, run.offset + run.bytes)
                pieces.append(Piece(low - start, high - low, run.arena, run.arena_offset + low - run.offset))
            if run.offset + run.bytes > stop:
                break
            self._run, self._piece = self._run + 1, -1
        return stop, pieces, coded

    def _take_pieces(self, run: Run, stop: int, coded: list[CodedSpan]) -> int:
        tensor = self._plan.tensors[self._plan.coded[run.coded]]
        assert tensor.coded is not None, "it is among the coded ones"
        row, base = tensor.coded.row, self._plan.files[run.file].data_start
        first = row if self._piece < 0 else self._piece
        places, end = self._table.places, row + -(-tensor.bytes // self._piece_bytes)
        last = bisect_left(places, -(-(stop - base) // UNIT_BYTES), first, end)
        if last > first and base + places[last - 1] * UNIT_BYTES + self._table.sizes[last - 1] > stop:
            last -= 1
            stop = base + places[last] * UNIT_BYTES
        if last > first:
            coded.append(CodedSpan(run.coded, first - row, last - first))
        self._piece = last
        return stop
