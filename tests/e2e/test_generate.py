"""`coldframe generate` as a user runs it: a fresh process, files in, one MP4 out, clear failures."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime.media.check import check_mp4

SMALL = (
    "--size",
    "64x64",
    "--num-frames",
    "22",
    "--schedule",
    "base-3",
    "--device",
    "cpu",
    "--cpu-threads",
    "1",
)


def coldframe(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "runtime.cli", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=110, check=False, **options)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_to_video_writes_a_valid_file_and_a_timeline(bundle: Path, tmp_path: Path) -> None:
    video, timeline = tmp_path / "v.mp4", tmp_path / "t.json"
    arguments = [
        "--prompt",
        "rain",
        "--seed",
        "5",
        "--output",
        str(video),
        "--timeline",
        str(timeline),
        "--json",
    ]
    done = coldframe("generate", str(bundle), *arguments, *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["seed"], result["width"], result["height"], result["num_frames"]) == (5, 64, 64, 22)
    report = check_mp4(video)
    assert report.problems == []
    trace = json.loads(timeline.read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "i"}
    marks = trace["headline"]
    order = [
        "first_read",
        "torch_ready",
        "conditioner_done",
        "first_dit_entry",
        "first_step_done",
        "mp4_complete",
    ]
    assert [marks[name] for name in order] == sorted(marks[name] for name in order)
    assert timeline.with_suffix(".svg").read_text().startswith("<svg")
    assert left_behind(tmp_path) == ["t.json", "t.svg", "v.mp4"]


def test_first_and_last_frame_are_taken_from_files(bundle: Path, tmp_path: Path) -> None:
    for name, colour in (("a.png", (200, 30, 30)), ("b.jpg", (30, 30, 200))):
        Image.new("RGB", (80, 60), colour).save(tmp_path / name)
    pictures = ["--first-frame", str(tmp_path / "a.png"), "--last-frame", str(tmp_path / "b.jpg")]
    done = coldframe(
        "generate",
        str(bundle),
        "--prompt",
        "x",
        *pictures,
        "--output",
        str(tmp_path / "v.mp4"),
        "--json",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["task"] == "fl2va"
    assert result["rows"]["keyframes"] == 2 * 2 * 2  # two pictures of 64x64 pixels, a row covers 32x32


def test_same_seed_gives_the_same_file(bundle: Path, tmp_path: Path) -> None:
    files = [tmp_path / "1.mp4", tmp_path / "2.mp4"]
    for file in files:
        done = coldframe(
            "generate", str(bundle), "--prompt", "x", "--seed", "1", "--output", str(file), *SMALL
        )
        assert done.returncode == 0, done.stderr
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["--prompt", ""], "prompt", id="empty prompt"),
        pytest.param(["--prompt", "x", "--size", "65x64"], "32", id="size off the grid"),
        pytest.param(
            ["--prompt", "x", "--num-evaluations", "5"], "base-3", id="schedule that is not prepared"
        ),
        pytest.param(["--prompt", "x", "--seed", "-1"], "seed", id="seed out of range"),
        pytest.param(["--prompt", "x", "--first-frame", "absent.png"], "first_frame", id="no such picture"),
        pytest.param(["--prompt", "x", "--output", "absent/v.mp4"], "output", id="no such folder"),
    ],
)
def test_bad_requests_end_with_code_2_and_name_the_field(
    bundle: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = coldframe(
        "generate", str(bundle.resolve()), *arguments, "--device", "cpu", cwd=tmp_path, env=_here()
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped", "manifest"])
def test_damaged_directories_end_with_code_3_and_name_the_file(
    bundle: Path, tmp_path: Path, damage: str
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    victim = copy / "weights" / "transformer-1.safetensors"
    if damage == "truncated":
        os.truncate(victim, victim.stat().st_size - 100)
    elif damage == "missing":
        victim.unlink()
    elif damage == "flipped":
        data = bytearray(victim.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start] ^= 1  # first byte of the first tensor: edge digests cover it
        victim.write_bytes(data)
    else:
        victim = copy / "manifest.json"
        victim.write_bytes(victim.read_bytes()[:-200])
    done = coldframe("generate", str(copy), "--prompt", "x", "--output", str(tmp_path / "v.mp4"), *SMALL)
    assert done.returncode == 3, done.stderr
    assert victim.name in done.stderr
    assert left_behind(tmp_path) == ["bundle"]


def test_sigterm_leaves_no_file_and_no_process(bundle: Path, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "runtime.cli",
        "generate",
        str(bundle),
        "--prompt",
        "x",
        "--size",
        "256x256",
    ]
    line += [
        "--num-frames",
        "362",
        "--output",
        str(tmp_path / "v.mp4"),
        "--device",
        "cpu",
        "--schedule",
        "base-3",
    ]
    child = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not _children(child.pid):  # its reader child is up: it is starting
        os.sched_yield()
    child.send_signal(signal.SIGTERM)
    _, stderr = child.communicate(timeout=100)
    assert child.returncode == 130, stderr
    assert "interrupted" in stderr
    assert left_behind(tmp_path) == []
    assert _group_is_empty(child.pid)


def _group_is_empty(group: int, within_s: float = 30) -> bool:
    """Of living processes: who reaps the dead ones that are left is the container's matter."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        members = [stat for stat in _stats() if stat[2] == str(group) and stat[0] != "Z"]
        if not members:
            return True
        time.sleep(0.01)
    return False


def _stats() -> list[list[str]]:
    """State, parent, process group … of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(path.read_text().rpartition(")")[2].split())
    return found


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []


def _here() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
