"""Encoded units and sound → packets of one stream each → an MP4 that exists only when it is complete.

Nothing is encoded here: packets of every unit follow those of the unit before, with timestamps of absolute frame
numbers, so no rounding adds up (C74). The index lies in front of the data (a player can start before the download
ends), in room that is reserved for it, so closing the file moves no data. The movie clock is a common multiple of the
frame and sample rates. PyAV is imported on use.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.errors import InternalError, RequestError
from runtime.media.unit_encoder import AAC_FRAME
from runtime.media.unnamed_file import UnnamedFile

if TYPE_CHECKING:
    from av.container import InputContainer, OutputContainer
    from av.stream import Stream

MOVIE_TIMESCALE = 96_000  # a multiple of 24 frames and 32,000 samples a second
# The header says all; without this a picture is decoded as well, which would be the last unit's 5 to 15 ms.
_ONLY_THE_HEADER = {"probesize": "32"}
_INDEX_BYTES = 4096
_INDEX_BYTES_PER_PACKET = 40  # entries of stsz, stco (64 bit), stsc, ctts, stss, rounded up


@dataclass(frozen=True)
class Piece:
    """One packet; `pts`, `dts` and `duration` in `time_base`."""

    data: bytes
    pts: int
    dts: int
    duration: int
    time_base: Fraction
    is_keyframe: bool

    @property
    def decoding_time(self) -> Fraction:
        return self.dts * self.time_base


@dataclass
class Encoded:
    """The packets of a unit or of the sound, and the stream they came from, a template for the output's.

    `source` keeps the demuxer open that the template belongs to.
    """

    template: Stream
    header: bytes
    pieces: list[Piece]
    source: InputContainer = field(repr=False)


def read_unit(data: bytes, first_frame: int, fps: int) -> Encoded:
    """An encoded unit with its frames numbered from `first_frame`; it has no B pictures, so decoding times are those of
    display. Raises: InternalError: its times are not frames, or in another order."""
    grid = Fraction(1, fps)
    source, template, packets = _demux(data, "video encoder")
    times = [time / grid for _, time, _ in packets]
    if any(time.denominator != 1 for time in times) or times != sorted(set(times)):
        found = [str(time) for time in times]
        raise InternalError("packets are not frame by frame in order", where="video encoder", found=found)
    if not packets or not packets[0][2]:
        raise InternalError("a unit does not begin with a keyframe", where="video encoder")
    pieces = [
        Piece(content, first_frame + int(time), first_frame + int(time), 1, grid, is_keyframe)
        for (content, _, is_keyframe), time in zip(packets, times, strict=True)
    ]
    return Encoded(template, template.codec_context.extradata or b"", pieces, source)


def read_sound(data: bytes, samples: int, sample_rate: int) -> Encoded:
    """The encoded sound; its priming lies before time 0 and its last packet ends with the last sample."""
    grid = Fraction(1, sample_rate)
    source, template, packets = _demux(data, "audio encoder")
    pieces = []
    for content, time, _ in packets:
        start = int(time / grid) - AAC_FRAME
        if start < samples:
            pieces.append(Piece(content, start, start, min(AAC_FRAME, samples - start), grid, True))
    return Encoded(template, template.codec_context.extradata or b"", pieces, source)


def _demux(data: bytes, where: str) -> tuple[InputContainer, Stream, list[tuple[bytes, Fraction, bool]]]:
    """Content, time in seconds and whether it is a keyframe, of every packet. Raises: InternalError: unreadable."""
    import av

    try:
        source = av.open(io.BytesIO(data), "r", format="nut", options=_ONLY_THE_HEADER)
        stream = source.streams[0]
        packets = [
            (bytes(packet), packet.pts * packet.time_base, packet.is_keyframe)
            for packet in source.demux(stream)
            if packet.pts is not None and packet.time_base is not None
        ]
    except (OSError, av.FFmpegError, IndexError) as error:
        raise InternalError("an encoder's result is unreadable", where=where, found=error) from error
    return source, stream, packets


class Tracks:
    """The two streams of an output container; takes pieces of both in the order of their decoding time."""

    def __init__(self, container: OutputContainer, unit: Encoded, sound: Encoded) -> None:
        self.container = container
        self._streams = []
        for encoded in (unit, sound):
            # opaque: parameters only; an encoder on the output would write a header of its own
            stream = container.add_stream_from_template(encoded.template, opaque=True)
            stream.time_base = encoded.pieces[0].time_base
            self._streams.append(stream)

    def write(self, pictures: Iterable[Piece], sound: Iterable[Piece]) -> None:
        """Raises: whatever the container library or the disk raises."""
        import av

        tagged = [
            (piece, stream)
            for stream, pieces in zip(self._streams, (pictures, sound), strict=True)
            for piece in pieces
        ]
        for piece, stream in sorted(tagged, key=lambda pair: pair[0].decoding_time):
            packet: Any = av.Packet(piece.data)
            packet.pts, packet.dts, packet.duration = piece.pts, piece.dts, piece.duration
            packet.time_base, packet.is_keyframe = piece.time_base, piece.is_keyframe
            packet.stream = stream
            self.container.mux(packet)


class Mp4File:
    """The container of one clip, without its name until `commit`; an unwritable target is known before any work."""

    def __init__(self, path: Path) -> None:
        """Raises: RequestError: nothing can be written beside `path`."""
        self.path = path
        self._tracks: Tracks | None = None
        self._is_broken = False
        try:
            self._file = UnnamedFile(path)
        except OSError as error:
            raise RequestError(
                "the video cannot be written there",
                where="output",
                found=f"{path}: {error}",
                expected="a writable folder",
            ) from error

    def begin(self, unit: Encoded, sound: Encoded, frames: int) -> None:
        """Open the container with both streams and room for an index of `frames` pictures. Raises: InternalError."""
        import av

        room = _INDEX_BYTES + _INDEX_BYTES_PER_PACKET * (frames + len(sound.pieces))
        options = {"moov_size": str(room), "movie_timescale": str(MOVIE_TIMESCALE)}
        with self._writing():
            container = av.open(str(self._file.path), "w", format="mp4", options=options)
            self._tracks = Tracks(container, unit, sound)

    def write(self, pictures: Iterable[Piece], sound: Iterable[Piece]) -> None:
        """Append packets. Raises: InternalError: the container library or the disk refused."""
        assert self._tracks is not None
        with self._writing():
            self._tracks.write(pictures, sound)

    def close(self) -> Path:
        """Finish the file; the path to read it by until `commit`. Raises: InternalError."""
        assert self._tracks is not None
        tracks, self._tracks = self._tracks, None
        with self._writing():
            tracks.container.close()
        return self._file.path

    def commit(self) -> None:
        """Give the closed file its name, replacing what has it. Raises: InternalError: the name is taken by a folder
        now, or the disk refused."""
        with self._writing():
            self._file.commit()

    def discard(self) -> None:
        """Close and remove what was written; harmless after `commit`."""
        import av

        if self._tracks is not None:
            tracks, self._tracks = self._tracks, None
            with contextlib.suppress(OSError, av.FFmpegError):
                tracks.container.close()
        self._file.discard()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Errors of the container library and the disk as InternalError.

        After one the container is not touched again: the library crashes when a header is written twice.
        """
        import av

        if self._is_broken:
            raise InternalError(
                "the video file cannot be written", where=str(self.path), found="an earlier error"
            )
        self._is_broken = True
        try:
            yield
        except (OSError, av.FFmpegError) as error:
            raise InternalError(
                "the video file cannot be written", where=str(self.path), found=error
            ) from error
        self._is_broken = False
