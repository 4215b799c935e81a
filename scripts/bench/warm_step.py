"""A warm step of the released model on one GPU: against diffusers, against measured rates, and as a CUDA graph.

    python -m scripts.bench.warm_step                              # everything, about two minutes on an H200
    python -m scripts.bench.warm_step --part steps --tokens 1000   # ours and diffusers only
    python -m scripts.bench.warm_step --preset test --device cpu --size 64x64 --num-frames 22 --tokens 7 9

`shipped` is what a worker on this machine runs (`choose_backend` with `auto`), and what targets, profile and graph are about;
the other attention backends run beside it where they can. All weights are random and made on the device, once for both implementations (`step_model`). Steps of all variants take turns,
so that clocks and heat are the same for all. Parts: `steps` (every variant and diffusers), `rates` (products, attention
and copy alone, sustained, and the model made of them), `profile` (time by kernel), `graph` (capture and replay). Each part is
written when it ends. `results/warm_step.json` is written by a full run at released size only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.attention import AttentionChoice, DenseAttention, choose_backend, warm_up
from kernels.catalog import architecture_of
from kernels.cubin import load_kernels
from kernels.cubin_index import for_architecture, read_index
from kernels.driver import CudaDriver
from kernels.ops import Operators
from loader.errors import CapabilityError
from runtime.families.minimax_h3.model.fused_block import FusedBlock
from runtime.families.minimax_h3.model.pending import settled
from runtime.families.minimax_h3.model.transformer import BlockForward
from runtime.ops.attention import Attention
from scripts.bench import step_rates as rates
from scripts.bench.common import target, write_result
from scripts.bench.step_model import (
    Evaluation,
    RandomWeights,
    make_evaluation,
    own_step,
    peer_model,
    peer_step,
)
from scripts.tiny_presets import preset

ROOT = Path(__file__).parents[2]
PARTS = ("steps", "rates", "profile", "graph")
PEER = "diffusers"
BACKENDS = ("cudnn", "flash3")
OPERATORS = ("norm_modulate", "gate_norm_modulate", "gate_residual", "qk_norm_rope", "swiglu")
# Two implementations of 50 bf16 blocks: roundings in another order, amplified by the depth.
CLOSE = 0.1


@dataclass(frozen=True)
class Variant:
    """One way to run our step. library: for products, see `step_rates.blas_library`."""

    name: str
    attention: Attention
    block: BlockForward
    library: str = "default"


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.config = preset(args.preset).model
        self.dtype = torch.float32 if args.dtype == "F32" else torch.bfloat16
        self.begun = time.perf_counter()
        self.figures: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
        self.targets: dict[str, Any] = {}
        self.operators = self._operators()
        with self._timed("weights"):
            self.weights = RandomWeights(self.config, self.device, args.dtype, "steps" in args.part)
            rates.synchronize(self.device)
        self.variants = self._variants()
        self.last: dict[str, Any] = {}

    def run(self) -> None:
        for part in self.args.part:
            with self._timed(part):
                getattr(self, f"_{part}")()
            self._write()
        print(json.dumps({"figures": self.figures, "targets": self.targets}, indent=1))

    def _timed(self, name: str) -> _Timed:
        return _Timed(self.figures, name)

    def _operators(self) -> Operators:
        """Fused operators of this device, compiled in a child process unless given; eager on the CPU."""
        if self.device != "cuda":
            return Operators()
        architecture = architecture_of(torch.cuda.get_device_capability())
        with tempfile.TemporaryDirectory() as scratch, self._timed("kernels"):
            folder = self.args.kernels or Path(scratch)
            if self.args.kernels is None:
                command = [sys.executable, "-m", "kernels.aot.compile", "--architecture", architecture]
                command += ["--out", scratch, *(part for name in OPERATORS for part in ("--operator", name))]
                subprocess.run(command, cwd=ROOT, check=True)
            torch.zeros(1, device="cuda")  # the context
            kernels = load_kernels(
                folder, for_architecture(read_index(folder), architecture), architecture, CudaDriver()
            )
            kernels.bind()
        return Operators(kernels)

    def _variants(self) -> dict[str, Variant]:
        """What ships first. One that cannot run here is noted with its reason."""
        block = FusedBlock(self.operators)
        device = torch.device(self.device)
        shipped = self._attention(choose_backend(device, self.dtype, self.args.ships))
        self.figures["attention"] = str(shipped.choice)
        found = [
            Variant("shipped", shipped, block),
            Variant("separate", shipped, lambda *given: settled(block(*given))),
            Variant("cublaslt", shipped, block, "cublaslt"),
        ]
        for name in BACKENDS:
            if name == shipped.choice.backend:
                continue
            try:
                other = self._attention(choose_backend(device, self.dtype, name))
                found.insert(1, Variant(name, other, block))
            except (CapabilityError, RuntimeError) as error:  # the second: an operator that refuses its call
                self.figures[name] = str(error)
        return {variant.name: variant for variant in found}

    def _attention(self, choice: AttentionChoice) -> DenseAttention:
        """Warmed up on a few rows, after which its choice is final."""
        attention = DenseAttention(choice)
        warm_up(
            attention,
            num_rows=8,
            num_heads=1,
            head_dim=64,
            device=torch.device(self.device),
            dtype=self.dtype,
        )
        return attention

    def _rivals(self) -> list[str]:
        """Variants that differ in attention, what ships first."""
        return [name for name in self.variants if name in ("shipped", *BACKENDS)]

    def _steps(self) -> None:
        """Seconds of a step of every variant and of diffusers, in turns; at further lengths only those that differ in attention."""
        peer = peer_model(self.config, self.weights, self.device)
        figures: dict[str, Any] = {}
        self.figures["steps"] = figures
        for number, tokens in enumerate(self.args.tokens):
            given = self._evaluation(tokens)
            names = self._rivals() if number else list(self.variants)
            steps = {name: self._step(self.variants[name], given) for name in names}
            steps[PEER] = peer_step(peer, given)
            rows = given.sequence.num_rows
            figures[str(rows)] = self._take_turns(steps, self.args.rounds) | {
                "tokens": tokens,
                **self._agreement(names),
            }
        del peer
        self._peer_targets(figures)

    def _evaluation(self, tokens: int) -> Evaluation:
        args = self.args
        return make_evaluation(self.config, self.device, self.dtype, tokens, args.size, args.num_frames)

    def _step(self, variant: Variant, given: Evaluation) -> Callable[[], Any]:
        step = own_step(self.config, self.weights, given, variant.attention, variant.block)

        def with_library() -> Any:
            with rates.blas_library(variant.library, self.device):
                return step()

        return with_library

    def _take_turns(self, steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
        """Every name's seconds in order, the first not counted in the median."""
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 1):
            for name, step in steps.items():
                if number > 1 and time.perf_counter() - self.begun > self.args.budget_s:
                    continue
                rates.synchronize(self.device)
                begun = time.perf_counter()
                self.last[name] = step()
                rates.synchronize(self.device)
                seconds[name].append(round(time.perf_counter() - begun, 5))
        return {
            name: {"median_s": round(statistics.median(values[1:]), 5), "first_s": values[0], "all_s": values}
            for name, values in seconds.items()
        }

    def _agreement(self, names: Sequence[str]) -> dict[str, Any]:
        """Norm of the difference to diffusers' velocity over its norm. A variant that is wrong is a figure here, not an
        end of the run; the dry run on the CPU asks for equality up to float32."""
        expected = _flat(self.last[PEER])
        found = {}
        for name in names:
            difference = float((_flat(self.last[name]) - expected).norm() / expected.norm())
            found[name] = difference if math.isfinite(difference) else 1e9
        return {"difference_to_diffusers": found, "agrees": max(found.values()) < CLOSE}

    def _peer_targets(self, figures: dict[str, Any]) -> None:
        self.figures["vs_diffusers"] = {
            name: {
                rows: round(part[PEER]["median_s"] / part[name]["median_s"], 4)
                for rows, part in figures.items()
                if name in part
            }
            for name in self.variants
        }
        ratios = self.figures["vs_diffusers"]["shipped"]
        rows = next(iter(ratios))
        note = f"{rows} rows; same rows, weights and prompt length in one process, steps in turns; other lengths: {ratios}"
        self.targets["warm_step_vs_diffusers"] = target(ratios[rows], 1.15, "higher", note=note)

    def _rates(self) -> None:
        """Products, attention and copy alone; with a measured step, what part of it they explain."""
        args, c = self.args, self.config.transformer
        rows = self._evaluation(args.tokens[0]).sequence.num_rows
        products = rates.product_seconds(c, rows, self.device, self.dtype, args.sustain_s)
        attention = {
            name: rates.attention_seconds(
                self.variants[name].attention, c, rows, self.device, self.dtype, args.sustain_s
            )
            for name in self._rivals()
        }
        size = (4 << 30) if self.device == "cuda" else (1 << 20)
        copy = rates.copy_bytes_per_s(self.device, size, args.sustain_s)
        operations = rates.block_operations(c, rows)
        alone = {
            "products_s": c.num_layers * sum(products["default"].values()),
            "attention_s": c.num_layers * attention["shipped"]["interleaved"],
            "rest_s": c.num_layers * rates.block_bytes(c, rows, self.dtype.itemsize) / copy,
        }
        self.figures["rates"] = {
            "rows": rows,
            "operations_per_block": operations,
            "products_ms": _milliseconds(products),
            "products_tflops": {
                library: {name: round(operations[name] / s / 1e12, 1) for name, s in times.items()}
                for library, times in products.items()
            },
            "attention_ms": _milliseconds(attention),
            "attention_tflops": {
                name: {layout: round(operations["attention"] / s / 1e12, 1) for layout, s in times.items()}
                for name, times in attention.items()
            },
            "copy_tbps": round(copy / 1e12, 4),
            "model": {name: round(value, 5) for name, value in alone.items()},
        }
        self._rate_targets(rows, alone)

    def _rate_targets(self, rows: int, alone: dict[str, float]) -> None:
        measured = self.figures.get("steps", {}).get(str(rows))
        if measured is None:
            return
        step = measured["shipped"]["median_s"]
        explained = alone["products_s"] + alone["attention_s"]
        model = self.figures["rates"]["model"]
        model["step_s"] = step
        model["shares_of_step"] = {name: round(value / step, 4) for name, value in alone.items()}
        model["step_over_model"] = round(step / sum(alone.values()), 4)
        note = "products and attention alone, sustained in the same process, over the step"
        self.targets["warm_step_vs_rates"] = target(round(explained / step, 4), 0.9, "higher", note=note)

    def _profile(self) -> None:
        given = self._evaluation(self.args.tokens[0])
        figures: dict[str, Any] = {"rows": given.sequence.num_rows}
        self.figures["profile"] = figures
        step = self._step(self.variants["shipped"], given)
        step()
        try:
            figures |= rates.profile(step, self.device)
        except Exception as error:  # noqa: BLE001  a profiler that is not allowed here costs no other figure
            figures["error"] = repr(error)

    def _graph(self) -> None:
        """Capture and replay of the whole step against launching it, on the same memory otherwise."""
        if self.device != "cuda":
            self.figures["graph"] = {"skipped": f"device is {self.device}"}
            return
        given = self._evaluation(self.args.tokens[-1])
        step = self._step(self.variants["shipped"], given)
        step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        begun = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = step()
        captured = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        first = time.perf_counter()
        turns = self._take_turns({"eager": step, "graph": graph.replay}, rounds=1)
        torch.cuda.synchronize()
        launched = time.perf_counter()
        step()
        launched = time.perf_counter() - launched
        torch.cuda.synchronize()
        self.figures["graph"] = {
            "rows": given.sequence.num_rows,
            "capture_s": round(captured - begun, 4),
            "first_replay_s": round(first - captured, 4),
            "eager_launch_s": round(launched, 4),
            "is_equal": bool(torch.equal(_flat(kept), _flat(self.last["eager"]))),
            **turns,
            "saved_s": round(turns["eager"]["median_s"] - turns["graph"]["median_s"], 5),
        }

    def _write(self) -> None:
        """What there is so far."""
        if self.args.name and self.args.preset == "full":
            print(write_result(self.args.name, self.figures, self.targets), flush=True)


class _Timed:
    """Notes how long a part of the bench took."""

    def __init__(self, figures: dict[str, Any], name: str) -> None:
        self._figures, self._name = figures.setdefault("bench_s", {}), name

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._figures[self._name] = round(time.perf_counter() - self._begun, 2)


def _flat(velocity: Any) -> torch.Tensor:
    return torch.cat([part.flatten() for part in velocity])


def _milliseconds(seconds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {key: round(value * 1e3, 4) for key, value in times.items()} for name, times in seconds.items()
    }


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    Bench(_parser().parse_args(arguments)).run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--preset", default="full")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="BF16", choices=("BF16", "F32"))
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[793, 1000], help="prompt tokens: 22,519 and 22,726 rows"
    )
    parser.add_argument("--size", default="768x768")
    parser.add_argument("--num-frames", type=int, default=124)
    parser.add_argument("--rounds", type=int, default=2, help="counted steps of each variant")
    parser.add_argument("--sustain-s", type=float, default=0.4, help="time of one rate measurement")
    parser.add_argument("--budget-s", type=float, default=130, help="no further counted step after this long")
    parser.add_argument(
        "--ships", default="auto", choices=("auto", *BACKENDS), help="attention of the variant `shipped`"
    )
    parser.add_argument("--kernels", type=Path, help="folder with index.json instead of compiling")
    parser.add_argument("--name", default="warm_step", help="result file (full preset only); empty for none")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
