"""Every mux case through the writer, and what the writer leaves behind when something fails."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from loader.errors import CapabilityError, InternalError, RequestError
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.media.encode import Mp4Result, Mp4Writer
from tests.runtime.media.clips import MUX_CASES, expectation_fields, load_case, moving_frames, tone

REFUSED = {"M08": "1 NaN", "M09": "infinite", "M12": "stereo", "M19": "float32"}  # decided: no silent repair


def write(
    path: Path, pictures: np.ndarray, audio: np.ndarray, units: list[int] | None = None, **fields: Any
) -> Mp4Result:
    height, width = pictures.shape[1:3]
    fields = {"frames": len(pictures), "threads": 1, **fields}
    with Mp4Writer(path, width, height, **fields) as writer:
        start = 0
        for count in units or [len(pictures)]:
            writer.add_frames(pictures[start : start + count])
            start += count
        assert start == len(pictures)
        writer.add_sound(audio)
        return writer.finish()


@pytest.mark.parametrize("case", MUX_CASES, ids=[c["id"] for c in MUX_CASES])
def test_case(case: dict[str, Any], tmp_path: Path) -> None:
    frames, audio = load_case(case["id"])
    target = tmp_path / "clip.mp4"
    expect = case["expect"]
    if expect["outcome"] == "reject" or case["id"] in REFUSED:
        with pytest.raises(InternalError) as caught:
            write(target, frames, audio)
        words = expect.get("say") or ["NaN", "stereo", "float32"]
        assert any(word.lower() in str(caught.value).lower() for word in words)
        assert list(tmp_path.iterdir()) == []
        return
    if case["id"] == "M14":  # decided: one frame is a file
        expect = {"frames": 1, "audio_samples": 1333}
        case = {**case, "expect": expect}
    result = write(target, frames, audio, expect.get("encode_in_segments"))
    assert result.frames == expect["frames"] == len(frames)
    assert list(tmp_path.iterdir()) == [target]
    report = check_mp4(target, Mp4Expectation(width=128, height=96, **expectation_fields(case)))
    assert report.problems == []
    assert report.facts["moov_first"]
    assert report.facts["decoded frames"] == len(frames)
    if "video_s" in expect:
        assert report.facts["video seconds"] == pytest.approx(expect["video_s"], abs=1e-6)
        assert result.audio_samples == expect["audio_samples"]


@pytest.mark.parametrize("case_id", ["M08", "M09"])
def test_sound_that_is_not_finite_names_stage_and_count(case_id: str, tmp_path: Path) -> None:
    frames, audio = load_case(case_id)
    bad = int((~np.isfinite(audio)).sum())
    with pytest.raises(InternalError, match=f"audio decoder: .*not finite; found {bad} NaN or infinite"):
        write(tmp_path / "clip.mp4", frames, audio)


def test_overdriven_sound_is_clamped_not_wrapped(tmp_path: Path) -> None:
    """M10: full-scale samples keep their sign."""
    frames, audio = load_case("M10")
    result = write(tmp_path / "clip.mp4", frames, audio)
    assert result.audio_clipped == int((np.abs(audio) > 1).sum()) > 0
    assert result.audio_peak == pytest.approx(float(np.abs(audio).max()))
    decoded = decode_sound(tmp_path / "clip.mp4")[:, : audio.shape[1]]
    # AAC overshoots a hard-clipped wave by some tenths; a wrapped sample would be off by about 2
    assert np.abs(decoded - np.clip(audio, -1, 1)).max() < 0.8


def decode_sound(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


def decode_pictures(path: Path) -> np.ndarray:
    """RGB by the file's own tags."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_colours_survive_with_the_tagged_matrix(tmp_path: Path) -> None:
    """M17: eight bars, centre of each bar; decoded with the matrix and range that the file names."""
    frames, audio = load_case("M17")
    write(tmp_path / "clip.mp4", frames, audio)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        context = container.streams.video[0].codec_context
        tags = (context.color_range, context.colorspace, context.color_primaries, context.color_trc)
    assert [int(tag) for tag in tags] == [1, 1, 1, 1]
    decoded = decode_pictures(tmp_path / "clip.mp4")
    bars = slice(8, 128, 16)
    error = np.abs(decoded[:, 20:80, bars].astype(int) - frames[:, 20:80, bars])
    assert error.max() <= 14
    assert error.mean() < 2


def test_picture_order_and_content(tmp_path: Path) -> None:
    frames = moving_frames(45)
    write(tmp_path / "clip.mp4", frames, tone(45), [20, 25])
    decoded = decode_pictures(tmp_path / "clip.mp4").astype(float)
    assert decoded.shape == frames.shape
    # crf 18 on a smooth gradient; a frame out of place would be off by more than 3 grey levels
    assert np.abs(decoded - frames).mean(axis=(1, 2, 3)).max() < 2.5


def test_sound_starts_at_the_first_sample(tmp_path: Path) -> None:
    audio = np.zeros((2, 64_000), dtype=np.float32)
    audio[0, 3200:3360], audio[1, 32_000:32_160] = 0.8, -0.8
    write(tmp_path / "clip.mp4", moving_frames(48), audio)
    decoded = decode_sound(tmp_path / "clip.mp4")
    for channel, onset in ((0, 3200), (1, 32_000)):
        first = int(np.flatnonzero(np.abs(decoded[channel]) > 0.4)[0])
        assert abs(first - onset) <= 32, channel  # 1 ms


def test_frames_may_be_reused_after_adding(tmp_path: Path) -> None:
    frames = moving_frames(34)
    buffer = np.empty_like(frames[:17])
    with Mp4Writer(tmp_path / "a.mp4", 48, 32, frames=34, threads=1) as writer:
        for start in (0, 17):
            buffer[:] = frames[start : start + 17]
            writer.add_frames(buffer)
            buffer[:] = 0
        writer.add_sound(tone(34))
        writer.finish()
    write(tmp_path / "b.mp4", frames, tone(34), [17, 17])
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_leaving_early_removes_everything(tmp_path: Path) -> None:
    with Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=40) as writer:
        writer.add_frames(moving_frames(20))
        assert not (tmp_path / "clip.mp4").exists()
    assert list(tmp_path.iterdir()) == []
    writer.abort()
    with pytest.raises(InternalError, match="after the end"):
        writer.add_frames(moving_frames(1))
    with pytest.raises(InternalError, match="finished twice"):
        writer.finish()
    with pytest.raises(InternalError, match="after the end"):
        writer.add_sound(tone(40))


def test_an_error_inside_the_block_removes_everything_and_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "clip.mp4"
    target.write_bytes(b"older")

    def fail() -> None:
        with Mp4Writer(target, 48, 32, frames=20) as writer:
            writer.add_frames(moving_frames(20))
            raise KeyError("decoder")

    with pytest.raises(KeyError):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]
    assert target.read_bytes() == b"older"
    write(target, moving_frames(5), tone(5))
    assert target.read_bytes() != b"older"


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((2, 32, 48, 4), np.uint8), "uint8"), (np.zeros((2, 3, 32, 48), np.uint8), "wrong frames"),
        (np.zeros((32, 48, 3), np.uint8), "wrong frames"), (np.zeros((2, 32, 48, 3), np.float32), "float32"),
        (np.zeros((2, 48, 32, 3), np.uint8), r"\[F, 32, 48, 3\]"),
    ],
)  # fmt: skip
def test_wrong_frames_are_refused(frames: np.ndarray, message: str, tmp_path: Path) -> None:
    with (
        Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=2) as writer,
        pytest.raises(InternalError, match=message),
    ):
        writer.add_frames(frames)
    assert list(tmp_path.iterdir()) == []


def test_blank_pictures_and_wrong_counts_fail(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="one colour"):
        write(tmp_path / "clip.mp4", np.zeros((24, 32, 48, 3), np.uint8), tone(24))
    with pytest.raises(InternalError, match=r"wrong number of frames; found 20; allowed: 22"):
        write(tmp_path / "clip.mp4", moving_frames(20), tone(22), frames=22)
    with (
        Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=22) as writer,
        pytest.raises(InternalError, match="found 0"),
    ):
        writer.finish()
    with Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=20) as writer:
        writer.add_frames(moving_frames(20))
        with pytest.raises(InternalError, match="no sound"):
            writer.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("given", "stored"), [(16_000, 16_000), (44_100, 44_100), (160, 32_000)])
def test_sample_rates(given: int, stored: int, tmp_path: Path) -> None:
    """A rate that AAC does not have (small test models run at 160 Hz) is brought to 32 kHz."""
    with Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=24, threads=1) as writer:
        writer.add_sound(tone(24, given), given)
        writer.add_frames(moving_frames(24))
        result = writer.finish()
    assert (result.sample_rate, result.audio_samples) == (stored, stored)
    assert check_mp4(tmp_path / "clip.mp4", Mp4Expectation(sample_rate=stored, frames=24)).problems == []


def test_targets_that_cannot_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written"):
        Mp4Writer(tmp_path / "absent" / "clip.mp4", 48, 32, frames=5)
    with pytest.raises(InternalError, match="even"):
        Mp4Writer(tmp_path / "clip.mp4", 47, 32, frames=5)
    assert list(tmp_path.iterdir()) == []


def test_encoder_options_are_tried_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"H\.264 encoder cannot be opened.*warp"):
        Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=5, preset="warp")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_fails_the_clip_and_leaves_nothing(tmp_path: Path) -> None:
    """A file size limit of the process stands for the full disk: writes beyond it fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Mp4Writer(tmp_path / "clip.mp4", 48, 32, frames=48) as writer:
        writer.add_sound(tone(48))
        writer.add_frames(moving_frames(17))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            with pytest.raises(InternalError, match="cannot be written"):
                finish_rest(writer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def finish_rest(writer: Mp4Writer) -> None:
    writer.add_frames(moving_frames(31))
    writer.finish()
