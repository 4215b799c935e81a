"""What a service can say about an MP4 without a decoder: the boxes are whole and the index comes first."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

MAX_BOXES = 64


def check_container(path: Path) -> str | None:
    """Walk the top-level boxes. Returns the first problem in words, or None. Raises: OSError."""
    size = path.stat().st_size
    seen: list[bytes] = []
    with path.open("rb") as file:
        position = 0
        while position < size and len(seen) < MAX_BOXES:
            file.seek(position)
            header = file.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            if length == 1:
                length = int.from_bytes(header[8:16], "big")
            if len(header) < 8 or length < 8 or position + length > size:
                return f"box {len(seen)} is cut off or not a box"
            seen.append(kind)
            position += length
    if not seen or seen[0] != b"ftyp":
        return "it does not begin with a file type box"
    if b"moov" not in seen or b"mdat" not in seen:
        return "index or media data is missing"
    return "the index comes after the media data" if seen.index(b"moov") > seen.index(b"mdat") else None


def file_digest(path: Path) -> tuple[str, int]:
    """SHA-256 (hex) and size of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
