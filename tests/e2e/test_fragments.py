"""A video that can be watched while it is made, from real workers: over the protocol, over HTTP and on a pipe."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest

from runtime.media.check import Mp4Expectation, check_mp4
from runtime.media.fragments import boxes_of
from tests.fakes.service import ROOT, ServiceProcess

FRAMES, UNITS = 243, 14
REQUEST = {"prompt": "rain", "size": "64x64", "num_frames": FRAMES, "seed": 3, "schedule": "base-3"}
COMMAND = [sys.executable, "-m", "runtime.cli", "generate"]
OPTIONS = [
    "--prompt",
    "rain",
    "--size",
    "64x64",
    "--num-frames",
    "56",
    "--schedule",
    "base-3",
    "--device",
    "cpu",
]


class Client:
    """Speaks the protocol to one worker process."""

    def __init__(self, bundle: Path) -> None:
        line = [sys.executable, "-m", "runtime.worker", "--bundle", str(bundle), "--device", "cpu"]
        environ = {**os.environ, "COLDFRAME_ENCODER_PROCESSES": "1"}
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environ
        )

    def generate(self, job: str, folder: Path, **fields: Any) -> tuple[Path, Path]:
        """Ask for a video; where it and its fragments go."""
        files = folder / f"{job}.mp4", folder / f"{job}-live.mp4"
        names = {"output": str(files[0]), "fragments": str(files[1])}
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"op": "generate", "job": job, "request": {**REQUEST, **fields}, **names}) + "\n"
        )
        return files

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait(20)
            self.process.stdout.close()


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[Client]:
    client = Client(bundle)
    yield client
    client.close()


def frame_hashes(path: Path) -> list[str]:
    with av.open(str(path)) as container:
        return [
            hashlib.sha256(frame.to_ndarray().tobytes()).hexdigest() for frame in container.decode(video=0)
        ]


def assert_same_video(stream: Path, plain: Path, frames: int) -> None:
    """Both whole and valid, with the same pictures; ffmpeg and ffprobe read the stream without a word."""
    for path in (stream, plain):
        report = check_mp4(path, Mp4Expectation(64, 64, frames, allow_silence=True))
        assert report.problems == []
    assert frame_hashes(stream) == frame_hashes(plain)
    for program, options in (
        ("ffmpeg", ["-xerror", "-i", str(stream), "-f", "null", "-"]),
        ("ffprobe", [str(stream)]),
    ):
        if shutil.which(program) is not None:
            read = subprocess.run(
                [program, "-v", "warning", *options], capture_output=True, text=True, check=True
            )
            assert read.stderr == ""


def test_fragments_come_before_the_last_unit_is_decoded(client: Client, tmp_path: Path) -> None:
    """One encoder and three slots: unit 14 cannot be taken before unit 11 has been encoded, and the muxer, which has
    its own thread, is at most a few units behind."""
    plain, stream = client.generate("video", tmp_path)
    events: list[dict[str, Any]] = []
    watched: list[int] = []
    for event in client.events():
        events.append(event)
        if event["event"] == "fragment" and not watched:  # what is there plays, whatever is still to come
            (tmp_path / "part.mp4").write_bytes(stream.read_bytes()[: event["bytes"]])
            watched.append(len(frame_hashes(tmp_path / "part.mp4")))
        if event["event"] in ("done", "error"):
            break
    assert events[-1]["event"] == "done", events[-1]
    kinds = [event["event"] for event in events]
    decoded = [event["frames"] for event in events if event["event"] == "frames"]
    assert decoded == [17 * unit for unit in range(1, UNITS)] + [FRAMES]
    last = next(i for i, event in enumerate(events) if event.get("frames") == FRAMES)
    assert kinds.index("fragment") < last
    sizes = [event["bytes"] for event in events if event["event"] == "fragment"]
    assert len(sizes) == UNITS
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == stream.stat().st_size
    assert watched == [17]
    assert_same_video(stream, plain, FRAMES)


def test_a_cancelled_job_takes_its_fragments_with_it(client: Client, tmp_path: Path) -> None:
    client.generate("video", tmp_path, size="128x128", num_frames=362)
    assert client.process.stdin is not None
    events = client.events()
    next(event for event in events if event["event"] == "fragment")
    client.process.stdin.write(json.dumps({"op": "cancel", "job": "video"}) + "\n")
    ending = next(event["event"] for event in events if event["event"] in ("done", "error", "cancelled"))
    assert ending == "cancelled"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_worker_leaves_whole_fragments_and_no_video(bundle: Path, tmp_path: Path) -> None:
    client = Client(bundle)
    try:
        _, stream = client.generate("video", tmp_path)
        size = next(event["bytes"] for event in client.events() if event["event"] == "fragment")
        client.process.kill()
        client.process.wait(20)
    finally:
        client.close()
    assert [path.name for path in tmp_path.iterdir()] == [stream.name]
    boxes = [kind for kind, _ in boxes_of(stream.read_bytes()[:size])]
    assert boxes == [b"ftyp", b"moov", b"moof", b"mdat"]


def test_a_file_that_is_in_the_way_is_an_error_of_the_job(client: Client, tmp_path: Path) -> None:
    (tmp_path / "video-live.mp4").write_bytes(b"somebody else's")
    client.generate("video", tmp_path)
    error = next(event for event in client.events() if event["event"] == "error")["error"]
    assert (error["kind"], error["where"]) == ("bad_request", "fragments")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"somebody else's"]


class RealService(ServiceProcess):
    """`coldframe serve` with the real worker on the tiny directory."""

    bundle: Path

    def command(self, bundle: Path) -> list[str]:
        line = [sys.executable, "-m", "runtime.cli", "serve", "--bundle", str(self.bundle), "--port", "0"]
        return [*line, "--state", str(self.state)]

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        environ = super()._environment(extra)
        del environ["COLDFRAME_SERVE_WORKER_COMMAND"]
        return {**environ, "OMP_NUM_THREADS": "1", "COLDFRAME_DEVICE": "cpu"}


@pytest.mark.slow
def test_the_service_streams_what_the_worker_makes(bundle: Path, tmp_path: Path) -> None:
    RealService.bundle = bundle
    service = RealService(tmp_path / "service")
    try:
        video = service.create("rain", size="64x64", num_frames=FRAMES, seed=3, num_evaluations=3)["id"]
        url = f"/v1/videos/{video}/content"
        (tmp_path / "stream.mp4").write_bytes(service.client.get(url, params={"variant": "live"}).content)
        assert service.finished(video)["status"] == "completed"
        (tmp_path / "plain.mp4").write_bytes(service.client.get(url).content)
    finally:
        service.close()
    assert b"moof" in (tmp_path / "stream.mp4").read_bytes()
    assert b"moof" not in (tmp_path / "plain.mp4").read_bytes()
    assert_same_video(tmp_path / "stream.mp4", tmp_path / "plain.mp4", FRAMES)


def run(bundle: Path, folder: Path, target: str, **options: Any) -> subprocess.Popen[bytes]:
    line = [*COMMAND, str(bundle), *OPTIONS, "--output", str(folder / "plain.mp4"), "--fragmented", target]
    return subprocess.Popen(line, stderr=subprocess.PIPE, cwd=ROOT, **options)


@pytest.mark.slow
def test_generate_writes_a_file_that_grows(bundle: Path, tmp_path: Path) -> None:
    child = run(bundle, tmp_path, str(tmp_path / "stream.mp4"), stdout=subprocess.PIPE)
    said, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors
    assert b"56 frames" in said
    assert_same_video(tmp_path / "stream.mp4", tmp_path / "plain.mp4", 56)


@pytest.mark.parametrize("kind", ["standard output", pytest.param("named pipe", marks=pytest.mark.slow)])
def test_generate_writes_to_a_pipe(bundle: Path, tmp_path: Path, kind: str) -> None:
    """Standard output carries the video and nothing else."""
    received: list[bytes] = []
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    if kind == "named pipe":
        reader.start()
        child = run(bundle, tmp_path, str(pipe))
        _, errors = child.communicate(timeout=100)
        reader.join(20)
    else:
        child = run(bundle, tmp_path, "-", stdout=subprocess.PIPE)
        said, errors = child.communicate(timeout=100)
        received.append(said)
        assert b"56 frames" in errors
    assert child.returncode == 0, errors
    (tmp_path / "stream.mp4").write_bytes(received[0])
    assert_same_video(tmp_path / "stream.mp4", tmp_path / "plain.mp4", 56)


def test_a_reader_that_leaves_does_not_take_the_video_with_it(bundle: Path, tmp_path: Path) -> None:
    child = run(bundle, tmp_path, "-", stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors
    assert check_mp4(tmp_path / "plain.mp4", Mp4Expectation(64, 64, 56, allow_silence=True)).problems == []
    assert b"the reader of the video left" in errors


@pytest.mark.slow
def test_an_interrupted_generate_leaves_neither(bundle: Path, tmp_path: Path) -> None:
    child = run(bundle, tmp_path, str(tmp_path / "stream.mp4"))
    stream = tmp_path / "stream.mp4"
    while child.poll() is None and not stream.exists():
        os.sched_yield()
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 130, errors
    assert list(tmp_path.iterdir()) == []
