"""From the last denoising step to the complete file: batched decode, streamed encode, against diffusers. One GPU.

    python -m scripts.bench.decode                                       # about two minutes on an H200
    python -m scripts.bench.decode --preset test --device cpu --size 96x64 --frames 22,39,56 --repeat 1   # dry run

Both decoders at released size with random weights made on the device; the worker's own decode path
(`runtime.pipeline.decode_and_write`) with its encoder processes, started beforehand as they are during denoising.
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
from collections.abc import Iterator, Mapping
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
from runtime.families.minimax_h3.model.picture_units import DecodedUnit
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.families.minimax_h3.model.video_vae_pixels import to_uint8
from runtime.family import MediaPlan
from runtime.media.check import Mp4Expectation, check_mp4
from runtime.media.unit_encoder import PictureOptions
from runtime.ops.decoder import EAGER, DecoderOperators
from runtime.ops.fused_decoder import FusedDecoderOperators
from runtime.pipeline import Hooks, decode_and_write
from runtime.settings import Settings
from runtime.timeline import Timeline
from scripts.bench.common import target, write_result
from scripts.bench.decode_weights import RandomDecoderWeights
from scripts.tiny_presets import preset

FPS, AUDIO_LATENTS_PER_SECOND = 24, 40


@dataclass
class Clip:
    """Latents of one length and what a run of it measured."""

    media: MediaPlan
    latents: Mapping[str, Tensor]


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
        video = F.interpolate(rough, size, mode="trilinear")[0]
        count = round(frames / FPS * AUDIO_LATENTS_PER_SECOND)
        audio = torch.randn(2, self.config.audio_vae.latent_channels, count, device=self.device)
        media = MediaPlan(width, height, frames, FPS, self.config.audio_vae.sampling_rate)
        return Clip(media, {"video": video, "audio": audio})

    def run(self, clip: Clip, output: Path) -> dict[str, Any]:
        """One request from latents to the file. Times in seconds from the first call on."""
        self.calls = 0
        job = BenchJob(self, clip)
        self.synchronize()
        _reset_peaks(self.device)
        clock = DeviceClock(self.device)
        job.clock = clock
        hooks = Hooks(Timeline(), threading.Event())
        decode_and_write(job, clip.latents, output, hooks, self.encoders.options, self.encoders.pool)  # type: ignore[arg-type]
        complete = clock.now()
        last = clock.last_kernel()
        report = check_mp4(output, Mp4Expectation(clip.media.width, clip.media.height, clip.media.num_frames))
        spans = {span.name: (span.end_ns - span.start_ns) / 1e9 for span in hooks.timeline.spans}
        return {
            "decoder_calls": self.calls,
            "last_decode_kernel_s": last,
            "file_complete_s": complete,
            "file_complete_after_last_kernel_ms": (complete - last) * 1e3,
            "audio_decode_s": spans["audio decode"],
            "finish_s": spans["finish file"],
            "first_frame_out_s": (hooks.timeline.seconds("first_frame_out") or 0.0),
            "file_bytes": output.stat().st_size,
            "problems": report.problems,
            **_peaks(self.device, self.encoders),
        }

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.zeros(1, device=self.device)
            torch.cuda.synchronize()

    def unit_times(self, clip: Clip, batches: list[int]) -> list[dict[str, Any]]:
        """One unit with different tile batches: device time, the host's share (a graph could save no more), pixels."""
        plan = self.video.plan(clip.latents["video"])
        chosen, figures, reference = self.video.tile_batch, [], None
        for batch in batches:
            self.video.tile_batch = batch
            self.video.decode_unit(clip.latents["video"], 0, plan)
            self.synchronize()
            _reset_peaks(self.device)
            start = time.perf_counter()
            head, _ = self.video.decode_unit(clip.latents["video"], 0, plan)
            queued = time.perf_counter() - start
            self.synchronize()
            seconds = time.perf_counter() - start
            reference = head if reference is None else reference
            figures.append(
                {
                    "tile_batch": batch,
                    "unit_ms": seconds * 1e3,
                    "host_ms": queued * 1e3,
                    "peak_gpu_gib": _gpu_peak(self.device),
                    "largest_difference": float((head - reference).abs().max()),
                }
            )
        self.video.tile_batch = chosen
        return figures

    def eager(self, clip: Clip) -> dict[str, Any]:
        """One unit with the eager operators, for comparison with the first row of `unit_times`."""
        decoder = VideoDecoder(self.config.video_vae, self.weights, self.device, tile_batch=28)
        plan = decoder.plan(clip.latents["video"])
        head, _ = decoder.decode_unit(clip.latents["video"], 0, plan)
        self.synchronize()
        start = time.perf_counter()
        head, _ = decoder.decode_unit(clip.latents["video"], 0, plan)
        self.synchronize()
        seconds = time.perf_counter() - start
        chosen, self.video.tile_batch = self.video.tile_batch, 28
        ours, _ = self.video.decode_unit(clip.latents["video"], 0, plan)
        self.video.tile_batch = chosen
        difference = (ours - head).abs()
        return {
            "unit_ms": seconds * 1e3,
            "largest": float(difference.max()),
            "mean": float(difference.mean()),
        }

    def encoder_times(self, clip: Clip) -> list[dict[str, Any]]:
        """What is waited for at the very end: encoding one unit of 22 frames, by tune and threads of one session."""
        plan = self.video.plan(clip.latents["video"][:, :7])
        head, tail = self.video.decode_unit(clip.latents["video"][:, :7], 0, plan)
        unit = DecodedUnit(self.video.join(head, None, tail, plan.units - 1, plan))
        figures = []
        for tune in ("zerolatency", ""):
            for threads in (2, 4, 8, 16):
                media, options = clip.media, {**self.encoders.options, "tune": tune, "threads": threads}
                picture = PictureOptions(media.width, media.height, media.fps, **options)
                self.encoders.pool.start(picture, media.num_frames)
                milliseconds, size = [], 0
                for _ in range(3):
                    slot = self.encoders.pool.memory.acquire(10)
                    assert slot is not None
                    arrival = unit.copy_into(slot.view)
                    if arrival is not None:
                        arrival()
                    start = time.perf_counter()
                    size = len(
                        self.encoders.pool.encode(slot, unit.num_frames, unit.layout, picture).result()
                    )
                    milliseconds.append((time.perf_counter() - start) * 1e3)
                median = statistics.median(milliseconds)
                figures.append({"tune": tune, "threads": threads, "unit_ms": median, "bytes": size})
        return figures

    def precision(self, clip: Clip) -> dict[str, Any]:
        """Numeric effect of the fast path on one unit: float16 products against float32 everywhere, same weights."""
        latents = clip.latents["video"][:, :7, :32, :32]
        exact = RandomDecoderWeights(self.config, self.args.device, torch.float32)
        found = {}
        for name, weights in (("fp32", exact), ("fp16_linears", self.weights)):
            decoder = VideoDecoder(self.config.video_vae, weights, self.device, precision=name)  # type: ignore[arg-type]
            found[name] = decoder.decode(latents)
        difference = (found["fp32"] - found["fp16_linears"]).abs()
        bytes_differ = to_uint8(found["fp32"]) != to_uint8(found["fp16_linears"])
        mse = float(difference.square().mean())
        return {
            "largest": float(difference.max()),
            "mean": float(difference.mean()),
            "psnr_db": None if mse == 0 else round(-10 * torch.log10(torch.tensor(mse)).item(), 1),
            "bytes_that_differ": float(bytes_differ.float().mean()),
        }


class BenchJob:
    """The part of `runtime.family.Job` that decoding uses."""

    def __init__(self, bench: Bench, clip: Clip) -> None:
        self.media = clip.media
        self.clock: DeviceClock | None = None
        self._bench = bench

    def decoders(self) -> Mapping[str, Any]:
        return {"video": self, "audio": BenchAudio(self._bench.audio)}

    @torch.inference_mode()
    def units(self, latents: Mapping[str, Tensor]) -> Iterator[DecodedUnit]:
        assert self.clock is not None
        for frames in self._bench.video.units(latents["video"]):
            unit = DecodedUnit(frames)
            self.clock.kernels_queued()
            yield unit


class BenchAudio:
    def __init__(self, decoder: AudioDecoder) -> None:
        self._decoder = decoder

    @torch.inference_mode()
    def units(self, latents: Mapping[str, Tensor]) -> Iterator[Any]:
        yield self._decoder.decode(latents["audio"]).cpu().numpy()


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
    lengths = [int(text) for text in args.frames.split(",")]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        bench = Bench(args, Path(folder) / "kernels")
        figures: dict[str, Any] = {
            "size": args.size,
            "encoders": {**bench.encoders.options, "processes": bench.encoders.pool.processes},
            "operators": bench.operators,
        }
        output = Path(folder) / "clip.mp4"
        middle = bench.clip(lengths[len(lengths) // 2])
        bench.encoders.start(middle.media)
        started = time.perf_counter()
        bench.run(bench.clip(22), output)  # libraries, weights and kernels are there afterwards
        figures["warm_up_s"] = time.perf_counter() - started
        figures["clips"] = {}
        for frames in lengths:
            clip = bench.clip(frames)
            runs = [
                bench.run(clip, output)
                for _ in range(args.repeat if frames == middle.media.num_frames else 1)
            ]
            figures["clips"][str(frames)] = runs
            print(f"{frames} frames: {json.dumps(runs)}", flush=True)
        batches = [b for b in (28, 14, 7, 1) if args.preset == "full" or b <= 7]
        figures["tile_batch_chosen"] = bench.video.tile_batch
        figures["unit"] = bench.unit_times(middle, batches)
        print(f"unit: {json.dumps(figures['unit'])}", flush=True)
        figures["eager_operators"] = bench.eager(middle)
        print(f"eager: {json.dumps(figures['eager_operators'])}", flush=True)
        figures["encode_22_frames"] = bench.encoder_times(middle)
        print(f"encode: {json.dumps(figures['encode_22_frames'])}", flush=True)
        figures["fp16_against_fp32"] = bench.precision(middle)
        print(f"precision: {json.dumps(figures['fp16_against_fp32'])}", flush=True)
    samples = bench.audio.decode(middle.latents["audio"]).cpu()
    bench.encoders.close()
    runs = figures["clips"][str(middle.media.num_frames)]
    figures["peer"] = _peer(bench, middle, samples) if args.peer else None
    targets = _targets(runs, figures["peer"])
    print(json.dumps({"peer": figures["peer"], "targets": targets}), flush=True)
    if args.preset == "full":
        print(write_result(args.name, figures, targets))
    return 1 if any(run["problems"] for runs in figures["clips"].values() for run in runs) else 0


def _peer(bench: Bench, clip: Clip, samples: Tensor) -> dict[str, Any] | None:
    try:
        import diffusers  # noqa: F401 (the machine may lack it)
    except ImportError as error:
        print(f"no peer: {error}")
        return None
    from scripts.bench.decode_peer import measure_peer

    rate = max(clip.media.sample_rate, 8000)  # small models have a rate that AAC does not know
    return measure_peer(bench.weights, clip.latents["video"], samples, FPS, rate)


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


def _gpu_peak(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else 0.0


def _peaks(device: torch.device, encoders: Encoders) -> dict[str, float]:
    """GiB: tensors on the GPU; peak resident memory of this process and of the encoder processes together."""
    children = sum(_peak_resident(str(process.child.pid)) for process in encoders.pool._all)
    return {
        "peak_gpu_gib": _gpu_peak(device),
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
    parser.add_argument("--work", type=Path, help="folder for the files (default: the system's)")
    parser.add_argument("--name", default="decode")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
