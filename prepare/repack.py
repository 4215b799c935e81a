"""Stream published tensors into one prepared file: row ranges in, bytes, digests and finite check out.

Memory: one buffer of `PIECE_BYTES` (and its converted form) per call, whatever the size of tensor, file or checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, BinaryIO

from loader.errors import ArtifactError
from loader.header import DTYPE_BYTES
from prepare.checkpoint import SourceTensor
from prepare.digests import ChunkDigests, EdgeDigest, FileDigests
from prepare.file_plan import PlannedFile
from prepare.merge import Update, Updates, apply_updates, from_float64, to_float64
from prepare.recipe import OutputTensor, Rows
from prepare.scan import FiniteScan

if TYPE_CHECKING:
    import numpy as np

PIECE_BYTES = 8 << 20

Sources = Mapping[str, Mapping[str, SourceTensor]]
NO_UPDATES: Updates = MappingProxyType({})

# (published, prepared) types that need no arithmetic.
_PLAIN = {("BF16", "BF16"), ("F32", "F32"), ("BF16", "F32"), ("F32", "F16")}
Advance = Callable[[int], None]


class SourceReader:
    """Positional reads from published files; descriptors stay open until `close`. One thread per reader."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._descriptors: dict[Path, int] = {}
        self._buffer = bytearray(PIECE_BYTES)

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; works twice."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def pieces(self, rows: Rows) -> Iterator[memoryview]:
        """Bytes of a row range in pieces of whole rows, or of parts of one row if a row is larger than the buffer.

        A piece is valid until the next one is taken.
        Raises: ArtifactError: the file became shorter, or cannot be read.
        """
        tensor = self._sources[rows.component][rows.tensor]
        row_bytes = tensor.num_bytes // tensor.shape[0]
        position = tensor.offset + rows.start * row_bytes
        end = tensor.offset + rows.stop * row_bytes
        width = DTYPE_BYTES[tensor.dtype]
        step = max(PIECE_BYTES // row_bytes * row_bytes, min(row_bytes, PIECE_BYTES // width * width))
        while position < end:
            view = memoryview(self._buffer)[: min(step, end - position)]
            self._read(tensor.path, position, view)
            yield view if rows.columns is None else cut_columns(view, row_bytes, rows.columns, width)
            position += len(view)

    def rows(self, tensor: SourceTensor, start: int, stop: int) -> memoryview:
        """Bytes of a few rows of any tensor, in new memory. Raises: ArtifactError: see `pieces`."""
        row_bytes = tensor.num_bytes // tensor.shape[0]
        view = memoryview(bytearray((stop - start) * row_bytes))
        self._read(tensor.path, tensor.offset + start * row_bytes, view)
        return view

    def _read(self, path: Path, position: int, view: memoryview) -> None:
        try:
            descriptor = self._descriptors.get(path)
            if descriptor is None:
                descriptor = self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while len(view):
                count = os.preadv(descriptor, [view], position)
                if count == 0:
                    raise ArtifactError(
                        "file became shorter while it was read", where=path.name, found=f"{position} bytes"
                    )
                view = view[count:]
                position += count
        except OSError as error:
            raise ArtifactError(f"cannot be read ({error.strerror})", where=path.name) from error


def output_pieces(
    tensor: OutputTensor,
    reader: SourceReader,
    sources: Sources,
    scan: FiniteScan,
    updates: Updates = NO_UPDATES,
) -> Iterator[memoryview]:
    """Bytes of one prepared tensor, in order, each piece changed, scanned and brought to the output's type."""
    for rows in tensor.parts:
        source = sources[rows.component][rows.tensor]
        dtype = source.dtype
        changes = updates.get(rows.component, {}).get(rows.tensor, ())
        if changes or (dtype, tensor.spec.dtype) not in _PLAIN:
            yield from merged_pieces(rows, source, changes, tensor.spec.dtype, reader, scan)
            continue
        for piece in reader.pieces(rows):
            words = as_words(piece, dtype)
            name = f"{rows.component}/{rows.tensor}"
            scan.check(name, dtype, words)
            if dtype == tensor.spec.dtype:
                yield piece
            elif tensor.spec.dtype == "F16":
                narrow = to_float16(words)
                scan.check(name, "F16", as_words(narrow, "F16"))  # values beyond 65504 became infinite
                yield narrow
            else:
                yield widen(words)


def merged_pieces(
    rows: Rows,
    source: SourceTensor,
    changes: tuple[Update, ...],
    dtype: str,
    reader: SourceReader,
    scan: FiniteScan,
) -> Iterator[memoryview]:
    """Pieces of some rows with an adapter's changes, in the output's type; in float64 between the two, rounded once.

    The scan notes values that are not finite; the caller raises.
    """
    import numpy as np

    name, first = f"{rows.component}/{rows.tensor}", rows.start
    width = math.prod(source.shape[1:]) if rows.columns is None else rows.columns[1] - rows.columns[0]
    assert width * DTYPE_BYTES[source.dtype] <= PIECE_BYTES, "pieces are whole rows"
    for piece in reader.pieces(rows):
        values = to_float64(piece, source.dtype).reshape(-1, width)
        apply_updates(values, first, changes, reader, rows.columns)
        first += values.shape[0]
        if not np.isfinite(values).all():
            scan.bad[name] = "not finite once merged" if changes else "NaN or inf"
            values[:] = 0
        merged = from_float64(values, dtype)
        scan.check(name, dtype, as_words(merged, dtype))
        yield merged


def cut_columns(piece: memoryview, row_bytes: int, columns: tuple[int, int], width: int) -> memoryview:
    """Only some columns of a piece of whole rows, in new memory. width: bytes of an element."""
    import numpy as np

    rows = np.frombuffer(piece, np.uint8).reshape(-1, row_bytes)
    return np.ascontiguousarray(rows[:, columns[0] * width : columns[1] * width]).data.cast("B")


def as_words(piece: memoryview, dtype: str) -> np.ndarray:
    """The piece as unsigned integers of its element width; no copy."""
    import numpy as np

    return np.frombuffer(piece, np.uint16 if DTYPE_BYTES[dtype] == 2 else np.uint32)


def widen(words: np.ndarray) -> memoryview:
    """bfloat16 bit patterns -> float32 bytes, exactly: the lower half of the pattern is zero."""
    import numpy as np

    return (words.astype(np.uint32) << np.uint32(16)).data.cast("B")


def to_float16(words: np.ndarray) -> memoryview:
    """float32 bit patterns -> float16 bytes, nearest even; values beyond its range become infinite."""
    import numpy as np

    with np.errstate(over="ignore"):
        return words.view(np.float32).astype(np.float16).data.cast("B")


def write_prepared_file(
    plan: PlannedFile,
    target: BinaryIO,
    sources: Sources,
    scan: FiniteScan,
    advance: Advance,
    updates: Updates = NO_UPDATES,
) -> FileDigests:
    """Write header and data of one file.

    Args:
        target: open for writing, at its start.
        advance: called with the number of bytes after every piece; may raise to stop.
    Raises: ArtifactError: unreadable source, or weights that are not finite (all of this file's, at its end).
    """
    digests, edges = ChunkDigests(plan.header), {}
    target.write(plan.header)
    with SourceReader(sources) as reader, digests:
        for placed in plan.tensors:
            if placed.output is None:
                filler = memoryview(bytes(placed.end - placed.begin))
                target.write(filler)
                digests.update(filler)
                continue
            edge = EdgeDigest()
            for piece in output_pieces(placed.output, reader, sources, scan, updates):
                digests.update(piece, meanwhile=partial(target.write, piece))
                edge.update(piece)
                advance(len(piece))
            edges[placed.output.name] = edge.finish()
    scan.raise_if_bad()
    sha256, chunks = digests.finish()
    return FileDigests(plan.num_bytes, sha256, chunks, edges)
