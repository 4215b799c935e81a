"""A fragmented MP4 that a player can play while later units are still being decoded.

One fragment per unit, complete as soon as the unit is encoded: each is written by a container of its own in memory and
sent without the header that all of them share. The sound's priming packet is left out (C74): it would lie before time
0 and push the picture back by 32 ms in a file whose index cannot say so. PyAV is imported on use.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Protocol

from loader.errors import InternalError
from runtime.media.mux import MOVIE_TIMESCALE, Encoded, Piece, Tracks

_HEADER_BOXES = (b"ftyp", b"moov")
_FRAGMENT_BOXES = (b"moof", b"mdat")


class Receiver(Protocol):
    """Takes the bytes of the stream in order, for instance a file or a socket's file object."""

    def write(self, data: bytes, /) -> object: ...


class FragmentStream:
    """Sends a clip's header with its first unit, then one fragment per unit."""

    def __init__(self, receiver: Receiver, unit: Encoded, sound: Encoded) -> None:
        self._receiver = receiver
        self._unit, self._sound = unit, sound
        self._sent = 0

    def send(self, pictures: Sequence[Piece], sound: Sequence[Piece]) -> None:
        """Send one fragment. Raises: InternalError: the receiver is gone, or the library refused."""
        import av

        try:
            data = self._fragment(pictures, [piece for piece in sound if piece.dts >= 0])
            wanted = _FRAGMENT_BOXES if self._sent else _HEADER_BOXES + _FRAGMENT_BOXES
            self._receiver.write(b"".join(box for kind, box in boxes_of(data) if kind in wanted))
        except (OSError, ValueError, av.FFmpegError) as error:
            raise InternalError("the receiver of the video is gone", where="stream", found=error) from error
        self._sent += 1

    def _fragment(self, pictures: Sequence[Piece], sound: Sequence[Piece]) -> bytes:
        import av

        target = io.BytesIO()
        options = {
            "movflags": "empty_moov+default_base_moof+frag_discont",
            "fragment_index": str(self._sent + 1),
            "movie_timescale": str(MOVIE_TIMESCALE),
            "avoid_negative_ts": "disabled",  # or every fragment would begin at 0
        }
        with av.open(target, "w", format="mp4", options=options) as container:
            Tracks(container, self._unit, self._sound).write(pictures, sound)
        return target.getvalue()


def boxes_of(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, whole box) of the outermost boxes of complete MP4 bytes."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8 or at + size > len(data):
            raise InternalError("a fragment is cut", where="stream", found=f"box of {size} bytes at {at}")
        yield data[at + 4 : at + 8], data[at : at + size]
        at += size
