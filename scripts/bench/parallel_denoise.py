"""Denoising on P GPUs against one: step time, bytes on the wire, communication hidden and exposed.

    python -m runtime.server.ranks 2 python -m scripts.bench.parallel_denoise --bundle DIRECTORY   # 1344x768, 5 and 10 s
    python -m runtime.server.ranks 2 python -m scripts.bench.parallel_denoise --preset test --device cpu --size 64x64 \\
        --frames 22 --text 9 --steps 1 --warm 1 --chunk-rows 16                                   # dry run on CPUs

Any launcher that sets torchrun's variables will do. DIRECTORY is prepared; its kernels are used, without it eager operators.
Weights are random and made on the device. One rank is measured first, on rank 0, then all ranks. Without its
communication means: the same work, with copies of this rank's rows in place of what others would send (on zeros or stale
memory a GPU is faster). `results/parallel_denoise.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.compute import Compute, choose_compute
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.adaln import ModulationTables
from runtime.families.minimax_h3.model.parts import one_rank
from runtime.families.minimax_h3.model.ranks_transformer import RanksTransformer
from runtime.families.minimax_h3.model.transformer import Transformer
from runtime.families.minimax_h3.packing import PackedSequence, pack
from runtime.families.minimax_h3.shards import gathers_hidden
from runtime.parallel.connect import Connection
from runtime.parallel.control import Control
from runtime.parallel.ranks import OneRank, Ranks, SilentRanks, Work
from runtime.parallel.split import RowShards
from runtime.parallel.ulysses import GatheredHidden, ProjectedHeads
from scripts.bench.common import bundle_kernels, ranks_command, target, write_result
from scripts.bench.parallel_weights import TABLE, RandomTransformerWeights
from scripts.bench.shipped_ranks import shipped_connection
from scripts.tiny_presets import preset


class CopyingRanks(SilentRanks):
    """Nothing on the wire: what others would send is copied from what this rank holds."""

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        out.view(self.size, *part.shape).copy_(part.expand(self.size, *part.shape))
        return super().all_gather(out, part)

    def all_to_all(
        self, out: Tensor, rows: Tensor, out_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Work:
        start = 0
        for count in out_rows:
            there = min(count, len(rows))
            out[start : start + there].copy_(rows[:there])
            start += count
        return super().all_to_all(out, rows, out_rows, sent_rows)


class Bench:
    """One shape on this rank."""

    def __init__(
        self, args: argparse.Namespace, connection: Connection, compute: Compute, frames: int
    ) -> None:
        self.args, self.connection, self.compute = args, connection, compute
        self.device = torch.device(args.device)
        self.config: H3Config = preset(args.preset).model
        width, height = (int(side) for side in args.size.split("x"))
        shape = ((frames - 5) // 17 * 5 + 2, height // 16, width // 16)
        self.sequence: PackedSequence = pack(self.config, [1] * args.text, shape, round(frames / 24 * 40))
        c = self.config.transformer
        self.dtype = torch.bfloat16 if args.dtype == "BF16" else torch.float32
        self.text = torch.randn(args.text, c.hidden_size, device=self.device).to(self.dtype)
        self.video = torch.randn(self.sequence.num_video, c.video_row_dim, device=self.device)
        self.audio = torch.randn(self.sequence.num_audio, c.audio_in_channels, device=self.device)

    def alone(self) -> float:
        """Seconds of a step on one rank."""
        weights = RandomTransformerWeights(self.config, self.args.device, self.args.dtype)
        transformer = one_rank(self.compute).transformer(self.config, weights, self._tables(weights))
        return self._time(transformer)

    def together(self, ranks: Ranks, control: Control) -> float:
        """Seconds of a step on these ranks."""
        rank, size = self.connection.environment.rank, self.connection.environment.size
        is_sharded = gathers_hidden(size)
        weights = RandomTransformerWeights(
            self.config, self.args.device, self.args.dtype, rank, size if is_sharded else 1
        )
        transformer = RanksTransformer(
            self.config, weights, self._tables(weights), ranks, control, is_sharded, self.compute.attention,
            self.compute.operators, self.args.chunk_rows,
        )  # fmt: skip
        return self._time(transformer)

    def communication(self) -> float:
        """Seconds of all exchanges of a step with no work between them."""
        c, ranks = self.config.transformer, self.connection.ranks
        shards = RowShards.of(self.sequence.num_rows, ranks.size)
        own = len(shards.ranges[ranks.rank])
        x = torch.zeros(own, c.hidden_size, dtype=self.dtype, device=self.device)
        held = c.num_attention_heads // ranks.size
        heads = held if gathers_hidden(ranks.size) else c.num_attention_heads
        part = torch.zeros(shards.most, heads, c.attention_head_dim, dtype=self.dtype, device=self.device)
        out = torch.zeros(
            self.sequence.num_rows, held, c.attention_head_dim, dtype=self.dtype, device=self.device
        )
        exchange = (
            GatheredHidden(ranks, shards, self.args.chunk_rows)
            if gathers_hidden(ranks.size)
            else ProjectedHeads(ranks, shards)
        )

        def layers() -> None:
            for _ in range(c.num_layers):
                for arriving in exchange.attention_inputs(x, lambda hidden, rows: [part[: len(hidden)]] * 3):
                    arriving.get()
                for _ in exchange.return_rows(out):
                    continue

        return self._median(layers)

    def expected_bytes(self) -> int:
        """Received by this rank in one step, by the formulas of `runtime.parallel.ulysses`."""
        c, size = self.config.transformer, self.connection.ranks.size
        shards, item = RowShards.of(self.sequence.num_rows, size), self.dtype.itemsize
        own = len(shards.ranges[self.connection.ranks.rank])
        foreign = shards.most * (size - 1)
        width = c.inner_dim // size
        inward = foreign * c.hidden_size if gathers_hidden(size) else (shards.num_rows - own) * 3 * width
        outward = own * (size - 1) * width
        return c.num_layers * (inward + outward) * item

    def _tables(self, weights: RandomTransformerWeights) -> ModulationTables:
        return ModulationTables(weights, TABLE)

    def _time(self, transformer: Transformer) -> float:
        transformer.begin(self.text, self.sequence)
        return self._median(lambda: transformer.forward(self.video, self.audio, 0))

    def _median(self, work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(self.args.warm + self.args.steps):
            self._synchronize()
            start = time.perf_counter()
            work()
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[self.args.warm :])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(bench: Bench) -> dict[str, Any]:
    """All figures of one shape; the same on every rank but for the times."""
    connection = bench.connection
    rank, size = connection.environment.rank, connection.environment.size
    alone = bench.alone() if rank == 0 else 0.0
    dist.barrier()
    before = connection.ranks.received_bytes
    together = bench.together(connection.ranks, connection.control)
    steps = bench.args.warm + bench.args.steps
    received = (connection.ranks.received_bytes - before) // steps
    silent = bench.together(CopyingRanks(rank, size), Control(OneRank()))
    dist.barrier()
    communication = bench.communication()
    exposed = max(0.0, together - silent)
    return {
        "rows": bench.sequence.num_rows,
        "one_rank_step_s": alone,
        "step_s": together,
        "step_without_communication_s": silent,
        "communication_alone_s": communication,
        "communication_exposed_s": exposed,
        "communication_hidden_s": max(0.0, communication - exposed),
        "received_bytes_per_step": received,
        "expected_bytes_per_step": bench.expected_bytes(),
        "speedup": alone / together,
    }


@torch.inference_mode()
def main() -> int:
    args = _arguments()
    connection = shipped_connection(args.device)
    compute = choose_compute(args.device, args.bundle or Path(), bundle_kernels(args.bundle))
    shapes: dict[int, dict[str, Any]] = {}
    for frames in args.frames:
        shapes[frames] = measure(Bench(args, connection, compute, frames))
        if connection.environment.rank == 0:
            report(args, compute, shapes, connection.environment.size)
    connection.close()
    return 0


def report(args: argparse.Namespace, compute: Compute, shapes: dict[int, dict[str, Any]], size: int) -> None:
    """Of all shapes so far: a later one may be cut off."""
    slowest = min(shape["speedup"] for shape in shapes.values())
    figures = {
        "ranks": size, "scheme": "gathered hidden" if gathers_hidden(size) else "projected heads",
        "size": args.size, "compute": compute.facts, "frames": {str(f): s for f, s in shapes.items()},
    }  # fmt: skip
    targets = {f"sp{size}_denoise_speedup": target(round(slowest, 4), 1.85, "higher")}
    print(json.dumps({"figures": figures, "targets": targets}, indent=1), flush=True)
    if args.name:
        print(write_result(args.name, figures, targets, command=ranks_command(size)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="full")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="1344x768")
    parser.add_argument(
        "--frames", type=lambda text: [int(part) for part in text.split(",")], default=[124, 243]
    )
    parser.add_argument("--text", type=int, default=1024, help="text rows")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--chunk-rows", type=int, default=6144)
    parser.add_argument("--bundle", type=Path, help="prepared directory whose kernels are used")
    parser.add_argument("--name", default="", help="result file under scripts/bench/results/; none without")
    args = parser.parse_args()
    args.dtype = "BF16" if args.device == "cuda" else "F32"
    return args


if __name__ == "__main__":
    raise SystemExit(main())
