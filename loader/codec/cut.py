"""Cuts a file with coded tensors into chunks that end between pieces. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from loader.codec.pieces import UNIT_BYTES
from loader.errors import InternalError
from loader.header import PAGE_BYTES, round_up
from loader.load_plan import CodedSpan, LoadPlan, Piece, PlanChunk, Run


def coded_chunks(plan: LoadPlan, file: int, runs: Sequence[Run], chunk_bytes: int) -> list[PlanChunk]:
    """One file's chunks in file order, without their groups.

    Args:
        runs: of this file, ascending.
    Raises: InternalError: a piece is longer than `chunk_bytes`.
    """
    data_start, digest_bytes = plan.files[file].data_start, plan.files[file].digest_bytes
    chunks = []
    for start, end in _cuts(plan, file, runs, chunk_bytes):
        pieces, coded = [], []
        for place in range(_run_at(runs, start), len(runs)):
            run = runs[place]
            if run.offset >= end:
                break
            low, high = max(start, run.offset), min(end, run.offset + run.bytes)
            if run.coded >= 0:
                coded += _pieces_between(plan, run, low, high)
            elif low < high:
                pieces.append(Piece(low - start, high - low, run.arena, run.arena_offset + low - run.offset))
        block = (start - data_start) // digest_bytes
        chunks.append(PlanChunk(file, start, end - start, block, tuple(pieces), (), tuple(coded)))
    return chunks


def _cuts(plan: LoadPlan, file: int, runs: Sequence[Run], chunk_bytes: int) -> list[tuple[int, int]]:
    """Absolute ranges: runs and the filler between them, cut inside digest blocks and between pieces."""
    spans: list[tuple[int, int]] = []
    for run in runs:
        if spans and run.offset <= round_up(spans[-1][1], PAGE_BYTES):
            spans[-1] = (spans[-1][0], run.offset + run.bytes)
        else:
            spans.append((run.offset, run.offset + run.bytes))
    record = plan.files[file]
    cuts = []
    for start, end in spans:
        while start < end:
            block_end = start + record.digest_bytes - (start - record.data_start) % record.digest_bytes
            stop = _before_piece(plan, runs, min(end, block_end, start + chunk_bytes))
            if stop <= start:
                raise InternalError(
                    "chunk size is less than a coded piece", where=record.path, found=chunk_bytes
                )
            cuts.append((start, stop))
            start = stop
    return cuts


def _before_piece(plan: LoadPlan, runs: Sequence[Run], position: int) -> int:
    """`position`, or the start of the piece that it lies inside."""
    run = runs[_run_at(runs, position)]
    if run.coded < 0 or not run.offset < position < run.offset + run.bytes:
        return position
    row, stop, low = _rows(plan, run)
    assert plan.codec is not None, "a plan with coded tensors has a codec"
    table = plan.codec.table
    piece = bisect_right(table.places, (position - low) // UNIT_BYTES, row, stop) - 1
    start = low + table.places[piece] * UNIT_BYTES
    return start if start < position < start + table.sizes[piece] else position


def _pieces_between(plan: LoadPlan, run: Run, start: int, end: int) -> list[CodedSpan]:
    """The pieces of one coded tensor that start in a range of its file: one span or none."""
    row, stop, low = _rows(plan, run)
    assert plan.codec is not None, "a plan with coded tensors has a codec"
    places = plan.codec.table.places
    first = bisect_left(places, -(-(start - low) // UNIT_BYTES), row, stop)
    last = bisect_left(places, -(-(end - low) // UNIT_BYTES), row, stop)
    return [CodedSpan(run.coded, first - row, last - first)] if first < last else []


def _run_at(runs: Sequence[Run], position: int) -> int:
    """Index of the last run that starts at or before `position`, 0 if none does."""
    return max(bisect_right(runs, position, key=lambda run: run.offset) - 1, 0)


def _rows(plan: LoadPlan, run: Run) -> tuple[int, int, int]:
    """(first row, end) of a coded tensor's pieces, and where its file's data section starts."""
    tensor = plan.tensors[plan.coded[run.coded]]
    assert tensor.coded is not None, "it is among the coded ones"
    assert plan.codec is not None, "a plan with coded tensors has a codec"
    row = tensor.coded.row
    return row, row + -(-tensor.bytes // plan.codec.piece_bytes), plan.files[run.file].data_start
