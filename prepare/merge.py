"""Changes of published weights while they stream through prepare: W + scale * (B @ A), W + scale * D.

Everything is summed in float64 and rounded once to the stored type, so the bytes depend neither on the order of
adapters nor (but for sums that lie within 1e-13 of a rounding border) on the machine. Memory: one piece in float64 and
the factors of its rows; nothing of an adapter stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prepare.checkpoint import SourceTensor

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `start` … `stop` - 1 of a published tensor are changed by the rows from `source` on of an adapter's."""

    start: int
    stop: int
    source: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adds scale * (up @ down). up: [rows, rank]; down: [rank, columns]."""

    up: SourceTensor
    down: SourceTensor
    scale: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """Adds scale * values, rows by rows."""

    values: SourceTensor
    scale: float
    spans: tuple[Span, ...]


Update = LowRank | Delta
Updates = Mapping[str, Mapping[str, tuple[Update, ...]]]
"""Component -> published tensor, by its name in the checkpoint -> changes."""


class RowReader(Protocol):
    """What this module needs of `prepare.repack.SourceReader`."""

    def rows(self, tensor: SourceTensor, start: int, stop: int) -> memoryview: ...


def apply_updates(
    values: np.ndarray,
    first_row: int,
    updates: tuple[Update, ...],
    reader: RowReader,
    columns: tuple[int, int] | None = None,
) -> None:
    """Add all changes to some rows of a published tensor, in place.

    Args:
        values: [rows, width] float64, rows `first_row` … of the tensor; with `columns` only those columns.
    """
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):  # callers look at the sums
        for update in updates:
            for low, high, source in _overlaps(update.spans, first_row, first_row + values.shape[0]):
                rows = slice(low - first_row, high - first_row)
                values[rows] += update.scale * _change(update, source, source + high - low, reader, columns)


def update_digest(update: Update, reader: RowReader) -> bytes:
    """SHA-256 of what one change is: its factors' types, shapes and bytes, its scale, the rows it changes."""
    factors = (update.up, update.down) if isinstance(update, LowRank) else (update.values,)
    spans = [(span.start, span.stop, span.source) for span in update.spans]
    described = (float(update.scale).hex(), spans, [(factor.dtype, factor.shape) for factor in factors])
    digest = hashlib.sha256(repr(described).encode())
    for factor in factors:
        digest.update(reader.rows(factor, 0, factor.shape[0]))
    return digest.digest()


def _overlaps(spans: tuple[Span, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(first row, end, first row in the adapter) of every span within [start, stop)."""
    for span in spans:
        low, high = max(start, span.start), min(stop, span.stop)
        if low < high:
            yield low, high, span.source + low - span.start


def _change(
    update: Update, start: int, stop: int, reader: RowReader, columns: tuple[int, int] | None
) -> np.ndarray:
    if isinstance(update, LowRank):
        down = _read(update.down, 0, update.down.shape[0], reader)
        up = _read(update.up, start, stop, reader)
        product: np.ndarray = up @ (down if columns is None else down[:, columns[0] : columns[1]])
        return product
    values = _read(update.values, start, stop, reader)
    return values if columns is None else values[:, columns[0] : columns[1]]


def _read(tensor: SourceTensor, start: int, stop: int, reader: RowReader) -> np.ndarray:
    """[rows, width] float64."""
    return to_float64(reader.rows(tensor, start, stop), tensor.dtype).reshape(stop - start, -1)


def to_float64(data: memoryview, dtype: str) -> np.ndarray:
    """Stored values, exactly. dtype: `"BF16"`, `"F16"` or `"F32"`."""
    import numpy as np

    if dtype == "BF16":
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    return np.frombuffer(data, np.float16 if dtype == "F16" else np.float32).astype(np.float64)


def from_float64(values: np.ndarray, dtype: str) -> memoryview:
    """Stored bytes, nearest even, one rounding. Values are finite; what lies beyond the type's range is infinite."""
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):
        if dtype == "F16":
            return np.ascontiguousarray(values.astype(np.float16)).data.cast("B")
        single = np.ascontiguousarray(values.astype(np.float32))
    if dtype == "F32":
        return single.data.cast("B")
    # To odd first (toward zero, lowest bit marks a remainder): rounding the result once more is then exact.
    back = single.astype(np.float64)
    bits = single.view(np.uint32) - (np.abs(back) > np.abs(values)).astype(np.uint32)
    bits |= (back != values).astype(np.uint32)
    return _nearest_bfloat16(bits).data.cast("B")


def _nearest_bfloat16(bits: np.ndarray) -> np.ndarray:
    import numpy as np

    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded: np.ndarray = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return rounded
