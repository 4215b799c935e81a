"""What the GPU encoder does around nvCOMP's calls, on host memory with a coder that works at once."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import pytest
import torch

from loader.errors import InternalError
from prepare.codec_gpu import PieceBatch
from tests.fakes import codec as fake


class _Immediate:
    """The calls of `Nvcomp` that the encoder makes, for addresses of host memory.

    Args:
        spoil: number of a piece that decodes to something else; status: what coding it reports for piece 1.
    """

    def __init__(self, spoil: int = -1, status: int = 0) -> None:
        self.spoil, self.status = spoil, status

    def packing(self, dtype: str) -> str:
        return dtype

    def most_packed_bytes(self, options: str, piece_bytes: int) -> int:
        return piece_bytes + 100

    def pack_scratch_bytes(self, options: str, count: int, piece_bytes: int) -> int:
        return 0

    def scratch_bytes(self, count: int, piece_bytes: int) -> int:
        return 0

    def status_text(self, code: int) -> str:
        return f"fake {code}"

    def prepare_checksum(self, count: int, piece_bytes: int) -> None: ...

    def pack(self, options: str, sources: int, sizes: int, piece_bytes: int, count: int, *rest: Any) -> None:
        _, _, targets, packed, statuses, _ = rest
        for lane in range(count):
            coded = fake.pack(ctypes.string_at(fake._lane(sources, lane), fake._lane(sizes, lane)))
            assert len(coded) <= piece_bytes + 100
            assert fake._lane(targets, lane) % 16 == fake._lane(targets, 0) % 16
            ctypes.memmove(fake._lane(targets, lane), coded, len(coded))
            fake._put(packed + 8 * lane, len(coded), 8)
            fake._put(statuses + 4 * lane, self.status if lane == 1 else 0, 4)

    def unpack(self, sources: int, sizes: int, rooms: int, actual: int, count: int, *rest: Any) -> None:
        _, _, targets, statuses, _, _ = rest
        for lane in range(count):
            plain = fake.unpack(ctypes.string_at(fake._lane(sources, lane), fake._lane(sizes, lane)), 1 << 20)
            assert plain is not None
            if lane == self.spoil:
                plain = bytes([plain[0] ^ 1]) + plain[1:]
            ctypes.memmove(fake._lane(targets, lane), plain, len(plain))
            fake._put(actual + 8 * lane, len(plain), 8)
            fake._put(statuses + 4 * lane, 0, 4)

    def checksum(self, targets: int, rooms: int, count: int, sums: int, stream: int) -> None:
        for lane in range(count):
            data = ctypes.string_at(fake._lane(targets, lane), fake._lane(rooms, lane))
            fake._put(sums + 4 * lane, zlib.crc32(data), 4)


def _batch(codec: Any, size: int = 10_000) -> tuple[bytes, PieceBatch]:
    plain = torch.randint(0, 16, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    return bytes(plain.numpy()), PieceBatch(codec, plain, "BF16", 4096, 0)


@pytest.mark.parametrize("size", [2, 4096, 10_000, 12_288])
def test_pieces_are_where_they_are_said_to_be(size: int) -> None:
    data, batch = _batch(_Immediate(), size)
    coded, sizes = batch.pack()
    sums = batch.prove(coded, sizes)
    plain = [data[start : start + 4096] for start in range(0, size, 4096)]
    memory = bytes(coded.numpy())
    found = [memory[i * batch.room :][:length] for i, length in enumerate(sizes.tolist())]
    assert [fake.unpack(piece, 4096) for piece in found] == plain
    assert sums == [zlib.crc32(piece) for piece in plain]


@pytest.mark.parametrize("piece", [0, 2])
def test_a_piece_that_does_not_decode_to_itself_stops_prepare(piece: int) -> None:
    _, batch = _batch(_Immediate(spoil=piece))
    coded, sizes = batch.pack()
    with pytest.raises(InternalError, match="does not decode to itself"):
        batch.prove(coded, sizes)


def test_a_piece_that_is_not_coded_stops_prepare() -> None:
    _, batch = _batch(_Immediate(status=19))
    with pytest.raises(InternalError, match=r"could not be coded: fake 19; found 19"):
        batch.pack()
