"""A piece codec over the fake driver's memory, as late as the driver: tables and pieces are read at completion.

The code is raw deflate without matches: Huffman codes of single bytes, no checksum, so that a flipped bit mostly decodes
to other bytes, as it does with rANS. Memory is read through addresses alone, as a kernel would.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fakes.driver import FakeDriver

CANNOT_DECOMPRESS = 12


def pack(data: bytes) -> bytes:
    coder = zlib.compressobj(level=6, wbits=-15, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def unpack(data: bytes, room: int) -> bytes | None:
    """None: not a stream, or its end is missing, or it does not fit."""
    coder = zlib.decompressobj(wbits=-15)
    try:
        plain = coder.decompress(data, room + 1)
    except zlib.error:
        return None
    return plain if coder.eof and len(plain) <= room else None


class FakeEncoder:
    """Implements `prepare.codec.PieceEncoder` on the CPU."""

    name, library, version = "ans", "fake", "6.0.0"

    def encode(self, data: memoryview, dtype: str, piece_bytes: int) -> tuple[list[bytes], list[int]]:
        plain = [bytes(data[start : start + piece_bytes]) for start in range(0, len(data), piece_bytes)]
        return [pack(piece) for piece in plain], [zlib.crc32(piece) for piece in plain]


class FakeCodec:
    """Implements `loader.codec.unpacker.PieceCodec`.

    Attributes:
        calls, dtypes: number of pieces and their type of each call.
        wrong_status: (call, piece) whose status is made to be 12.
        scratch: bytes that it claims to need per piece; they are overwritten.
    """

    def __init__(self, driver: FakeDriver, version: str = "6.0.0") -> None:
        self._driver = driver
        self.version = version
        self.calls: list[int] = []
        self.dtypes: list[str] = []
        self.wrong_status: tuple[int, int] | None = None
        self.scratch = 64
        self._is_ready = False

    def status_text(self, code: int) -> str:
        return f"fake {code}"

    def scratch_bytes(self, count: int, piece_bytes: int) -> int:
        return self.scratch * count

    def prepare_checksum(self, count: int, piece_bytes: int) -> None:
        self._is_ready = True

    def unpack(
        self,
        sources: int,
        sizes: int,
        rooms: int,
        actual: int,
        count: int,
        scratch: int,
        scratch_bytes: int,
        targets: int,
        statuses: int,
        stream: int,
        dtype: str = "",
    ) -> None:
        self.dtypes.append(dtype)
        require = self._driver._require
        require(scratch_bytes >= self.scratch * count, "too little scratch memory")
        for address, size in ((sources, 8), (sizes, 8), (rooms, 8), (targets, 8), (actual, 8), (statuses, 4)):
            require(self._driver.is_device_range(address, size * count), "a table outside device memory")
            require(address % size == 0, "a table that is not aligned")
        call = len(self.calls)
        self.calls.append(count)

        def run() -> None:
            ctypes.memset(scratch, 0x5A, self.scratch * count)
            for lane in range(count):
                source, size, room, target = (
                    _lane(table, lane) for table in (sources, sizes, rooms, targets)
                )
                if not self._is_sound(((source, size), (target, room))):
                    return
                plain = unpack(ctypes.string_at(source, size), room)
                if (call, lane) == self.wrong_status:
                    plain = None
                if plain is not None:
                    ctypes.memmove(target, plain, len(plain))
                _put(actual + 8 * lane, 0 if plain is None else len(plain), 8)
                _put(statuses + 4 * lane, CANNOT_DECOMPRESS if plain is None else 0, 4)

        self._driver.enqueue(stream, run)

    def _is_sound(self, ranges: tuple[tuple[int, int], ...]) -> bool:
        """On a stream's thread, which must not end: a broken rule is kept for `finish`."""
        for address, length in ranges:
            if not self._driver.is_device_range(address, length) or address % 16:
                self._driver.violations.append(f"a piece outside device memory or not aligned: {address}")
                return False
        return True

    def checksum(self, targets: int, rooms: int, count: int, sums: int, stream: int) -> None:
        self._driver._require(self._is_ready, "checksum without prepare_checksum")

        def run() -> None:
            for lane in range(count):
                data = ctypes.string_at(_lane(targets, lane), _lane(rooms, lane))
                _put(sums + 4 * lane, zlib.crc32(data), 4)

        self._driver.enqueue(stream, run)


def _lane(table: int, lane: int) -> int:
    return int.from_bytes(ctypes.string_at(table + 8 * lane, 8), "little")


def _put(address: int, value: int, size: int) -> None:
    ctypes.memmove(address, value.to_bytes(size, "little"), size)
