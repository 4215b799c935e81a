"""One temporal unit → a self-contained piece of H.264; one clip's sound → AAC. What encoder processes run.

A unit is encoded by a fresh encoder session: it begins with an IDR picture and refers to nothing outside, so units
encode in any order, in parallel, and their packets join into one stream (`mux.py`). Equal options give equal SPS and
PPS. Results travel as small NUT files in memory: they keep codec parameters, colour tags and exact timestamps.
PyAV and numpy are imported on use.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from loader.errors import CapabilityError, InternalError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import OutputContainer
    from av.video.stream import VideoStream
    from numpy.typing import NDArray

Layout = Literal["rgb24", "yuv420p"]
"""`rgb24`: [F, H, W, 3], converted here. `yuv420p`: per frame Y [H, W], U and V [H/2, W/2], BT.709 limited range."""

AAC_FRAME = 1024
CODECS = ("libx264", "h264_nvenc")
_BT709, _LIMITED = 1, 1  # values of the H.264 tables for matrix, primaries, transfer; of the range


@dataclass(frozen=True)
class PictureOptions:
    """How pictures are encoded.

    Attributes:
        width, height: pixels, even.
        codec: `libx264`, or `h264_nvenc` where the GPU has an encoder (H100 and H200 have none).
        preset: of the codec; x264: `ultrafast` … `placebo`, NVENC: `p1` … `p7`.
        crf: constant quality, 0 … 51; NVENC's `cq`.
        tune: of the codec, empty for none. `zerolatency` cuts every picture into slices, one a thread, which is
            fastest for units of 17 frames.
        threads: of one session, at least 1. Part of the result: x264 slices pictures by it.
    """

    width: int
    height: int
    fps: int = 24
    codec: str = "libx264"
    preset: str = "ultrafast"
    crf: int = 18
    tune: str = "zerolatency"
    threads: int = 8

    def __post_init__(self) -> None:
        if self.width % 2 or self.height % 2 or min(self.width, self.height) < 2:
            raise InternalError(
                "H.264 4:2:0 needs even sides", where="video", found=f"{self.width}x{self.height}"
            )
        if self.codec not in CODECS or not 0 <= self.crf <= 51 or self.threads < 1:
            raise CapabilityError(
                "these encoder options do not exist",
                where="video encoder",
                found=f"codec {self.codec!r}, crf {self.crf}, {self.threads} threads",
                expected=f"codec {' or '.join(CODECS)}, crf 0 to 51, at least 1 thread",
            )

    def frame_bytes(self, layout: Layout) -> int:
        pixels = self.width * self.height
        return pixels * 3 if layout == "rgb24" else pixels * 3 // 2

    def codec_options(self) -> dict[str, str]:
        """No B pictures: decoding order is display order, so units join without reordering."""
        tune = {"tune": self.tune} if self.tune else {}
        if self.codec == "h264_nvenc":
            tune = {"tune": "ull"} if self.tune == "zerolatency" else tune
            return {"preset": self.preset, "rc": "vbr", "cq": str(self.crf), "bf": "0", "delay": "0", **tune}
        return {"preset": self.preset, "crf": str(self.crf), "bf": "0", **tune}


def probe_encoder(options: PictureOptions) -> None:
    """Open a session and close it. Raises: CapabilityError: no such encoder here, or it refuses the options."""
    import av

    with av.open(io.BytesIO(), "w", format="nut") as container:
        _open_pictures(container, options)


def encode_pictures(pixels: memoryview, count: int, layout: Layout, options: PictureOptions) -> bytes:
    """Encode one unit as a closed group of pictures numbered from 0.

    Args:
        pixels: bytes of `count` frames in `layout`; not kept.
    Returns: a NUT file with `count` packets or fewer.
    Raises: CapabilityError: see `probe_encoder`. InternalError: the encoder failed.
    """
    import av
    import numpy as np

    frames = np.frombuffer(pixels, np.uint8, count * options.frame_bytes(layout)).reshape(count, -1)
    target = io.BytesIO()
    try:
        with av.open(target, "w", format="nut") as container:
            stream = _open_pictures(container, options)
            for index, frame_bytes in enumerate(frames):
                frame = _picture(frame_bytes, layout, options)
                frame.pts, frame.duration, frame.time_base = index, 1, Fraction(1, options.fps)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    except (av.FFmpegError, OSError) as error:
        raise InternalError("the encoder failed", where="video encoder", found=error) from error
    return target.getvalue()


def encode_sound(samples: NDArray[Any], sample_rate: int, bit_rate: int) -> bytes:
    """The whole clip through one AAC-LC encoder.

    Args:
        samples: float32 [2, n] in [-1, 1].
    Returns: a NUT file. Time 0 is the encoder's first output; sound starts `AAC_FRAME` samples later (priming).
    Raises: InternalError: the encoder failed.
    """
    import av
    import numpy as np

    target = io.BytesIO()
    try:
        with av.open(target, "w", format="nut") as container:
            stream = container.add_stream("aac", rate=sample_rate, layout="stereo")
            stream.bit_rate = bit_rate
            for start in range(0, samples.shape[1], AAC_FRAME):
                block = np.ascontiguousarray(samples[:, start : start + AAC_FRAME])
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="stereo")
                frame.sample_rate, frame.time_base = sample_rate, Fraction(1, sample_rate)
                frame.pts = start + AAC_FRAME  # NUT knows no negative times
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    except (av.FFmpegError, OSError) as error:
        raise InternalError("the encoder failed", where="audio encoder", found=error) from error
    return target.getvalue()


def _open_pictures(container: OutputContainer, options: PictureOptions) -> VideoStream:
    import av

    try:
        stream: Any = container.add_stream(options.codec, rate=options.fps, options=options.codec_options())
        stream.width, stream.height, stream.pix_fmt = options.width, options.height, "yuv420p"
        context = stream.codec_context
        context.time_base = Fraction(1, options.fps)
        context.thread_count = options.threads
        context.color_range = _LIMITED
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.open()
    except (av.FFmpegError, ValueError) as error:
        raise CapabilityError(
            "the H.264 encoder cannot be opened",
            where=options.codec,
            found=f"{error}; crf {options.crf}, preset {options.preset}, tune {options.tune}",
            hint="install a PyAV build with this encoder, or use one of its presets",
        ) from error
    picture_stream: VideoStream = stream
    return picture_stream


def _picture(frame_bytes: NDArray[Any], layout: Layout, options: PictureOptions) -> VideoFrame:
    from av import VideoFrame
    from av.video.reformatter import ColorRange, Colorspace, Interpolation

    if layout == "yuv420p":
        planes = frame_bytes.reshape(options.height * 3 // 2, options.width)
        return VideoFrame.from_ndarray(planes, format="yuv420p")
    rgb = frame_bytes.reshape(options.height, options.width, 3)
    return VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
        format="yuv420p",
        dst_colorspace=Colorspace.ITU709,
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange.MPEG,
        interpolation=Interpolation.BICUBIC | Interpolation.ACCURATE_RND,
        dst_color_trc=_BT709,
        dst_color_primaries=_BT709,
    )
