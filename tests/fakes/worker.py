"""A worker that speaks the worker protocol without torch and copies or makes a small real MP4.

Run it with the command line of the real one: `python tests/fakes/worker.py --bundle DIR`. What it does with a job
depends on marks in the prompt: `[crash@3]` dies at step 3, `[lostrank@3]` reports
a dead rank there and dies when `$FAKE_GATE` exists, `[damaged@3]` reports a damaged prepared directory (or an error of kind
`$FAKE_DAMAGED_KIND`) there and ends with exit code `$FAKE_DAMAGED_EXIT`, `[hang@3]` stops answering there, `[gate@3]` waits there
until the file `$FAKE_GATE` exists, `[refuse]` answers with a bad request, `[broken]` with an internal error,
`[nofile]` and `[garbage]` are done without a proper file, `[deaf]` ignores cancellation, `[noise]` prints a line that is
not JSON, `[malformed]` sends a step that is not a number. Environment: `FAKE_START_EXIT` (exit code at start), `FAKE_LOADING_GATE` (file that ends the loading),
`FAKE_STEPS`, `FAKE_STEP_S`, `FAKE_LOG` (file that collects one line per operation), `FAKE_FRAMES`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORIGIN_UNIX_NS = time.time_ns()


def emit(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    if path := os.environ.get("FAKE_LOG"):
        with Path(path).open("a") as file:
            file.write(text + "\n")


def wait_for(path: str | None, stop: Callable[[], bool]) -> None:
    while path and not Path(path).exists() and not stop():
        time.sleep(0.005)


def write_mp4(path: Path, num_frames: int, width: int = 192, height: int = 128, seed: int = 0) -> None:
    """H.264 with a moving gradient and AAC with a tone, index first; 24 fps, stereo 32 kHz."""
    from fractions import Fraction

    import av
    import numpy as np

    part = path.with_suffix(".part.mp4")
    with av.open(str(part), "w", options={"movflags": "+faststart"}) as file:
        video = file.add_stream("libx264", rate=24, options={"preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        audio = file.add_stream("aac", rate=32000)
        audio.layout = "stereo"
        rows = np.arange(height)[:, None, None] + np.arange(width)[None, :, None] + np.array([0, 85, 170])
        for index in range(num_frames):
            picture = ((rows + 3 * index + seed) % 256).astype(np.uint8)
            file.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(video.encode(None))
        samples = round(num_frames * 32000 / 24)
        tone = (0.2 * np.sin(np.arange(samples) * 2 * np.pi * 440 / 32000)).astype(np.float32)
        for start in range(0, samples, 1024):
            frame = av.AudioFrame.from_ndarray(
                np.stack([tone[start : start + 1024]] * 2), format="fltp", layout="stereo"
            )
            frame.sample_rate, frame.pts, frame.time_base = 32000, start, Fraction(1, 32000)
            file.mux(audio.encode(frame))
        file.mux(audio.encode(None))
    part.rename(path)


def trace() -> dict[str, Any]:
    """A start's timeline in Chrome trace-event form."""
    lanes = {1: "main", 2: "reader", 3: "uploader", 4: "weights", 5: "groups"}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in lanes.items()
    ]
    spans: list[tuple[Any, ...]] = [
        ("import torch", 1, 0.05, 2.9),
        ("conditioner", 1, 2.9, 3.3),
        ("first step", 1, 3.3, 4.1),
        ("read transformer", 2, 0.2, 3.0),
        ("upload text_encoder", 3, 0.4, 2.0),
        ("upload transformer", 3, 2.0, 3.6),
        ("load text_encoder", 4, 0.4, 2.0, 3 << 30),
        ("load transformer", 4, 2.0, 3.6, 1 << 30),
        ("group transformer/0", 5, 2.0, 2.1, 1 << 20),
    ]
    for name, tid, start, end, *size in spans:
        events.append(
            {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": tid,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"bytes": size[0]} if size else {},
            }
        )
    headline = {"first_read": 0.2, "torch_ready": 2.9, "first_dit_entry": 3.3, "all_weights_resident": 3.6}
    for name, seconds in headline.items():
        events.append(
            {"name": name, "ph": "i", "s": "p", "pid": 1, "tid": 1, "ts": seconds * 1e6, "args": {}}
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "headline": headline,
        "facts": {"device": "fake"},
        "origin_unix_ns": ORIGIN_UNIX_NS,
    }


class FakeWorker:
    """Reader thread for operations, main thread for jobs, as the real one."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.cancelled: set[str] = set()
        self.eof = threading.Event()
        self.leaving = threading.Event()

    def read(self) -> None:
        for line in sys.stdin:
            op = json.loads(line)
            note(f"{op['op']} {op.get('job', '')}".strip())
            if op["op"] == "generate":
                self.jobs.put(op)
            elif op["op"] == "cancel":
                self.cancelled.add(op["job"])
            elif op["op"] == "shutdown":
                self.leaving.set()
                self.jobs.put(None)
        self.eof.set()
        self.jobs.put(None)

    def load(self) -> None:
        gate, total = os.environ.get("FAKE_LOADING_GATE"), 4 << 30
        for quarter in range(1, 4):
            emit(event="loading", bytes=quarter * total // 4, total_bytes=total)
        wait_for(gate, self.eof.is_set)
        emit(event="loading", bytes=total, total_bytes=total)

    def run(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()
        self.load()
        ready = False
        while not self.eof.is_set():
            if not ready:
                path = os.environ.get("FAKE_TIMELINE")
                if path:
                    Path(path).write_text(json.dumps(trace()))
                emit(event="ready", timeline={"headline": trace()["headline"], "path": path})
                ready = True
            op = self.jobs.get()
            if op is None:
                return
            self.generate(op["job"], op["request"], Path(op["output"]))
            if self.leaving.is_set():
                return

    def generate(self, job: str, request: dict[str, Any], output: Path) -> None:
        prompt = request["prompt"]
        if "[refuse]" in prompt:
            error = {"kind": "bad_request", "message": "seed: is cursed", "where": "seed", "http_status": 400}
            return emit(event="error", job=job, error=error)
        if "[malformed]" in prompt:
            emit(event="step", job=job, step="first", steps=None)
        if "[noise]" in prompt:
            sys.stdout.write("warning: something chatty\n")
        frames = int(request.get("num_frames") or os.environ.get("FAKE_FRAMES", "124"))
        emit(
            event="accepted",
            job=job,
            request={**request, "num_frames": frames, "first_frame": None, "last_frame": None},
        )
        note(f"pictures {[name for name in ('first_frame', 'last_frame') if request.get(name)]}")
        emit(event="phase", job=job, phase="conditioning")
        emit(event="phase", job=job, phase="denoising")
        steps = int(os.environ.get("FAKE_STEPS", "8"))
        for step in range(1, steps + 1):
            if not self.step(job, prompt, step):
                with contextlib.suppress(FileNotFoundError):
                    output.unlink()
                return emit(event="cancelled", job=job)
            emit(event="step", job=job, step=step, steps=steps)
        if "[broken]" in prompt:
            error = {
                "kind": "internal",
                "message": f"{output}: secret path",
                "where": None,
                "http_status": 500,
            }
            return emit(event="error", job=job, error=error)
        emit(event="phase", job=job, phase="decoding")
        emit(event="phase", job=job, phase="encoding")
        self.write(prompt, output, frames, int(request.get("seed") or 0))
        emit(
            event="done",
            job=job,
            result={
                "seed": request.get("seed"),
                "frames": frames,
                "noise_sha256": "0" * 64,
                "peak_memory_mb": 41,
                "headline": {"mp4_complete": 9.5},
            },
        )

    def write(self, prompt: str, output: Path, frames: int, seed: int) -> None:
        if "[garbage]" in prompt:
            output.write_bytes(b"not a video at all")
        elif "[nofile]" not in prompt:
            if ready_made := os.environ.get("FAKE_MP4"):
                part = output.with_name(output.name + ".part")
                part.write_bytes(Path(ready_made).read_bytes())
                part.rename(output)
            else:
                write_mp4(output, frames, seed=seed)

    def step(self, job: str, prompt: str, step: int) -> bool:
        def stopped() -> bool:
            return self.eof.is_set() or (job in self.cancelled and "[deaf]" not in prompt)

        time.sleep(float(os.environ.get("FAKE_STEP_S", "0")))
        for kind, at in re.findall(r"\[(crash|hang|gate|lostrank|damaged)@(\d+)\]", prompt):
            if int(at) != step:
                continue
            if kind == "crash":
                os._exit(134)
            if kind == "damaged":
                reported = os.environ.get("FAKE_DAMAGED_KIND", "bad_artifact")
                error = {"kind": reported, "message": "/secret/path: damaged", "http_status": 503}
                emit(event="error", job=None, error=error)
                os._exit(int(os.environ["FAKE_DAMAGED_EXIT"]))
            if kind == "lostrank":
                message = "ranks: rank 1 of 2 failed: killed"
                error = {"kind": "internal", "message": message, "where": "ranks", "http_status": 500}
                emit(event="error", job=job, error=error)
                wait_for(os.environ["FAKE_GATE"], self.eof.is_set)
                os._exit(1)
            if kind == "hang":
                threading.Event().wait()
            wait_for(os.environ["FAKE_GATE"], stopped)
        return not stopped()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--request-follows", action="store_true")
    args, _ = parser.parse_known_args()
    emit(event="hello", protocol=1, pid=os.getpid())
    note(f"start {os.getpid()}")
    if args.request_follows:
        note("request follows")
    code = int(os.environ.get("FAKE_START_EXIT", "0"))
    if code:
        kinds = {2: "bad_request", 3: "bad_artifact", 4: "unavailable_capability"}
        error = {
            "kind": kinds.get(code, "internal"),
            "message": "/secret/path: damaged",
            "where": None,
            "http_status": 503,
        }
        emit(event="error", job=None, error=error)
        return code
    FakeWorker().run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
