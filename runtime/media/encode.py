"""Frames and sound → MP4, while the frames are still being decoded.

H.264 4:2:0 at exactly `fps` frames a second, BT.709 limited range (converted and tagged alike, in the bitstream and the
container), AAC stereo encoded once over the whole clip. Every unit is encoded by itself in the pool's encoder
processes; a thread of the writer muxes finished units in order, so when the last unit is decoded only that unit is
left to encode. The file gets its name only after it was closed, reopened and checked. PyAV and numpy are imported on
use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from loader.errors import InternalError, WorkerError
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.media.encoder_pool import EncoderPool
from runtime.media.fragments import FragmentStream, Receiver
from runtime.media.mux import Encoded, Mp4File, Piece, read_sound, read_unit
from runtime.media.pcm import FittedPcm, fit_pcm, resample_linear
from runtime.media.picture_memory import PictureSlot
from runtime.media.unit_encoder import Layout, PictureOptions
from runtime.media.units import BlankCheck, HostUnit, PictureUnit

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE_RATE = 32_000
AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_WAIT_S = 0.5  # between two looks at failures while every slot is taken


@dataclass(frozen=True)
class Mp4Result:
    """What was written. `audio_shift` samples were added (or cut, negative) to fit the sound to the picture."""

    path: Path
    frames: int
    bytes: int
    sample_rate: int
    audio_samples: int
    audio_shift: int
    audio_clipped: int
    audio_peak: float


@dataclass
class _Copy:
    """A unit whose pictures are on their way into `slot`; `wait` is None once they are there."""

    slot: PictureSlot
    num_frames: int
    layout: Layout
    wait: Callable[[], None] | None


@dataclass(frozen=True)
class _Sound:
    pcm: FittedPcm
    samples: int
    sample_rate: int
    encoded: Future[bytes]


class Mp4Writer:
    """One clip. Use as a context manager: leaving it before `finish` removes everything that was written."""

    def __init__(
        self,
        path: Path,
        width: int,
        height: int,
        fps: int = 24,
        *,
        frames: int,
        encoders: EncoderPool | None = None,
        receiver: Receiver | None = None,
        on_pictures: Callable[[int], None] | None = None,
        audio_bit_rate: int = 192_000,
        **picture: Any,
    ) -> None:
        """Open the file.

        Args:
            path: target; a file of that name is replaced at the end.
            width, height: pixels, even.
            frames: the clip's length; another count is refused at the end.
            encoders: pool of the worker; None: one of this writer's own that encodes in this process.
            receiver: gets the clip as a fragmented MP4 while it is made, beside the file.
            on_pictures: called whenever a unit's pictures are in host memory, with the number of frames so far.
            audio_bit_rate: of the AAC stream, bits per second.
            picture: further fields of `PictureOptions`: codec, preset, crf, tune, threads.

        Raises:
            RequestError: the target's folder is not writable.
            CapabilityError: no H.264 encoder here, or one that refuses these options.
        """
        self.options = PictureOptions(width=width, height=height, fps=fps, **picture)
        self.path, self.expected_frames, self.audio_bit_rate = Path(path), frames, audio_bit_rate
        self.frames = 0
        self._on_pictures = on_pictures
        self._receiver = receiver
        self._units: list[int] = []
        self._blank = BlankCheck(self.options)
        self._copying: _Copy | None = None
        self._encoding: list[Future[bytes]] = []
        self._muxed: list[Future[None]] = []
        self._sound: Future[_Sound] = Future()
        self._has_sound = self._done = False
        self._tracks: _Muxer | None = None
        self._owned = EncoderPool(0) if encoders is None else None
        self._encoders: EncoderPool = encoders or self._owned  # type: ignore[assignment]
        self._file = Mp4File(self.path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mux")
        try:
            self._encoders.probe(self.options)
            self._encoders.start(self.options, frames)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def add_sound(self, audio: NDArray[Any], sample_rate: int = SAMPLE_RATE) -> None:
        """Take the whole sound, before, between or after the frames; it is encoded meanwhile.

        Args:
            audio: float [2, samples], as long as the picture within half an audio latent.
            sample_rate: of `audio`; one that AAC does not have (small test models) is brought to 32 kHz.

        Raises: InternalError: unusable sound, sound twice, or a finished writer.
        """
        import numpy as np

        if self._done or self._has_sound:
            raise InternalError("sound twice or after the end", where="audio encoder")
        pcm = fit_pcm(audio, sample_rate, self.expected_frames, self.options.fps)
        samples, rate = pcm.samples, sample_rate
        if rate not in AAC_RATES:
            rate = SAMPLE_RATE
            samples = resample_linear(samples, round(self.expected_frames * rate / self.options.fps))
        slot = self._acquire(samples.nbytes)
        np.copyto(np.frombuffer(slot.view, np.float32, samples.size).reshape(samples.shape), samples)
        encoded = self._encoders.encode_sound(slot, samples.nbytes, rate, self.audio_bit_rate)
        self._encoding.append(encoded)
        self._has_sound = True
        self._sound.set_result(_Sound(pcm, samples.shape[1], rate, encoded))

    def add_frames(self, unit: PictureUnit | NDArray[Any]) -> None:
        """Append pictures in order. Returns when they are, or are being, copied; so the memory may be reused after
        the next call, or at once if it is host memory.

        Args:
            unit: a unit, or uint8 RGB [F, height, width, 3], F ≥ 1.
        Raises: InternalError: wrong frames, a finished writer, or an earlier unit that failed.
        """
        import numpy as np

        if self._done:
            raise InternalError("frames after the end", where="video encoder")
        if isinstance(unit, np.ndarray):
            unit = HostUnit(unit, self.options)
        slot = self._acquire(unit.num_frames * self.options.frame_bytes(unit.layout))
        try:
            arrival = unit.copy_into(slot.view)
            self._hand_over()  # the unit before; this one is being computed meanwhile
        except BaseException:
            self._encoders.memory.release(slot)
            raise
        self._copying = _Copy(slot, unit.num_frames, unit.layout, arrival)
        if arrival is None:
            self._hand_over()

    def finish(self) -> Mp4Result:
        """Close, check and name the file.

        Raises: InternalError: no sound, no or wrong number of frames, one colour throughout, a unit that failed, or a
            file that fails its check. Nothing is left behind then.
        """
        try:
            return self._finish()
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop and remove what was written; harmless after `finish` and when called twice."""
        if self._done:
            return
        self._done = True
        if self._copying is not None:  # the device must not write into a slot that has another owner
            copying, self._copying = self._copying, None
            if copying.wait is not None:
                with contextlib.suppress(WorkerError):
                    copying.wait()
            self._encoders.memory.release(copying.slot)
        if not self._has_sound:
            self._sound.cancel()
        for encoded in self._encoding:
            encoded.cancel()
        wait(self._encoding)  # of those that run already: their slots must be free for the next clip
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._file.discard()
        if self._owned is not None:
            self._owned.close()

    def _acquire(self, size: int) -> PictureSlot:
        """A slot of at least `size` bytes. Raises: InternalError: an earlier unit failed."""
        memory = self._encoders.memory
        if size > memory.slot_bytes:
            self._hand_over()
            self._wait_for_encoders()
            memory.resize(size, self._encoders.slots, pin=memory.pinned)
        while (slot := memory.acquire(_WAIT_S)) is None:
            self._raise_failures()
        self._raise_failures(slot)
        return slot

    def _wait_for_encoders(self) -> None:
        """Until every slot is free again."""
        memory = self._encoders.memory
        held: list[PictureSlot] = []
        while len(held) < memory.slots:
            slot = memory.acquire(_WAIT_S)
            if slot is not None:
                held.append(slot)
        for slot in held:
            memory.release(slot)

    def _raise_failures(self, slot: PictureSlot | None = None) -> None:
        for future in self._muxed:
            if future.done() and (error := future.exception()) is not None:
                if slot is not None:
                    self._encoders.memory.release(slot)
                raise error

    def _hand_over(self) -> None:
        """Give the unit that is being copied to an encoder, once it is there."""
        if self._copying is None:
            return
        copying, self._copying = self._copying, None
        try:
            if copying.wait is not None:
                copying.wait()
        except BaseException:
            self._encoders.memory.release(copying.slot)
            raise
        encoded = self._encoders.encode(copying.slot, copying.num_frames, copying.layout, self.options)
        self._encoding.append(encoded)
        # Meanwhile; the slot may be free again, but only this thread fills slots.
        self._blank.add(copying.slot.view, copying.num_frames, copying.layout)
        self._muxed.append(self._thread.submit(self._mux, encoded, self.frames, copying.num_frames))
        self._units.append(copying.num_frames)
        self.frames += copying.num_frames
        if self._on_pictures is not None:
            self._on_pictures(self.frames)

    def _mux(self, encoded: Future[bytes], first: int, count: int) -> None:
        """Runs on the writer's thread, units in order."""
        unit = read_unit(encoded.result(), first, self.options.fps)
        if len(unit.pieces) != count:
            raise InternalError(
                "the encoder lost frames", where="video encoder", found=len(unit.pieces), expected=count
            )
        if self._tracks is None:
            sound = self._sound.result()
            read = read_sound(sound.encoded.result(), sound.samples, sound.sample_rate)
            self._file.begin(unit, read, self.expected_frames)
            stream = FragmentStream(self._receiver, unit, read) if self._receiver else None
            self._tracks = _Muxer(self._file, stream, unit.header, read.pieces)
        is_last = first + count >= self.expected_frames
        self._tracks.append(unit, None if is_last else Fraction(first + count, self.options.fps))

    def _finish(self) -> Mp4Result:
        if self._done:
            raise InternalError("finished twice", where="video encoder")
        self._hand_over()
        self._check_picture()
        if not self._has_sound:
            raise InternalError("the clip has no sound", where="audio encoder")
        for future in self._muxed:
            try:
                future.result()
            except CancelledError as error:
                raise InternalError("the encoder was stopped", where="video encoder") from error
        sound = self._sound.result()
        written = self._file.close()
        self._recheck(written, sound)
        size = written.stat().st_size
        self._file.commit()
        pcm = sound.pcm
        return Mp4Result(
            self.path, self.frames, size, sound.sample_rate, sound.samples, pcm.shift, pcm.clipped, pcm.peak
        )

    def _check_picture(self) -> None:
        if self.frames != self.expected_frames or not self.frames:
            raise InternalError(
                "wrong number of frames",
                where="video decoder",
                found=self.frames,
                expected=self.expected_frames or "at least 1",
            )
        if min(self._units) < 2 and len(self._units) > 1:
            # two IDR pictures in a row need different idr_pic_id, and every session numbers its own from 0
            raise InternalError("a unit of one frame among others", where="video decoder", found=self._units)
        if self._blank.is_blank:
            raise InternalError(
                "every frame is one colour",
                where="video decoder",
                found=f"components {self._blank.colour} everywhere",
                hint="not-a-number latents decode to this",
            )

    def _recheck(self, written: Path, sound: _Sound) -> None:
        expectation = Mp4Expectation(
            width=self.options.width,
            height=self.options.height,
            frames=self.frames,
            fps=self.options.fps,
            sample_rate=sound.sample_rate,
            audio_samples=sound.samples,
        )
        report = check_mp4(written, expectation, decode=False)
        if report.problems:
            raise InternalError(
                "the written file fails its check", where=self.path.name, found="; ".join(report.problems)
            )


class _Muxer:
    """Joins units: the same parameter sets throughout, and the sound that goes with each."""

    def __init__(
        self, file: Mp4File, stream: FragmentStream | None, header: bytes, sound: list[Piece]
    ) -> None:
        self._file, self._stream, self._header = file, stream, header
        self._sound = sound

    def append(self, unit: Encoded, until: Fraction | None) -> None:
        """Write a unit with the sound before `until` seconds (None: all that is left). Raises: InternalError."""
        if unit.header != self._header:
            raise InternalError("units have different parameter sets", where="video encoder")
        due = [piece for piece in self._sound if until is None or piece.decoding_time < until]
        self._sound = self._sound[len(due) :]
        self._file.write(unit.pieces, due)
        if self._stream is not None:
            self._stream.send(unit.pieces, due)
