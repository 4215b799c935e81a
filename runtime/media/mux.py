"""An MP4 that exists only when it is complete.

Packets go into a file beside the target; `commit` closes it and renames it, `discard` removes it. The index is moved in
front of the data (a player can start before the download ends), the movie clock is a common multiple of the frame and
sample rates so that no duration is rounded, and both streams are interleaved by decoding time. PyAV is imported on
use.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.errors import InternalError, RequestError

if TYPE_CHECKING:
    from av import Packet
    from av.container import OutputContainer

_MOVIE_TIMESCALE = 96_000  # a multiple of 24 frames and 32,000 samples a second


class Mp4File:
    """The container of one clip, opened at once so that an unwritable target is known before any work is paid."""

    def __init__(self, path: Path) -> None:
        """Raises: RequestError: nothing can be written beside `path`."""
        import av

        self.path = path
        self.partial = path.parent / f".{secrets.token_hex(8)}.part"
        options = {"movflags": "+faststart", "movie_timescale": str(_MOVIE_TIMESCALE)}
        try:
            # touched first: the container library creates the file later than it reports success
            self.partial.touch(exist_ok=False)
            self.container: OutputContainer = av.open(str(self.partial), "w", format="mp4", options=options)
        except (OSError, av.FFmpegError) as error:
            self._remove()
            raise RequestError(
                "the video cannot be written there",
                where="output",
                found=f"{path}: {error}",
                expected="a writable folder",
            ) from error
        self._open = True

    def write(self, packets: Iterable[Packet[Any]]) -> None:
        """Mux the packets of all streams in the order of their decoding time.

        Raises: InternalError: the container library or the disk refused.
        """
        import av

        try:
            for packet in sorted(packets, key=_decoding_time):
                self.container.mux(packet)
        except (OSError, av.FFmpegError) as error:
            raise InternalError(
                "the video file cannot be written", where=str(self.path), found=error
            ) from error

    def close(self) -> Path:
        """Finish the file under its partial name, which is returned. Raises: InternalError."""
        import av

        try:
            self._open = False
            self.container.close()
        except (OSError, av.FFmpegError) as error:
            raise InternalError(
                "the video file cannot be closed", where=str(self.path), found=error
            ) from error
        return self.partial

    def commit(self) -> None:
        """Give the closed file its name, replacing what has it."""
        self.partial.replace(self.path)

    def discard(self) -> None:
        """Close and remove what was written; harmless after `commit`."""
        import av

        if self._open:
            self._open = False
            with contextlib.suppress(OSError, av.FFmpegError):
                self.container.close()
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.partial.unlink(missing_ok=True)


def _decoding_time(packet: Packet[Any]) -> Fraction:
    if packet.dts is None or packet.time_base is None:
        raise InternalError("a packet has no time", where="mux")
    return packet.dts * packet.time_base
