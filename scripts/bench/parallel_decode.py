"""Decode of one video on P GPUs against one, up to pixels on rank 0's device.

    python -m runtime.server.ranks 2 python -m scripts.bench.parallel_decode --bundle DIRECTORY       # 1344x768, 10 s
    python -m runtime.server.ranks 2 python -m scripts.bench.parallel_decode --preset test --device cpu --size 64x64 \\
        --frames 56

Any launcher that sets torchrun's variables will do. DIRECTORY is prepared; its kernels are used, without it eager operators.
Weights are random and made on the device. Pixels of both ways are compared bit for bit. `results/<name>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.compute import choose_compute
from runtime.families.minimax_h3.model.parts import decoder_operators
from runtime.families.minimax_h3.model.ranks_video import VideoUnitDecoder
from runtime.families.minimax_h3.model.video_decoder import VideoDecoder
from runtime.parallel.control import Control
from runtime.parallel.ranks import OneRank, Ranks
from runtime.parallel.units import UnitRelay
from scripts.bench.common import bundle_kernels, ranks_command, target, write_result
from scripts.bench.decode_weights import RandomDecoderWeights
from scripts.bench.shipped_ranks import shipped_connection
from scripts.tiny_presets import preset


class Bench:
    """Decoder and latents of this rank; latents are equal on all ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        config = preset(args.preset).model
        half = torch.float16 if self.device.type == "cuda" else torch.float32
        weights = RandomDecoderWeights(config, args.device, half)
        self.compute = choose_compute(args.device, args.bundle or Path(), bundle_kernels(args.bundle))
        operators = decoder_operators(self.compute)
        self.decoder = VideoDecoder(config.video_vae, weights, self.device, operators=operators)
        width, height = (int(side) for side in args.size.split("x"))
        shape = ((args.frames - 5) // 17 * 5 + 2, height // 16, width // 16)
        noise = torch.randn(
            config.video_vae.latent_channels, *shape, generator=torch.Generator().manual_seed(0)
        )
        self.latents = noise.to(self.device)

    def run(self, ranks: Ranks, control: Control) -> tuple[float, list[Tensor]]:
        """Seconds until the last frames are on rank 0, and its frames."""
        self._synchronize()
        start = time.perf_counter()
        relay = UnitRelay(ranks, control, VideoUnitDecoder(self.decoder, self.latents))
        frames = [unit for unit in relay.frames() if unit is not None]
        self._synchronize()
        return time.perf_counter() - start, frames

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.inference_mode()
def main() -> int:
    args = _arguments()
    connection = shipped_connection(args.device)
    bench, size = Bench(args), connection.environment.size
    figures: dict[str, Any] = {
        "ranks": size, "size": args.size, "frames": args.frames, "compute": bench.compute.facts
    }  # fmt: skip
    alone: list[float] = []
    expected: list[Tensor] = []
    for _ in range(args.repeat + 1 if connection.environment.rank == 0 else 0):
        seconds, expected = bench.run(OneRank(), Control(OneRank()))
        alone.append(seconds)
    dist.barrier()
    together: list[float] = []
    found: list[Tensor] = []
    for _ in range(args.repeat + 1):
        seconds, found = bench.run(connection.ranks, connection.control)
        together.append(seconds)
    if connection.environment.rank == 0:
        figures["units"] = len(expected)
        figures["equal"] = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        figures["one_rank_s"], figures["all_ranks_s"] = (
            statistics.median(times[1:]) for times in (alone, together)
        )
        figures["runs_s"] = {"one": alone, "all": together}
        speedup = figures["one_rank_s"] / figures["all_ranks_s"]
        targets = {f"vae_decode_{size}gpu_speedup": target(round(speedup, 4), 1.8, "higher")}
        print(json.dumps({"figures": figures, "targets": targets}, indent=1))
        if args.name:
            print(write_result(args.name, figures, targets, command=ranks_command(size)))
    connection.close()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="full")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="1344x768")
    parser.add_argument("--frames", type=int, default=243)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bundle", type=Path, help="prepared directory whose kernels are used")
    parser.add_argument("--name", default="", help="result file under scripts/bench/results/; none without")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
