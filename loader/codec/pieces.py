"""The piece table of a coded directory: where each independently coded piece is stored, how long it is, its CRC-32.

One file of three columns of little-endian 32-bit numbers, one number per piece in each: places in the data section of
the piece's weight file in units of 128 bytes, coded bytes, CRC-32 (as of zlib) of the decoded bytes. Its SHA-256 is in
the manifest. Columns, because they are read at every start: 340,000 pieces of a released model are 4 MB, three copies
and no loop in Python.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from pathlib import Path

from loader.errors import ArtifactError

UNIT_BYTES = 128  # pieces start at multiples of it in the data section; the decoder wants 16, loads like more
PIECE_BYTES = 256 << 10  # decoded; the last piece of a tensor may be shorter
BYTES_PER_PIECE = 12
TABLE_PATH = "codec/pieces.bin"


class PieceTable:
    """Columns `places`, `sizes`, `sums` of equal length."""

    __slots__ = ("places", "sizes", "sums")

    def __init__(self, places: array[int], sizes: array[int], sums: array[int]) -> None:
        self.places = places
        self.sizes = sizes
        self.sums = sums

    def __len__(self) -> int:
        return len(self.places)

    def encode(self) -> bytes:
        return b"".join(_little(column).tobytes() for column in (self.places, self.sizes, self.sums))


def decode_table(data: bytes) -> PieceTable:
    """Inverse of `encode`. Raises: ArtifactError: not whole columns."""
    count, rest = divmod(len(data), BYTES_PER_PIECE)
    if rest:
        raise ArtifactError(
            "piece table is cut short",
            where=TABLE_PATH,
            found=f"{len(data)} bytes",
            expected=f"a multiple of {BYTES_PER_PIECE}",
        )
    columns = []
    for number in range(3):
        column = array("I")
        column.frombytes(data[number * 4 * count : (number + 1) * 4 * count])
        columns.append(_little(column))
    return PieceTable(*columns)


def read_table(path: Path, size: int, sha256: str) -> PieceTable:
    """Read and check a directory's table. Raises: ArtifactError: missing, or not the one that the manifest names."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"piece table cannot be read ({error.strerror})",
            where=str(path),
            hint="copy the prepared directory again",
        ) from error
    if len(data) != size:
        kind = "truncated" if len(data) < size else "too long"
        raise ArtifactError(f"piece table is {kind}", where=str(path), found=len(data), expected=size)
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise ArtifactError(
            "piece table differs from the manifest", where=str(path), found=digest, expected=sha256
        )
    return decode_table(data)


def _little(column: array[int]) -> array[int]:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column
