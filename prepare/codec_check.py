"""Whether a coded directory's piece table can be true: every row, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from loader.codec.pieces import TABLE_PATH, UNIT_BYTES
from loader.manifest import Manifest


def piece_problems(manifest: Manifest) -> Iterator[str]:
    """One line for each coded tensor with a piece that is empty, overlaps, or crosses a digest block; and lost rows."""
    if manifest.codec is None:
        return
    table, rows = manifest.codec.table, 0
    for tensor in manifest.tensors.values():
        if tensor.coded is None:
            continue
        count = -(-tensor.bytes // manifest.codec.piece_bytes)
        block, end = manifest.files[tensor.file].chunk_bytes or 1, tensor.offset
        rows += count
        for piece in range(count):
            start = table.places[tensor.coded.row + piece] * UNIT_BYTES
            stop = start + table.sizes[tensor.coded.row + piece]
            if (
                not end <= start < stop <= tensor.offset + tensor.coded.bytes
                or start // block != (stop - 1) // block
            ):
                yield f"{TABLE_PATH}: {tensor.name}: piece {piece} at {start}..{stop} overlaps or lies outside"
                break
            end = stop
    if rows != len(table):
        yield f"{TABLE_PATH}: {len(table)} pieces, the manifest's tensors have {rows}"
