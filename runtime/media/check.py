"""Is this MP4 what was ordered? All problems are listed, none stops the others.

Structure: whole file, index in front, exactly one H.264 and one AAC stream, size, every timestamp on the frame grid,
colour tags, both durations. Decoded (unless left out): every frame and sample decodes, the picture has content, the
sound has any, optionally clicks on flashes and no single bright frame. Also the command `check-mp4`. PyAV on use.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.media.boxes import has_index_first, top_level_boxes
from runtime.media.signals import analyse_brightness, find_clicks, find_flashes, sync_problems

if TYPE_CHECKING:
    import numpy as np
    from av.container import InputContainer
    from numpy.typing import NDArray

_AAC_FRAME = 1024
_TAGS = {"range": 1, "primaries": 1, "transfer": 1, "matrix": 1}  # limited range, BT.709
_MIN_STD, _MIN_RMS = 0.5, 1e-5


@dataclass(frozen=True)
class Mp4Expectation:
    """What a file must be; None leaves a value open.

    Attributes:
        audio_samples: per channel, met within one AAC frame (1,024).
        allow_silence: silence is legal sound.
        clicks: flashes in the picture and clicks in the sound must coincide within 10 ms.
        forbid_spikes: no single frame may be far brighter or darker than its neighbours.
    """

    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: int = 24
    sample_rate: int = 32_000
    channels: int = 2
    audio_samples: int | None = None
    allow_silence: bool = False
    clicks: bool = False
    forbid_spikes: bool = False


@dataclass
class Mp4Report:
    """`problems` is empty for a good file; `facts` holds what was measured (JSON types)."""

    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self, name: str, found: object, expected: object) -> None:
        """Note a fact and, if it differs from what is expected, a problem. None as expectation: note only."""
        self.facts[name] = str(found) if isinstance(found, Fraction) else found
        if expected is not None and found != expected:
            self.problems.append(f"{name}: {found}, expected {expected}")


def check_mp4(path: Path, expectation: Mp4Expectation | None = None, *, decode: bool = True) -> Mp4Report:
    """Examine a file; never raises for a bad one. Without an expectation only what holds for every file is required."""
    import av

    report, expectation = Mp4Report(), expectation or Mp4Expectation()
    try:
        boxes, broken = top_level_boxes(path)
        report.facts |= {"bytes": path.stat().st_size, "boxes": [box.kind for box in boxes]}
        if broken:
            report.problems.append(broken)
        report.require("moov_first", has_index_first(boxes), True)
        with av.open(str(path)) as container:
            if _check_streams(container, report):
                _check_video(container, expectation, report)
                _check_audio(container, expectation, report)
                _check_timestamps(container, expectation, report)
        if decode and "frames" in report.facts:
            _check_content(path, expectation, report)
    except (av.FFmpegError, OSError) as error:
        report.problems.append(f"not readable as MP4: {error}")
    return report


def _check_streams(container: InputContainer, report: Mp4Report) -> bool:
    counts = {kind: sum(s.type == kind for s in container.streams) for kind in ("video", "audio")}
    report.require("streams", len(container.streams), 2)
    report.require("video streams", counts["video"], 1)
    report.require("audio streams", counts["audio"], 1)
    return min(counts.values()) >= 1


def _check_video(container: InputContainer, expectation: Mp4Expectation, report: Mp4Report) -> None:
    stream = container.streams.video[0]
    context = stream.codec_context
    report.require("video codec", context.name, "h264")
    report.require("pixel format", context.pix_fmt, "yuv420p")
    report.require("width", context.width, expectation.width)
    report.require("height", context.height, expectation.height)
    report.require("frame rate", stream.average_rate, Fraction(expectation.fps))
    tags = {
        "range": context.color_range, "primaries": context.color_primaries, "transfer": context.color_trc,
        "matrix": context.colorspace,
    }  # fmt: skip
    for name, value in tags.items():
        report.require(f"colour {name}", int(value), _TAGS[name])


def _check_audio(container: InputContainer, expectation: Mp4Expectation, report: Mp4Report) -> None:
    stream = container.streams.audio[0]
    context = stream.codec_context
    report.require("audio codec", context.name, "aac")
    report.require("sample rate", context.sample_rate, expectation.sample_rate)
    report.require("channels", context.layout.nb_channels, expectation.channels)


def _check_timestamps(container: InputContainer, expectation: Mp4Expectation, report: Mp4Report) -> None:
    """Read every packet: frames on the grid without gap, and both streams equally long within one frame."""
    video, audio = container.streams.video[0], container.streams.audio[0]
    times, sound_end = [], Fraction(0)
    for packet in container.demux(video, audio):
        if packet.pts is None or packet.time_base is None:
            continue  # the flush packet at the end
        if packet.is_corrupt:
            report.problems.append(f"{packet.stream.type} packet at {packet.pts} is damaged")
        if packet.stream is video:
            times.append(packet.pts * packet.time_base * expectation.fps)
        else:
            sound_end = max(sound_end, (packet.pts + (packet.duration or 0)) * packet.time_base)
    report.require("frames", len(times), expectation.frames)
    if sorted(times) != [Fraction(index) for index in range(len(times))]:
        report.problems.append(
            f"timestamps are not 0, 1, 2, … {len(times) - 1} frames at {expectation.fps} fps"
        )
    frame = Fraction(1, expectation.fps)
    picture = len(times) * frame
    samples = round(sound_end * expectation.sample_rate)
    report.facts |= {
        "video seconds": float(picture),
        "audio seconds": float(sound_end),
        "audio samples": samples,
    }
    if abs(sound_end - picture) > frame:
        word = "short" if sound_end < picture else "long"
        report.problems.append(
            f"audio is too {word}: {float(sound_end):.3f} s of sound, {float(picture):.3f} s of picture"
        )
    if expectation.audio_samples is not None and abs(samples - expectation.audio_samples) > _AAC_FRAME:
        report.problems.append(
            f"audio samples: {samples}, expected {expectation.audio_samples} ± {_AAC_FRAME}"
        )


def _check_content(path: Path, expectation: Mp4Expectation, report: Mp4Report) -> None:
    import numpy as np

    luma, spread, samples = _decode(path)
    report.require("decoded frames", len(luma), report.facts["frames"])
    brightness = analyse_brightness(luma)
    deviation = float(max(spread.max(initial=0.0), luma.std() if len(luma) else 0.0))
    rms = float(np.sqrt(np.mean(samples.astype(np.float64) ** 2))) if samples.size else 0.0
    report.facts |= {
        "video deviation": deviation, "audio rms": rms, "audio peak": float(np.abs(samples).max(initial=0.0)),
        "luma": [round(value, 3) for value in brightness.luma], "spikes": list(brightness.spikes),
        "seam ratio": brightness.seam_ratio,
    }  # fmt: skip
    if deviation < _MIN_STD:
        report.problems.append("the picture is blank: no variance")
    if not np.isfinite(samples).all():
        report.problems.append("the sound is not finite")
    if rms < _MIN_RMS and not expectation.allow_silence:
        report.problems.append("the sound is silent")
    if expectation.forbid_spikes and brightness.spikes:
        report.problems.append(f"single frames differ from their neighbours: {list(brightness.spikes)}")
    if expectation.clicks:
        clicks = find_clicks(samples, expectation.sample_rate)
        report.problems += sync_problems(find_flashes(luma), clicks, expectation.fps, expectation.sample_rate)


def _decode(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float32]]:
    """Mean and deviation of luma per frame, and all samples from presentation time 0 on, [channels, samples]."""
    import av
    import numpy as np

    means, spreads, blocks = [], [], []
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        for context in (video.codec_context, audio.codec_context):
            context.options = {"err_detect": "explode"}  # damage is an error, not something to conceal
        for frame in container.decode(video, audio):
            if isinstance(frame, av.VideoFrame):
                plane = frame.planes[0]
                luma = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)[
                    :, : plane.width
                ]
                means.append(float(luma.mean()))
                spreads.append(float(luma.std()))
            elif isinstance(frame, av.AudioFrame) and frame.pts is not None and frame.time_base is not None:
                block = frame.to_ndarray().astype(np.float32, copy=False)
                early = -round(frame.pts * frame.time_base * frame.sample_rate)
                blocks.append(block[:, max(0, early) :])
    sound = np.concatenate(blocks, axis=1) if blocks else np.zeros((1, 0), np.float32)
    return np.array(means), np.array(spreads), sound


def main(argv: Sequence[str] | None = None) -> int:
    """Command `check-mp4`: 0 if the file is good, 1 with every problem on its own line otherwise."""
    parser = argparse.ArgumentParser(prog="coldframe check-mp4", description="Check a finished video file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--frames", type=int, help="exact number of frames")
    parser.add_argument("--size", help="WxH in pixels")
    parser.add_argument("--fps", type=int, default=24)
    parser.add_argument("--sample-rate", type=int, default=32_000)
    parser.add_argument("--silent", action="store_true", help="silence is allowed")
    parser.add_argument("--clicks", action="store_true", help="clicks must coincide with flashes")
    parser.add_argument("--no-spikes", action="store_true", help="no single bright or dark frame")
    parser.add_argument("--no-decode", action="store_true", help="structure only")
    parser.add_argument("--json", action="store_true", help="print the whole report")
    options = parser.parse_args(argv)
    sides = (options.size or "x").split("x")
    if options.size and not (len(sides) == 2 and all(side.isdecimal() for side in sides)):
        parser.error(f"--size {options.size!r}: expected WxH")
    width, height = (int(side) if side else None for side in sides[:2])
    expectation = Mp4Expectation(
        width=width, height=height, frames=options.frames, fps=options.fps, sample_rate=options.sample_rate,
        allow_silence=options.silent, clicks=options.clicks, forbid_spikes=options.no_spikes,
    )  # fmt: skip
    report = check_mp4(options.file, expectation, decode=not options.no_decode)
    text = (
        json.dumps(dataclasses.asdict(report), ensure_ascii=False)
        if options.json
        else "\n".join(report.problems)
    )
    sys.stdout.write((text or f"{options.file}: good") + "\n")
    return 0 if report.ok else 1
