"""Small coded directories: random bytes of few values, coded by the fake encoder."""

from __future__ import annotations

import json
from pathlib import Path

from loader.codec.pieces import UNIT_BYTES
from loader.manifest import Manifest
from prepare.codec import CodecLimits, Coding
from prepare.codec_directory import encode_directory
from tests.fakes.codec import FakeEncoder
from tests.loader.prepared import SMALL, Layout, Prepared, write_prepared

LIMITS = CodecLimits(piece_bytes=1024, min_bytes=4096, max_ratio=0.9, block_bytes=8192)


def write_coded(
    folder: Path, layout: Layout = SMALL, limits: CodecLimits = LIMITS, seed: int = 0, letters: int = 16
) -> Prepared:
    """A coded directory below `folder`; `content` has the original bytes of all tensors."""
    orders = None if layout is SMALL else {}
    raw = write_prepared(
        folder / "raw", layout, orders, chunk_bytes=limits.block_bytes, seed=seed, letters=letters
    )
    encode_directory(folder / "raw", folder / "coded", Coding(FakeEncoder(), limits), workers=1)
    manifest = json.loads((folder / "coded" / "manifest.json").read_bytes())
    return Prepared(folder / "coded", manifest, raw.content)


def coded_names(manifest: Manifest) -> list[str]:
    return [name for name, tensor in manifest.tensors.items() if tensor.coded is not None]


def flip(prepared: Prepared, manifest: Manifest, tensor: str, piece: int, at: int = -20) -> None:
    """Change one bit inside one coded piece."""
    record = manifest.tensors[tensor]
    assert record.coded is not None
    assert manifest.codec is not None
    row, file = record.coded.row + piece, manifest.files[record.file]
    place = manifest.codec.table.places[row] * UNIT_BYTES + (file.data_start or 0)
    path = prepared.directory / file.path
    data = bytearray(path.read_bytes())
    data[place + (at if at >= 0 else manifest.codec.table.sizes[row] + at)] ^= 0x10
    path.write_bytes(data)
