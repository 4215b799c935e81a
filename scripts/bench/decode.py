"""From the last denoising step to the complete file: batched decode, streamed encode, against diffusers. One GPU.

    python -m scripts.bench.decode                                       # about two minutes on an H200
    python -m scripts.bench.decode --preset test --device cpu --size 96x64 --frames 22,39,56 --repeat 1   # dry run

Both decoders at released size with random weights made on the device; the worker's own decode path
(`runtime.pipeline.decode_and_write`) with its encoder processes, started beforehand as they are during denoising. Parts
are measured by `decode_parts.py`, diffusers by `decode_peer.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.catalog import OPERATORS, architecture_of
from kernels.cubin import load_kernels
from kernels.cubin_index import for_architecture, read_index
from kernels.driver import CudaDriver
from loader.errors import WorkerError
from runtime.encoders import Encoders
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.audio_vae import AudioDecoder
from runtime.families.minimax_h3.model.decode_units import AudioBeside, AudioUnits, VideoUnits
from runtime.families.minimax_h3.model.picture_units import DecodedUnit
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.packing import pack_audio, patchify
from runtime.family import MediaPlan
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.ops.decoder import EAGER, DecoderOperators
from runtime.ops.fused_decoder import FusedDecoderOperators
from runtime.pipeline import Hooks, decode_and_write
from runtime.settings import Settings
from runtime.timeline import Timeline
from scripts.bench.common import target, write_result
from scripts.bench.decode_parts import Parts
from scripts.bench.decode_weights import RandomDecoderWeights
from scripts.tiny_presets import preset

FPS, AUDIO_LATENTS_PER_SECOND = 24, 40


@dataclass
class Clip:
    """Latents of one length: video [C, T, h, w], audio [2, C, T]; `rows`: the same as a denoiser leaves them."""

    media: MediaPlan
    video: Tensor
    audio: Tensor
    rows: Mapping[str, Tensor]


class Bench:
    """Decoders, encoders and clocks of one run of this program."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.config: H3Config = preset(args.preset).model
        self.device = torch.device(args.device)
        half = torch.float16 if self.device.type == "cuda" else torch.float32
        self.weights = RandomDecoderWeights(self.config, args.device, half)
        self.synchronize()  # makes the context that kernels are bound in
        operators = _operators(args, folder)
        self.operators = type(operators).__name__
        self.video = VideoDecoder(self.config.video_vae, self.weights, self.device, operators=operators)
        self.audio = AudioDecoder(self.config.audio_vae, self.weights, self.device)
        self.calls = 0
        forward = self.video._network.forward

        def counted(latents: Tensor) -> Tensor:
            self.calls += 1
            return forward(latents)

        self.video._network.forward = counted  # type: ignore[method-assign]
        settings = Settings(encoder_processes=args.encoders)
        self.encoders = Encoders(settings, args.device)

    def clip(self, frames: int) -> Clip:
        """Latents that change slowly in time and space, as those of pictures do."""
        width, height = (int(side) for side in self.args.size.split("x"))
        vae = self.config.video_vae
        steps = (frames - 5) // 17 * 5 + 2
        rough = torch.randn(
            1, vae.latent_channels, steps // 4 + 2, height // 64 + 2, width // 64 + 2, device=self.device,
            generator=torch.Generator(self.device).manual_seed(frames),
        )  # fmt: skip
        size = (steps, height // vae.spatial_ratio, width // vae.spatial_ratio)
        video = F.interpolate(rough, size, mode="trilinear")
        count = round(frames / FPS * AUDIO_LATENTS_PER_SECOND)
        audio = torch.randn(2, self.config.audio_vae.latent_channels, count, device=self.device)
        media = MediaPlan(width, height, frames, FPS, self.config.audio_vae.sampling_rate)
        rows = {"video": patchify(video, self.config.transformer.patch_size), "audio": pack_audio(audio)}
        return Clip(media, video[0], audio, rows)

    def run(
        self, clip: Clip, output: Path, *, beside: bool = True, watched: bool = False, decode: bool = False
    ) -> dict[str, Any]:
        """One request from latents to the file. Times in seconds from the first call on.

        Args:
            beside: decode the sound beside the first pictures, as workers do; else before them.
            watched: also make a fragmented MP4. decode: check every frame of the file, not only its structure.
        """
        self.calls = 0
        self.synchronize()
        _reset_peaks(self.device)
        clock = DeviceClock(self.device)
        receiver = Fragments(clock) if watched else None
        hooks, job = Hooks(Timeline(), threading.Event()), BenchJob(self, clip, clock, beside)
        options = {**self.encoders.options, "receiver": receiver}
        decode_and_write(job, clip.rows, output, hooks, options, self.encoders.pool)  # type: ignore[arg-type]
        complete = clock.now()
        last = clock.last_kernel()
        expectation = Mp4Expectation(clip.media.width, clip.media.height, clip.media.num_frames)
        report = check_mp4(output, expectation, decode=decode)
        spans = {span.name: (span.end_ns - span.start_ns) / 1e9 for span in hooks.timeline.spans}
        return {
            "decoder_calls": self.calls,
            "last_decode_kernel_s": last,
            "file_complete_s": complete,
            "file_complete_after_last_kernel_ms": (complete - last) * 1e3,
            "audio_decode_s": spans["audio decode"],
            "finish_s": spans["finish file"],
            "first_frame_out_s": hooks.timeline.seconds("first_frame_out"),
            "first_fragment_s": receiver.first_s if receiver else None,
            "file_bytes": output.stat().st_size,
            "problems": report.problems,
            **_peaks(self.device, self.encoders),
        }

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.zeros(1, device=self.device)
            torch.cuda.synchronize()


class BenchJob:
    """The part of `runtime.family.Job` that decoding uses, with a clock at the end of every unit's kernels."""

    def __init__(self, bench: Bench, clip: Clip, clock: DeviceClock, beside: bool) -> None:
        self.media = clip.media
        shape = (clip.video.shape[1], clip.video.shape[2], clip.video.shape[3])
        video = ClockedUnits(shape, bench.config.transformer.patch_size, bench.video)
        video.clock = clock
        audio = AudioUnits(bench.audio)
        self._decoders = {
            "video": video,
            "audio": AudioBeside(audio, video, bench.device) if beside else audio,
        }

    def decoders(self) -> Mapping[str, Any]:
        return self._decoders


class ClockedUnits(VideoUnits):
    clock: DeviceClock

    @torch.inference_mode()
    def _units(self, latents: Mapping[str, Tensor]) -> Iterator[DecodedUnit]:
        for unit in super()._units(latents):
            self.clock.kernels_queued()
            yield unit


class Fragments:
    """Counts a stream's bytes and notes when the first came."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.first_s: float | None = None

    def write(self, data: bytes, /) -> None:
        if self.first_s is None:
            self.first_s = self._clock.now()


class DeviceClock:
    """Seconds since now; on CUDA also when the kernels queued last were done, by the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last = 0.0
        if self._is_cuda:
            self._first = torch.cuda.Event(enable_timing=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._first.record()
            self._first.synchronize()
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def kernels_queued(self) -> None:
        if self._is_cuda:
            self._event.record()
        else:
            self._last = self.now()

    def last_kernel(self) -> float:
        if self._is_cuda:
            self._last = self._first.elapsed_time(self._event) / 1e3
        return self._last


def main() -> int:
    args = _parser().parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        bench = Bench(args, Path(folder) / "kernels")
        try:
            return _measure(bench, Notes(args.device == "cpu"), Path(folder) / "clip.mp4")
        finally:
            bench.encoders.close()


class Notes:
    """Figures by name, printed as they come. A part that fails costs only itself, except in a dry run."""

    def __init__(self, is_dry: bool) -> None:
        self.figures: dict[str, Any] = {}
        self._is_dry = is_dry
        self._started = time.perf_counter()

    def take(self, name: str, measure: Callable[[], Any], *, is_needed: bool = False) -> Any:
        try:
            self.figures[name] = measure()
        except Exception as error:
            if is_needed or self._is_dry:
                raise
            self.figures[name] = {"failed": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - self._started
        print(f"{seconds:6.1f} s  {name}: {json.dumps(self.figures[name])}", flush=True)
        return self.figures[name]


def _measure(bench: Bench, notes: Notes, output: Path) -> int:
    """Targets first and written at once, then the parts, then all of it. Returns the exit code."""
    args, figures = bench.args, notes.figures
    figures |= {
        "size": args.size,
        "encoders": {**bench.encoders.options, "processes": bench.encoders.pool.processes},
        "operators": bench.operators,
        "attention": bench.video._network.attention.backend,
    }
    clips = [bench.clip(int(text)) for text in args.frames.split(",")]
    middle = clips[len(clips) // 2]
    bench.encoders.start(middle.media)
    # Libraries, weights, kernels and plans are there afterwards.
    notes.take("first_in_process", lambda: bench.run(bench.clip(22), output), is_needed=True)
    runs = {clip.media.num_frames: _runs(bench, notes, clip, clip is middle, output) for clip in clips}
    notes.take("sound_before_pictures", lambda: bench.run(middle, output, beside=False))
    notes.take("watched", lambda: bench.run(middle, output, watched=True))
    figures["tile_batch_chosen"] = bench.video.tile_batch
    peer = notes.take("peer", lambda: _peer(bench, middle)) if args.peer else None
    targets = _targets(runs[middle.media.num_frames], peer if peer and "seconds" in peer else None)
    _write(args, figures, targets)
    if args.parts:
        parts = Parts(bench.config, bench.weights, bench.video, bench.encoders, middle.media, middle.video)
        for name, measure in parts.all().items():
            notes.take(name, measure)
        _write(args, figures, targets)
    print(json.dumps({"peer": peer, "targets": targets}), flush=True)
    return 1 if any(run["problems"] for found in runs.values() for run in found) else 0


def _runs(bench: Bench, notes: Notes, clip: Clip, is_middle: bool, output: Path) -> list[dict[str, Any]]:
    count = bench.args.repeat if is_middle else 1
    name = f"{clip.media.num_frames} frames"
    found: list[dict[str, Any]] = notes.take(
        name, lambda: [bench.run(clip, output, decode=not index) for index in range(count)], is_needed=True
    )
    return found


def _write(args: argparse.Namespace, figures: Mapping[str, Any], targets: dict[str, Any]) -> None:
    if args.preset == "full":
        print(write_result(args.name, figures, targets), flush=True)


def _peer(bench: Bench, clip: Clip) -> dict[str, Any] | None:
    try:
        import diffusers  # noqa: F401 (the machine may lack it)
    except ImportError as error:
        print(f"no peer: {error}")
        return None
    from scripts.bench.decode_peer import measure_peer

    rate = max(clip.media.sample_rate, 8000)  # small models have a rate that AAC does not know
    return measure_peer(bench.weights, clip.video, clip.audio, FPS, rate)


def _targets(runs: list[dict[str, Any]], peer: dict[str, Any] | None) -> dict[str, Any]:
    after = statistics.median(run["file_complete_after_last_kernel_ms"] for run in runs)
    targets = {
        "decoder_calls_10s": target(runs[0]["decoder_calls"], 14, "lower"),
        "file_complete_after_last_kernel_ms": target(after, 150.0, "lower"),
    }
    if peer is not None:
        ours = statistics.median(run["file_complete_s"] for run in runs)
        targets["decode_and_file_vs_diffusers"] = target(peer["seconds"]["total"] / ours, 4.0, "higher")
    return targets


def _operators(args: argparse.Namespace, folder: Path) -> DecoderOperators:
    """The decoder's kernels, compiled here as prepare does it; eager where that is impossible."""
    if args.device != "cuda" or args.eager:
        return EAGER
    names = [name for name in OPERATORS if name.startswith("decoder_")]
    architecture = architecture_of(torch.cuda.get_device_capability())
    command = [
        sys.executable,
        "-m",
        "kernels.aot.compile",
        "--out",
        str(folder),
        "--architecture",
        architecture,
    ]
    command += ["--jobs", "3", *(part for name in names for part in ("--operator", name))]
    try:
        subprocess.run(command, check=True, timeout=120)
        entries = for_architecture(read_index(folder), architecture)
        kernels = load_kernels(folder, entries, architecture, CudaDriver())
    except (OSError, subprocess.SubprocessError, WorkerError) as error:
        print(f"no kernels, eager operators: {error}")
        return EAGER
    kernels.bind()
    return FusedDecoderOperators(kernels)


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the host's peak is then that of the whole process


def _peaks(device: torch.device, encoders: Encoders) -> dict[str, float]:
    """GiB: tensors on the GPU; peak resident memory of this process and of the encoder processes together."""
    children = sum(_peak_resident(str(process.child.pid)) for process in encoders.pool._all)
    gpu = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "peak_gpu_gib": round(gpu, 2),
        "peak_host_gib": round(_peak_resident("self"), 2),
        "peak_encoders_gib": round(children, 2),
        "picture_memory_gib": round(encoders.pool.memory.slot_bytes * encoders.pool.memory.slots / 2**30, 3),
        "picture_memory_pinned": encoders.pool.memory.pinned,
    }


def _peak_resident(process: str) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    return 0.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="full")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="1344x768")
    parser.add_argument(
        "--frames", default="124,243,362", help="clip lengths; targets are read from the middle one"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of the middle length")
    parser.add_argument("--encoders", type=int, default=0, help="encoder processes; 0: as a worker chooses")
    parser.add_argument("--eager", action="store_true", help="do not compile the decoder's kernels")
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--no-parts", dest="parts", action="store_false", help="the targets only")
    parser.add_argument("--work", type=Path, help="folder for the files (default: the system's)")
    parser.add_argument("--name", default="decode")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
