"""One fresh process of `first_use`: import torch as a worker does, then what a start pays on first use.

Prints one JSON object: seconds, wall and processor time, of everything that was timed, in order. The nodes that run are
those of `runtime.nodes`; only the load is missing, and every layer of the conditioner has the same zeros.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runtime.nodes import WorkerStart
from runtime.settings import Settings
from runtime.startup import MAIN, Graph, Node, Results
from runtime.timeline import Timeline
from runtime.torch_preload import let_openmp_sleep, start_preload

_GRAPH = (
    "torch", "torch check", "engine", "models", "kernels", "compute", "native kernels", "native warm-up", "library warm-up", "conditioner warm-up",
    "warm-up",
)  # fmt: skip
_LAYERS = "text_encoder/layers."


class Clock:
    """Wall time, and processor time of all threads, by name; the device is waited for at both ends."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self._device = device

    @contextmanager
    def timed(self, name: str, wait: bool = True) -> Iterator[None]:
        if wait:
            synchronize(self._device)
        wall, cpu = time.monotonic(), time.process_time()
        yield
        if wait:
            synchronize(self._device)
        self.seconds[name] = {
            "wall_s": round(time.monotonic() - wall, 5),
            "cpu_s": round(time.process_time() - cpu, 5),
        }


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


class BenchStart(WorkerStart):
    """A start without a load.

    Args:
        after_import: called when torch has been imported. has_weights: what `has_time` sees of the load.
    """

    def __init__(
        self, settings: Settings, timeline: Timeline, after_import: Callable[[], None], has_weights: bool
    ) -> None:
        super().__init__(settings, timeline, {}, None, None)
        self._after_import = after_import
        self.weights: Any = SimpleNamespace(
            ensure=lambda groups: None, is_ready=lambda group: has_weights, close=lambda: None
        )

    @property
    def has_first_uses(self) -> bool:
        """On a CPU as well, to try everything."""
        return True

    def torch(self, results: Results) -> None:
        super().torch(results)
        self._after_import()


class SameLayers:
    """A WeightSource of zeros in which every text layer is the first one's memory."""

    def __init__(self, zeros: Any) -> None:
        self._zeros = zeros

    def tensors(self, group: str) -> Mapping[str, Any]:
        if not group.startswith(_LAYERS):
            found: Mapping[str, Any] = self._zeros.tensors(group)
            return found
        number = group.removeprefix(_LAYERS)
        first = self._zeros.tensors(f"{_LAYERS}0")
        return {name.replace("layers.0.", f"layers.{number}."): tensor for name, tensor in first.items()}

    def rows(self, tensor: str, rows: Sequence[int]) -> Any:
        return self._zeros.rows(tensor, rows)

    def is_ready(self, group: str) -> bool:
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.switch_s:
        sys.setswitchinterval(args.switch_s)
    if args.no_gc:
        gc.disable()
    started = time.monotonic()
    settings = Settings(
        bundle=str(args.directory),
        device=args.device,
        warm_up=args.warm_up,
        native_warm_up=args.native,
        torch_trims="all",
    )
    if args.device == "cuda":
        let_openmp_sleep()
    context = threading.Thread(target=retain_context, args=(args.device,))
    context.start()
    start = BenchStart(settings, Timeline(), lambda: prefer_library(args.blas), has_weights=not args.early)
    start.preload = start_preload()
    given = prepared_parts(start, args)
    context.join()
    clock = Clock(start.device)
    run = run_parts if args.parts else run_graph
    facts = run(start, given, clock, args)
    report = {"seconds": clock.seconds, "process_s": round(time.monotonic() - started, 4), **facts}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # nothing here needs an orderly end, and unloading the device takes a while


def retain_context(device: str) -> None:
    """As the loader does, before torch is there."""
    if device == "cuda":
        from loader.cuda_library import CudaLibrary

        CudaLibrary().retain_context(0)


def prefer_library(name: str) -> None:
    if name:
        import torch

        torch.backends.cuda.preferred_blas_library(name)


def prepared_parts(start: BenchStart, args: argparse.Namespace) -> dict[str, Any]:
    """Results of the nodes that come before torch."""
    empty = Results()
    manifest = start.manifest(empty)
    family = start.family({"manifest": manifest})  # type: ignore[arg-type]
    body = {"prompt": args.prompt, "size": args.size, "num_frames": args.num_frames, "seed": 0}
    request = family.prepare(family.parse(body))
    return {"manifest": manifest, "family": family, "request": request, "load": None}


def run_graph(
    start: BenchStart, given: dict[str, Any], clock: Clock, args: argparse.Namespace
) -> dict[str, Any]:
    """The nodes as they run in a start, then the conditioner with all of its weights, then everything again."""
    own = [node for node in start.nodes() if node.name in _GRAPH and node.name not in args.without]
    known = {node.name for node in own} | set(given)
    nodes = [Node(name, lambda results, value=value: value) for name, value in given.items()]  # type: ignore[misc]
    for node in own:
        thread = MAIN if args.serial and node.thread == "libraries" else node.thread
        needs = tuple(need for need in node.needs if need in known)
        nodes.append(dataclasses.replace(node, thread=thread, needs=needs))
    with clock.timed("graph", wait=False):
        results = Graph(nodes, start.timeline).run()
    with clock.timed("left on the device", wait=False):
        synchronize(start.device)
    for name in ("conditioner", "conditioner again"):
        with clock.timed(name):
            condition(start, results)
    repeat(start, results, clock)
    spans = {
        span.name: {"start_s": _seconds(start, span.start_ns), "end_s": _seconds(start, span.end_ns)}
        for span in start.timeline.spans
        if span.name not in given
    }
    ready = start.timeline.seconds("torch_ready")
    assert ready is not None, "torch was imported"
    end = max(span["end_s"] for span in spans.values())
    left, conditioner = (clock.seconds[name]["wall_s"] for name in ("left on the device", "conditioner"))
    return {
        "spans": spans,
        "torch_ready_s": round(ready, 4),
        "graph_after_torch_s": round(end - ready, 4),
        "entry_after_torch_s": round(end - ready + left + conditioner, 4),
        "facts": start.timeline.facts,
    }


def _seconds(start: BenchStart, at_ns: int) -> float:
    return round((at_ns - start.timeline.origin_ns) / 1e9, 4)


def condition(start: BenchStart, results: Mapping[str, Any]) -> None:
    """The request's whole conditioner, which finds all weights there."""
    from runtime.families.minimax_h3.model.warm_up import ZeroWeights

    weights = SameLayers(ZeroWeights(results["manifest"], start.device))
    results["family"].start(results["request"], weights, results["compute"]).condition()


def repeat(start: BenchStart, results: Mapping[str, Any], clock: Clock) -> None:
    """Each warm-up once more: what is left of it is its own work."""
    family, request, compute = results["family"], results["request"], results["compute"]
    with clock.timed("library warm-up again"):
        family.warm_up_libraries(request, start.device)
    with clock.timed("conditioner warm-up again"):
        family.warm_up_conditioner(request, compute)
    with clock.timed("attention again"):
        family.warm_up(request, compute)
    for name in ("denoiser warm-up", "denoiser warm-up again"):
        with clock.timed(f"{name}, after all"):
            family.warm_up_denoiser(request, compute, ("memory", "step"))


def run_parts(
    start: BenchStart, given: dict[str, Any], clock: Clock, args: argparse.Namespace
) -> dict[str, Any]:
    """First uses one by one on one thread, in the order of a start, the device waited for after each."""
    results: Any = dict(given)
    with clock.timed("torch", wait=False):
        start.torch(results)
    from scripts.bench.first_use_parts import parts  # it imports torch

    for name, work in parts(start, results):
        with clock.timed(name):
            work()
    for name in ("conditioner", "conditioner again"):
        with clock.timed(name):
            condition(start, results)
    repeat(start, results, clock)
    return {"facts": start.timeline.facts}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", default="768x768")
    parser.add_argument("--num-frames", type=int, default=124)
    parser.add_argument("--prompt", default="a lamp sways in the rain while somebody hums")
    parser.add_argument("--parts", action="store_true", help="one by one instead of as the graph does")
    parser.add_argument("--serial", action="store_true", help="all warm-ups on the main thread")
    parser.add_argument("--without", action="append", default=[], help="leave a node out; repeatable")
    parser.add_argument("--native", default="auto", help="setting native_warm_up")
    parser.add_argument("--warm-up", default="all", help="setting warm_up")
    parser.add_argument("--early", action="store_true", help="no weights are there yet")
    parser.add_argument("--switch-s", type=float, default=0.0, help="interval of the interpreter's switches")
    parser.add_argument("--no-gc", action="store_true")
    parser.add_argument("--blas", choices=("", "cublas", "cublaslt"), default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
