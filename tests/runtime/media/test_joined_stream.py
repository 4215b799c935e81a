"""Units that were encoded one by one, joined: what players and other programs make of the file and of the fragments."""

from __future__ import annotations

import hashlib
import io
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import av
import numpy as np
import pytest

from loader.errors import InternalError
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.media.encode import Mp4Writer
from runtime.media.encoder_pool import EncoderPool
from runtime.media.fragments import boxes_of
from tests.runtime.media.clips import moving_frames, tone

WIDTH, HEIGHT = 96, 64
UNITS = {"one": [22], "two": [17, 22], "seven": [17] * 6 + [22], "ten seconds": [17] * 13 + [22]}
HAS_FFMPEG = shutil.which("ffmpeg") and shutil.which("ffprobe")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(2) as pool:
        yield pool


def write(
    path: Path, units: list[int], pool: EncoderPool | None = None, receiver: Any = None, **fields: Any
) -> np.ndarray:
    frames = moving_frames(sum(units), HEIGHT, WIDTH)
    fields = {"threads": 1, **fields}
    with Mp4Writer(
        path, WIDTH, HEIGHT, frames=len(frames), encoders=pool, receiver=receiver, **fields
    ) as writer:
        writer.add_sound(tone(len(frames)))
        start = 0
        for count in units:
            writer.add_frames(frames[start : start + count])
            start += count
        writer.finish()
    return frames


def frame_hashes(path: Path) -> list[str]:
    with av.open(str(path)) as container:
        return [
            hashlib.sha256(frame.to_ndarray().tobytes()).hexdigest() for frame in container.decode(video=0)
        ]


@pytest.mark.parametrize("preset", ["ultrafast", "veryfast"])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_processes_in_parallel_make_the_file_of_one_encoder(
    units: list[int], preset: str, pool: EncoderPool, tmp_path: Path
) -> None:
    write(tmp_path / "one.mp4", units, preset=preset)
    write(tmp_path / "many.mp4", units, pool, preset=preset)
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "many.mp4").read_bytes()
    report = check_mp4(tmp_path / "many.mp4", Mp4Expectation(WIDTH, HEIGHT, sum(units)))
    assert report.problems == []


def test_frames_equal_those_of_one_session_with_keyframes_at_the_same_places(
    pool: EncoderPool, tmp_path: Path
) -> None:
    """Lossless, so that no rate control carries over from unit to unit: the joined stream loses and mixes nothing."""
    units = UNITS["two"] + [17]
    frames = write(tmp_path / "joined.mp4", units, pool, crf=0)
    with av.open(str(tmp_path / "single.mp4"), "w") as container:
        stream: Any = container.add_stream(
            "libx264", rate=24, options={"crf": "0", "preset": "ultrafast", "bf": "0"}
        )
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for index, rgb in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=1, src_color_range=2, dst_color_range=1,
                interpolation=av.video.reformatter.Interpolation.BICUBIC | av.video.reformatter.Interpolation.ACCURATE_RND,
            )  # fmt: skip
            frame.pict_type = 1 if index in (0, 17, 39) else 0
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert frame_hashes(tmp_path / "joined.mp4") == frame_hashes(tmp_path / "single.mp4")


def test_every_unit_begins_with_a_keyframe_and_no_time_drifts(pool: EncoderPool, tmp_path: Path) -> None:
    units = UNITS["ten seconds"]
    write(tmp_path / "clip.mp4", units, pool)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        packets = [p for p in container.demux(video) if p.pts is not None and p.time_base is not None]
        assert [p.pts * p.time_base for p in packets] == [Fraction(i, 24) for i in range(243)]
        assert [i for i, p in enumerate(packets) if p.is_keyframe] == [17 * u for u in range(14)]
        assert all(p.pts == p.dts for p in packets)
        assert video.average_rate == 24
        assert audio.duration is not None
        assert audio.time_base is not None
        assert abs(audio.duration * audio.time_base - Fraction(243, 24)) <= Fraction(1, 32_000)


@pytest.mark.parametrize("second", range(10))
def test_seeking_to_any_second_gives_its_frame(second: int, pool: EncoderPool, tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", UNITS["ten seconds"], pool)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        video = container.streams.video[0]
        assert video.time_base is not None
        container.seek(round(second / video.time_base), stream=video)
        decoded = [(frame.time, frame) for frame in container.decode(video)]
    times = [time for time, _ in decoded]
    assert times[0] <= second
    assert times[0] == pytest.approx(max(17 * u for u in range(14) if 17 * u <= 24 * second) / 24)
    found = next(frame for time, frame in decoded if time is not None and time >= second - 1e-6)
    expected = moving_frames(243, HEIGHT, WIDTH)[24 * second]
    assert np.abs(found.to_ndarray(format="rgb24").astype(int) - expected).mean() < 2.5


@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_fragments_are_the_same_clip(units: list[int], pool: EncoderPool, tmp_path: Path) -> None:
    stream = io.BytesIO()
    write(tmp_path / "plain.mp4", units, pool, stream)
    (tmp_path / "stream.mp4").write_bytes(stream.getvalue())
    report = check_mp4(tmp_path / "stream.mp4", Mp4Expectation(WIDTH, HEIGHT, sum(units)))
    assert report.problems == []
    assert report.facts["audio seconds"] == pytest.approx(sum(units) / 24, abs=1 / 32_000)
    assert frame_hashes(tmp_path / "stream.mp4") == frame_hashes(tmp_path / "plain.mp4")
    kinds = [kind for kind, _ in boxes_of(stream.getvalue())]
    assert kinds == [b"ftyp", b"moov", *[b"moof", b"mdat"] * len(units)]


class Gate:
    """A receiver that tells when the first fragment is there."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.first = threading.Event()

    def write(self, data: bytes, /) -> None:
        self.data += data
        self.first.set()


def test_the_first_fragment_plays_before_the_second_unit_exists(pool: EncoderPool, tmp_path: Path) -> None:
    frames = moving_frames(39, HEIGHT, WIDTH)
    gate = Gate()
    with Mp4Writer(tmp_path / "c.mp4", WIDTH, HEIGHT, frames=39, encoders=pool, receiver=gate) as writer:
        writer.add_sound(tone(39))
        writer.add_frames(frames[:17])
        assert gate.first.wait(60)
        with av.open(io.BytesIO(bytes(gate.data))) as container:
            assert len(list(container.decode(video=0))) == 17
        writer.add_frames(frames[17:])
        writer.finish()


def test_a_receiver_that_goes_away_ends_the_clip_and_leaves_nothing(
    pool: EncoderPool, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with (
        os.fdopen(writing, "wb", buffering=0) as receiver,
        pytest.raises(InternalError, match="stream: the receiver of the video is gone"),
    ):
        write(tmp_path / "clip.mp4", UNITS["two"], pool, receiver)
    assert list(tmp_path.iterdir()) == []


def test_a_second_clip_of_another_size_uses_the_same_processes(pool: EncoderPool, tmp_path: Path) -> None:
    write(tmp_path / "small.mp4", [22], pool)
    frames = moving_frames(124, 128, 192)
    with Mp4Writer(tmp_path / "large.mp4", 192, 128, frames=124, encoders=pool, threads=1) as writer:
        writer.add_sound(tone(124))
        writer.add_frames(frames)  # one unit, larger than what was reserved
        assert writer.finish().frames == 124
    assert pool.replaced == 0


def test_a_unit_of_one_frame_among_others_is_refused(pool: EncoderPool, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="a unit of one frame among others"):
        write(tmp_path / "clip.mp4", [17, 1], pool)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not HAS_FFMPEG, reason="ffmpeg and ffprobe are not installed")
@pytest.mark.parametrize("kind", ["plain", "stream"])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_another_build_of_ffmpeg_reads_it_without_a_word(
    units: list[int], kind: str, pool: EncoderPool, tmp_path: Path
) -> None:
    with (tmp_path / "stream.mp4").open("wb") as receiver:
        write(tmp_path / "plain.mp4", units, pool, receiver)
    path = tmp_path / f"{kind}.mp4"
    quiet = ["-v", "warning"]
    decoded = subprocess.run(
        ["ffmpeg", *quiet, "-xerror", "-i", path, "-f", "null", "-"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert decoded.stderr == ""
    probed = subprocess.run(
        ["ffprobe", *quiet, "-count_frames", "-show_streams", "-of", "json", path],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert probed.stderr == ""
    video, audio = json.loads(probed.stdout)["streams"]
    assert video["avg_frame_rate"] == video["r_frame_rate"] == "24/1"
    assert int(video["nb_read_frames"]) == sum(units)
    assert float(video["duration"]) == pytest.approx(sum(units) / 24, abs=1e-6)
    assert float(audio["duration"]) == pytest.approx(sum(units) / 24, abs=1 / 24)
    assert [video[key] for key in ("color_range", "color_space", "color_transfer", "color_primaries")] == [
        "tv", "bt709", "bt709", "bt709",
    ]  # fmt: skip


PAGE = """<!doctype html><video id=v muted src="{name}"></video><script>
const v = document.getElementById('v');
const say = text => fetch('/said?' + encodeURIComponent(text));
v.onerror = () => say('error ' + v.error.code + ' ' + v.error.message);
v.onended = () => say(['ended', v.currentTime, v.videoWidth, v.videoHeight, v.duration].join(' '));
v.play().catch(error => say('refused ' + error));
</script>"""


class PageServer(ThreadingHTTPServer):
    """Serves a folder; what the page says arrives in `said`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__(("127.0.0.1", 0), partial(PageHandler, directory=str(folder)))


class PageHandler(SimpleHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if self.path.startswith("/said?"):
            self.server.said.put(unquote(self.path.partition("?")[2]))
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_it_plays_to_its_end_in_a_browser(kind: str, pool: EncoderPool, tmp_path: Path) -> None:
    with (tmp_path / "stream.mp4").open("wb") as receiver:
        write(tmp_path / "plain.mp4", UNITS["two"], pool, receiver)
    (tmp_path / "page.html").write_text(PAGE.format(name=f"{kind}.mp4"))
    assert BROWSER is not None
    with PageServer(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = subprocess.Popen(
            [
                BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server",
                "--autoplay-policy=no-user-gesture-required", f"--user-data-dir={tmp_path / 'profile'}",
                f"http://127.0.0.1:{server.server_port}/page.html",
            ],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            said = server.said.get(timeout=60).split()
        finally:
            browser.terminate()
            browser.wait(20)
            server.shutdown()
    assert said[0] == "ended", said
    assert [int(value) for value in said[2:4]] == [WIDTH, HEIGHT]
    assert float(said[1]) == pytest.approx(39 / 24, abs=1 / 24)  # currentTime went to the end
    assert float(said[4]) == pytest.approx(39 / 24, abs=1 / 24)
