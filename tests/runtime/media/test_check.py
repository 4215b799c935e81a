"""Broken and wrong files must fail, each with its own message; good ones must not."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from runtime.media import signals
from runtime.media.boxes import top_level_boxes
from runtime.media.check import Mp4Expectation, check_mp4, main
from runtime.media.encode import Mp4Writer
from tests.runtime.media.clips import load_case, moving_frames, tone

GOOD = Mp4Expectation(width=48, height=32, frames=41, audio_samples=round(41 * 32_000 / 24))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "clip.mp4"
    with Mp4Writer(path, 48, 32, frames=41, threads=1) as writer:
        writer.add_frames(moving_frames(41))
        writer.add_sound(tone(41))
        writer.finish()
    return path


def raw_mp4(
    path: Path, *, frames: int = 41, codec: str = "libx264", pix_fmt: str = "yuv420p", rate: Fraction | int = 24,
    tagged: bool = True, sound: int | None = 54_667, sample_rate: int = 32_000, layout: str = "stereo",
    faststart: bool = True, drop: int | None = None, amplitude: float = 0.3, picture: np.ndarray | None = None,
    extra_video: bool = False,
) -> Path:  # fmt: skip
    """An MP4 made without the writer, wrong in one chosen way."""
    content = moving_frames(frames) if picture is None else picture
    with av.open(
        str(path), "w", format="mp4", options={"movflags": "+faststart"} if faststart else {}
    ) as container:
        video = container.add_stream(codec, rate=rate)
        video.width, video.height, video.pix_fmt = 48, 32, pix_fmt
        context = video.codec_context
        if tagged:
            context.color_range = context.colorspace = context.color_primaries = context.color_trc = 1
        other = container.add_stream("libx264", rate=24) if extra_video else None
        if other is not None:
            other.width, other.height, other.pix_fmt = 48, 32, "yuv420p"
        audio = container.add_stream("aac", rate=sample_rate, layout=layout) if sound is not None else None
        for index, rgb in enumerate(content):
            if index != drop:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
                frame.pts, frame.time_base = index, Fraction(1) / rate
                container.mux(video.encode(frame))
                if other is not None:
                    container.mux(other.encode(frame))
        for stream in filter(None, (video, other)):
            container.mux(stream.encode())
        if audio is not None:
            samples = tone(1000, sample_rate, amplitude)[:, :sound]
            for start in range(0, sound, 1024):
                block = np.ascontiguousarray(samples[: 2 if layout == "stereo" else 1, start : start + 1024])
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
                frame.sample_rate, frame.pts, frame.time_base = sample_rate, start, Fraction(1, sample_rate)
                container.mux(audio.encode(frame))
            container.mux(audio.encode())
    return path


def test_good_files_pass_both_ways(good: Path, tmp_path: Path) -> None:
    report = check_mp4(good, GOOD)
    assert report.problems == []
    assert report.ok
    assert report.facts["boxes"][:2] == ["ftyp", "moov"]
    assert report.facts["frame rate"] == "24"
    assert report.facts["audio rms"] == pytest.approx(0.3 / 2**0.5, rel=0.02)
    json.dumps(report.facts)
    assert check_mp4(raw_mp4(tmp_path / "raw.mp4"), GOOD).problems == []


WRONG = {
    "index at the end": ({"faststart": False}, "moov_first: False"),
    "no colour tags": ({"tagged": False}, "colour matrix: 2, expected 1"),
    "not 4:2:0": ({"pix_fmt": "yuv444p"}, "pixel format: yuv444p"),
    "another codec": ({"codec": "mpeg4"}, "video codec: mpeg4"),
    "25 fps": ({"rate": 25}, "frame rate: 25, expected 24"),
    "23.976 fps": ({"rate": Fraction(24000, 1001)}, "frame rate: 24000/1001"),
    "one frame missing": ({"frames": 40, "sound": 53_333}, "frames: 40, expected 41"),
    "hole in the middle": ({"drop": 20}, "timestamps are not 0, 1, 2"),
    "no sound": ({"sound": None}, "audio streams: 0"),
    "sound too short": ({"sound": 40_000}, "audio is too short"),
    "sound too long": ({"sound": 64_000}, "audio is too long"),
    "mono": ({"layout": "mono"}, "channels: 1, expected 2"),
    "44.1 kHz": ({"sample_rate": 44_100, "sound": 75_338}, "sample rate: 44100"),
    "silent": ({"amplitude": 0.0}, "the sound is silent"),
    "blank": ({"picture": np.full((41, 32, 48, 3), 90, np.uint8)}, "picture is blank"),
    "second picture stream": ({"extra_video": True}, "video streams: 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_fail(name: str, tmp_path: Path) -> None:
    fields, message = WRONG[name]
    report = check_mp4(raw_mp4(tmp_path / "clip.mp4", **fields), GOOD)
    assert any(message in problem for problem in report.problems), report.problems


def test_all_problems_are_listed(tmp_path: Path) -> None:
    report = check_mp4(
        raw_mp4(tmp_path / "clip.mp4", faststart=False, tagged=False, sound=20_000, frames=30), GOOD
    )
    text = "; ".join(report.problems)
    assert all(part in text for part in ("moov_first", "colour range", "frames: 30", "audio is too short"))


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_cut_files_fail(keep: float, good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    path = tmp_path / "cut.mp4"
    path.write_bytes(data[: int(len(data) * keep)])
    assert not check_mp4(path, GOOD).ok
    assert not check_mp4(path, GOOD, decode=False).ok


def test_zeroed_media_data_fails(good: Path, tmp_path: Path) -> None:
    boxes, broken = top_level_boxes(good)
    assert broken is None
    mdat = next(box for box in boxes if box.kind == "mdat")
    data = bytearray(good.read_bytes())
    middle = (mdat.start + mdat.end) // 2
    data[middle : middle + 400] = bytes(400)
    (tmp_path / "bad.mp4").write_bytes(data)
    assert not check_mp4(tmp_path / "bad.mp4", GOOD).ok


@pytest.mark.parametrize(
    "data", [b"", b"<html>", b"\0" * 64, b"\0\0\0\x08moov\0\0\0\x08mdat", b"\0\0\0\x01mdat\0\0\0\0\0\0\0\x01"]
)
def test_other_files_fail_without_raising(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_bytes(data)
    assert not check_mp4(tmp_path / "x.mp4", Mp4Expectation()).ok
    assert not check_mp4(tmp_path / "absent.mp4", Mp4Expectation()).ok


def test_shifted_clicks_fail(tmp_path: Path) -> None:
    frames, audio = load_case("M03")
    expectation = Mp4Expectation(frames=141, clicks=True)
    for shift, good in ((0, True), (256, True), (640, False), (-640, False)):
        path = tmp_path / f"{shift}.mp4"
        with Mp4Writer(path, 128, 96, frames=len(frames), threads=1) as writer:
            writer.add_frames(frames)
            writer.add_sound(np.roll(audio, shift, axis=1))
            writer.finish()
        assert check_mp4(path, expectation).ok == good, shift


def test_one_bright_frame_is_flagged(tmp_path: Path) -> None:
    """C67: an isolated frame brighter than its neighbours."""
    frames = moving_frames(60).copy()
    frames[31] = np.minimum(frames[31].astype(int) + 25, 255)
    with Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=60, threads=1) as writer:
        writer.add_frames(frames)
        writer.add_sound(tone(60))
        writer.finish()
    report = check_mp4(tmp_path / "clip.mp4", Mp4Expectation(forbid_spikes=True))
    assert report.facts["spikes"] == [31]
    assert any("[31]" in problem for problem in report.problems)
    assert check_mp4(tmp_path / "clip.mp4", Mp4Expectation()).ok


@pytest.mark.parametrize(
    ("luma", "spikes"),
    [
        (np.linspace(40, 200, 50), []),  # a fade
        (np.repeat([60.0, 180.0], 20), []),  # a cut
        (np.r_[np.full(10, 90.0), 120, np.full(10, 90.0)], [10]),
        (np.r_[np.full(10, 90.0), 60, np.full(10, 90.0)], [10]),
        (np.r_[np.full(10, 90.0), 92, np.full(10, 90.0)], []),  # invisible
        (90 + 20 * np.sin(np.arange(60)), []),  # flicker everywhere is no single frame
        (np.array([1.0, 200.0]), []),
    ],
)  # fmt: skip
def test_spike_rule(luma: np.ndarray, spikes: list[int]) -> None:
    assert signals.find_spikes(luma) == spikes


def test_seams_are_compared_with_other_steps() -> None:
    luma = np.cumsum([0.1] * 60)
    assert signals.analyse_brightness(luma).seam_ratio == pytest.approx(1)
    luma[17:] += 3
    assert signals.analyse_brightness(luma).seam_ratio > 10


def test_command(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(good), "--frames", "41", "--size", "48x32"]) == 0
    assert capsys.readouterr().out == f"{good}: good\n"
    assert main([str(good), "--frames", "42", "--size", "64x32", "--json", "--no-decode"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == ["width: 48, expected 64", "frames: 41, expected 42"]
    assert main([str(good), "--clicks"]) == 1
    assert "flashes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(good), "--size", "48"])
