"""Frames and sound → MP4, while the frames are still being decoded.

H.264 4:2:0 at exactly `fps` frames a second, BT.709 limited range (converted and tagged alike, in the bitstream and the
container), AAC stereo encoded once over the whole clip with its priming recorded by the container. Frames are encoded
by a thread of the writer as they are added, so the next unit can be decoded meanwhile. The file appears under its name
only after it was closed, reopened and checked. PyAV and numpy are imported on use.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from loader.errors import CapabilityError, InternalError
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.media.mux import Mp4File
from runtime.media.pcm import fit_pcm, resample_linear

if TYPE_CHECKING:
    import numpy as np
    from av import Packet
    from av.audio.stream import AudioStream
    from av.video.stream import VideoStream
    from numpy.typing import NDArray

SAMPLE_RATE = 32_000
AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_AAC_FRAME = 1024
_BT709, _LIMITED = 1, 1  # values of the H.264 tables for matrix, primaries, transfer; of the range
_MAX_PENDING = 3  # units that wait for the encoder before `add_frames` blocks
_BLANK_STEP = 8  # every 8th row and column is looked at to find a picture without content


@dataclass(frozen=True)
class Mp4Result:
    """What was written. `audio_shift` samples were added (or cut, negative) to fit the sound to the picture."""

    path: Path
    frames: int
    bytes: int
    sha256: str
    sample_rate: int
    audio_samples: int
    audio_shift: int
    audio_clipped: int
    audio_peak: float


class Mp4Writer:
    """One clip. Use as a context manager: leaving it before `finish` removes everything that was written."""

    def __init__(
        self,
        path: Path,
        width: int,
        height: int,
        fps: int = 24,
        *,
        expected_frames: int | None = None,
        crf: int = 18,
        preset: str = "veryfast",
        audio_bit_rate: int = 192_000,
        threads: int = 0,
    ) -> None:
        """Open the file and the picture's encoder.

        Args:
            path: target; a file of that name is replaced at the end.
            width, height: pixels, even.
            expected_frames: the count, if known; another one is refused at the end.
            crf, preset: libx264's rate factor (0 lossless … 51) and preset.
            audio_bit_rate: of the AAC stream, bits per second.
            threads: of the picture's encoder; 0: as many as cores.

        Raises:
            RequestError: the target's folder is not writable.
            CapabilityError: no H.264 encoder here, or one that refuses these options.
        """
        if width % 2 or height % 2 or min(width, height) < 2:
            raise InternalError("H.264 4:2:0 needs even sides", where="video", found=f"{width}x{height}")
        self.path, self.width, self.height, self.fps = Path(path), width, height, fps
        self.expected_frames, self.audio_bit_rate = expected_frames, audio_bit_rate
        self.frames = 0
        self._darkest, self._brightest = 255, 0
        self._packets: list[Packet[Any]] = []
        self._pending: deque[Future[None]] = deque()
        self._file = Mp4File(self.path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mp4-encoder")
        self._done = False
        try:
            self._video = self._open_video(crf, preset, threads)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def add_frames(self, frames: NDArray[np.uint8]) -> None:
        """Append pictures in order.

        Args: frames: uint8 RGB [F, height, width, 3], F ≥ 1; copied, so the caller may reuse the memory.
        Raises: InternalError: another shape or dtype, a finished writer, or an earlier unit that failed to encode.
        """
        import numpy as np

        if self._done:
            raise InternalError("frames after the end", where="video encoder")
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != (self.height, self.width, 3):
            raise InternalError(
                "wrong frames", where="video decoder", found=f"{frames.dtype} {list(frames.shape)}",
                expected=f"uint8 [F, {self.height}, {self.width}, 3]",
            )  # fmt: skip
        unit = np.array(frames, order="C")
        sample = unit[:, ::_BLANK_STEP, ::_BLANK_STEP]
        self._darkest = min(self._darkest, int(sample.min(initial=255)))
        self._brightest = max(self._brightest, int(sample.max(initial=0)))
        while len(self._pending) >= _MAX_PENDING:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._encode_unit, unit, self.frames))
        self.frames += len(unit)

    def finish(self, audio: NDArray[np.floating[Any]], sample_rate: int = SAMPLE_RATE) -> Mp4Result:
        """Add the sound, close, check and name the file.

        Args:
            audio: float [2, samples], as long as the picture within half an audio latent.
            sample_rate: of `audio`; one that AAC does not have (small test models) is brought to 32 kHz.

        Raises: InternalError: no or wrong number of frames, one colour throughout, unusable sound, or a file that
            fails its check. Nothing is left behind then.
        """
        try:
            return self._finish(audio, sample_rate)
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop and remove the partial file; harmless after `finish` and when called twice."""
        if not self._done:
            self._done = True
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._file.discard()

    def _finish(self, audio: NDArray[np.floating[Any]], sample_rate: int) -> Mp4Result:
        if self._done:
            raise InternalError("finished twice", where="video encoder")
        self._check_picture()
        pcm = fit_pcm(audio, sample_rate, self.frames, self.fps)
        samples, rate = pcm.samples, sample_rate
        if rate not in AAC_RATES:
            rate = SAMPLE_RATE
            samples = resample_linear(samples, round(self.frames * rate / self.fps))
        sound = self._encode_audio(samples, rate)
        while self._pending:
            self._pending.popleft().result()
        with _encoding("video encoder"):
            self._packets += self._video.encode()
        self._file.write(self._packets + sound)
        partial = self._file.close()
        self._recheck(partial, samples.shape[1], rate)
        digest, size = hashlib.sha256(partial.read_bytes()).hexdigest(), partial.stat().st_size
        self._file.commit()
        return Mp4Result(
            self.path, self.frames, size, digest, rate, samples.shape[1], pcm.shift, pcm.clipped, pcm.peak
        )

    def _check_picture(self) -> None:
        if not self.frames or self.expected_frames not in (None, self.frames):
            raise InternalError(
                "wrong number of frames",
                where="video decoder",
                found=self.frames,
                expected=self.expected_frames or "at least 1",
            )
        if self._darkest == self._brightest:
            raise InternalError(
                "every frame is one colour", where="video decoder", found=f"value {self._darkest} everywhere",
                hint="not-a-number latents decode to this",
            )  # fmt: skip

    def _recheck(self, partial: Path, samples: int, sample_rate: int) -> None:
        expectation = Mp4Expectation(
            width=self.width, height=self.height, frames=self.frames, fps=self.fps, sample_rate=sample_rate,
            audio_samples=samples,
        )  # fmt: skip
        report = check_mp4(partial, expectation, decode=False)
        if report.problems:
            raise InternalError(
                "the written file fails its check", where=self.path.name, found="; ".join(report.problems)
            )

    def _open_video(self, crf: int, preset: str, threads: int) -> VideoStream:
        import av

        try:
            stream: VideoStream = self._file.container.add_stream(
                "libx264", rate=self.fps, options={"crf": str(crf), "preset": preset}
            )
            stream.width, stream.height, stream.pix_fmt = self.width, self.height, "yuv420p"
            context = stream.codec_context
            context.time_base = Fraction(1, self.fps)
            context.thread_count = threads
            context.color_range = _LIMITED
            context.colorspace = context.color_primaries = context.color_trc = _BT709
            context.open()
        except (av.FFmpegError, ValueError) as error:
            raise CapabilityError(
                "the H.264 encoder cannot be opened",
                where="libx264",
                found=f"{error}; crf {crf}, preset {preset}",
                hint="install a PyAV build with libx264, or use one of its presets",
            ) from error
        return stream

    def _encode_unit(self, unit: NDArray[np.uint8], first: int) -> None:
        """Runs on the writer's thread, units in order: convert, number and encode every frame."""
        from av import VideoFrame
        from av.video.reformatter import ColorRange, Colorspace, Interpolation

        for offset, rgb in enumerate(unit):
            frame = VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                src_color_range=ColorRange.JPEG,
                dst_color_range=ColorRange.MPEG,
                interpolation=Interpolation.BICUBIC | Interpolation.ACCURATE_RND,
                dst_color_trc=_BT709,
                dst_color_primaries=_BT709,
            )
            frame.pts, frame.duration, frame.time_base = first + offset, 1, Fraction(1, self.fps)
            with _encoding("video encoder"):
                self._packets += self._video.encode(frame)

    def _encode_audio(self, samples: NDArray[np.float32], sample_rate: int) -> list[Packet[Any]]:
        """The whole clip through one encoder, from sample 0 on; the container turns its priming into an edit list."""
        import numpy as np
        from av import AudioFrame

        packets: list[Packet[Any]] = []
        with _encoding("audio encoder"):
            stream: AudioStream = self._file.container.add_stream("aac", rate=sample_rate, layout="stereo")
            stream.bit_rate = self.audio_bit_rate
            for start in range(0, samples.shape[1], _AAC_FRAME):
                block = np.ascontiguousarray(samples[:, start : start + _AAC_FRAME])
                frame = AudioFrame.from_ndarray(block, format="fltp", layout="stereo")
                frame.sample_rate, frame.pts, frame.time_base = sample_rate, start, Fraction(1, sample_rate)
                packets += stream.encode(frame)
            return packets + list(stream.encode())


@contextlib.contextmanager
def _encoding(stage: str) -> Iterator[None]:
    """Errors of the encoder library as InternalError naming the stage."""
    import av

    try:
        yield
    except (av.FFmpegError, OSError) as error:
        raise InternalError("the encoder failed", where=stage, found=error) from error
