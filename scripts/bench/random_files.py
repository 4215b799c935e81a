"""Safetensors files full of random numbers, written from many threads as fast as memory takes them.

Matrices are normal with deviation 0.02, norm weights one: a network of any depth stays finite on them. The values are
cut from two pools, at another place for every piece, so that writing costs no arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

_POOL_BYTES = 512 << 20
_PIECE_BYTES = 64 << 20
_STEP = 4099 * 256  # moves through a pool without meeting the same start again soon

Pools = dict[str, memoryview]
Piece = tuple[memoryview, int]  # bytes and their place in the data section


def random_pools(pool_bytes: int = _POOL_BYTES) -> Pools:
    """Normal values of deviation 0.02 as "BF16", "F16" and "F32"."""
    values = np.random.default_rng(0).standard_normal(pool_bytes // 8, dtype=np.float32) * np.float32(0.02)
    values = np.concatenate([values, -values])
    bf16 = np.concatenate([(values.view(np.uint32) >> 16).astype(np.uint16)] * 2)
    f16 = np.concatenate([values.astype(np.float16)] * 2)
    return {"BF16": bf16.data.cast("B"), "F16": f16.data.cast("B"), "F32": values.data.cast("B")}


def tensor_pieces(
    name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, pools: Pools, number: int
) -> Iterator[Piece]:
    """The bytes of one tensor, piece by piece.

    Args:
        begin, end: where the tensor lies in the data section.
        number: of the tensor; tensors of different numbers hold different values.
    """
    if len(shape) == 1 and "norm" in name:
        one = np.ones(shape, np.float16 if dtype == "F16" else np.float32)
        words = (one.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else one
        yield words.data.cast("B"), begin
        return
    pool = pools[dtype]
    piece_bytes = min(_PIECE_BYTES, len(pool) // 2)
    room = len(pool) - piece_bytes
    for index, start in enumerate(range(begin, end, piece_bytes)):
        shift = (number * 97 + index) * _STEP % room // 256 * 256
        yield pool[shift : shift + min(piece_bytes, end - start)], start


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """`pwrite` until everything is written."""
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
