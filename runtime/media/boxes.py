"""The outermost boxes of an MP4: enough to see whether a file is whole and can start before it is all there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_HEADER, _LONG_HEADER = 8, 16
_MAX_BOXES = 10_000


@dataclass(frozen=True)
class Box:
    """`kind` is the four-character code; `start` and `end` are byte offsets in the file."""

    kind: str
    start: int
    end: int


def top_level_boxes(path: Path) -> tuple[list[Box], str | None]:
    """Boxes in file order, and what is wrong with their chain (None if they cover the file exactly)."""
    size = path.stat().st_size
    boxes: list[Box] = []
    at = 0
    with path.open("rb") as file:
        while at < size and len(boxes) < _MAX_BOXES:
            file.seek(at)
            header = file.read(_LONG_HEADER)
            length = int.from_bytes(header[:4], "big")
            if length == 1 and len(header) == _LONG_HEADER:
                length = int.from_bytes(header[8:], "big")
            elif length == 0:
                length = size - at  # "to the end of the file"
            kind = header[4:8].decode("latin-1")
            if len(header) < _HEADER or length < _HEADER or not kind.isprintable():
                return boxes, f"no box at byte {at}"
            boxes.append(Box(kind, at, at + length))
            at += length
    if at != size:
        return boxes, f"box {boxes[-1].kind!r} ends at byte {at} of {size}: the file is cut"
    return boxes, None if boxes else "the file is empty"


def has_index_first(boxes: list[Box]) -> bool:
    """Whether `moov` comes before any media data."""
    kinds = [box.kind for box in boxes]
    return "moov" in kinds and "mdat" in kinds and kinds.index("moov") < kinds.index("mdat")
