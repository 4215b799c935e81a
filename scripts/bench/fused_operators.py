"""Fused operators on one GPU: correctness, then eager, ours, a library's and a copy of the same bytes.

    python -m scripts.bench.fused_operators                        # everything, about a minute on an H200
    python -m scripts.bench.fused_operators --tune norm_modulate   # every tuning of one operator, taking turns

Compiles the kernels of every tuning in child processes (this one never imports triton), checks each operator on fresh
random inputs against float64 and the eager form with outputs poisoned by NaN, times each through CUDA graphs over
buffers that do not fit the L2 cache, prints a table and writes `results/fused_operators.json` after every operator. Its
`complete` and `missing` say whether all of it is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.catalog import OPERATORS, SHIPPED, architecture_of, num_tunings
from kernels.cubin import KernelSet, load_kernels
from kernels.cubin_index import for_architecture, read_index
from kernels.driver import CudaDriver
from kernels.ops import Operators
from scripts.bench.common import target, write_result
from scripts.bench.fused_cases import CASES, LIBRARIES, Case, Inputs, clone
from scripts.bench.fused_decoder_cases import DECODER_CASES
from scripts.bench.fused_report import print_table, print_tuning, summarise, targets
from scripts.bench.progress import Progress

ROOT = Path(__file__).parents[2]
_FIRST = 5  # cases of a DiT block; the decoder's follow, then the rest
ALL_CASES: Mapping[str, Case] = dict(
    [*list(CASES.items())[:_FIRST], *DECODER_CASES.items(), *list(CASES.items())[_FIRST:]]
)
# The CPU is for dry runs over Triton's interpreter; its times mean nothing.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION_ROWS = 22519
_COMPILE_S = 60  # what compiles longer is left out; 3 to 15 s are normal
# Distinct buffers must exceed the 60 MB L2 several times, or repeated runs measure the cache.
WORKING_SET = 512 * 2**20
# bf16 results against float64: up to five roundings of 2^-9, added in quadrature and doubled for cancellation.
EXACT_TOLERANCE = 1e-2
# Elements that may differ from eager by a step: the order of a norm's sum and the last bits of exp.
FLIP_TOLERANCE = 5e-3


def compile_tunings(
    folder: Path, architecture: str, tunings: Sequence[int], operators: Sequence[str] = ()
) -> dict[int, Path]:
    """Tuning -> folder of cubins, compiled at the same time; what did not compile is missing, with a line.

    Args:
        operators: only these; none: all that have the tuning, and tuning 0 of all.
    """
    jobs = str(max(1, (os.cpu_count() or 1) // len(tunings)))
    children = {}
    for tuning in tunings:
        command = [
            sys.executable,
            "-m",
            "kernels.aot.compile",
            "--architecture",
            architecture,
            "--jobs",
            jobs,
        ]
        command += ["--tuning", str(tuning), "--out", str(folder / str(tuning))]
        names = operators or [name for name, operator in OPERATORS.items() if tuning < len(operator.tunings)]
        command += [part for name in names for part in ("--operator", name)]
        children[tuning] = subprocess.Popen(command, cwd=ROOT)
    end = time.monotonic() + _COMPILE_S
    failed = [tuning for tuning, child in children.items() if _ending(child, end) != 0]
    if failed:
        print(f"tunings {failed} did not compile", file=sys.stderr)
    return {tuning: folder / str(tuning) for tuning in tunings if tuning not in failed}


def _ending(child: subprocess.Popen[bytes], end: float) -> int:
    try:
        return child.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def load(folder: Path, architecture: str, figures: dict[str, Any]) -> KernelSet:
    """A bound set; the first one's times are what a worker pays."""
    start = time.perf_counter()
    kernels = load_kernels(
        folder, for_architecture(read_index(folder), architecture), architecture, CudaDriver()
    )
    loaded = time.perf_counter()
    kernels.bind()
    figures.setdefault("load_ms", round((loaded - start) * 1e3, 2))
    figures.setdefault("bind_ms", round((time.perf_counter() - loaded) * 1e3, 2))
    return kernels


def check(case: Case, operators: Any, rows: int, seed: int) -> dict[str, float]:
    """Errors on fresh inputs. Raises AssertionError on an unwritten element, a fallback or too large an error."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    inputs = case.make(rows, generator)
    exact, eager = case.exact(inputs), case.run(case.eager, clone(inputs))
    operators.fallbacks.clear()
    torch._C._set_deterministic_algorithms(
        True, warn_only=True
    )  # new memory is NaN; the public call imports triton
    assert bool(torch.empty(4, device=DEVICE).isnan().all()), "outputs are not poisoned"
    try:
        ours = case.run(operators, clone(inputs))
        if case.method == "qk_norm_rope":  # in place nothing can be poisoned: ask for a new buffer too
            width = (inputs["num_heads"] + inputs["num_kv_heads"]) * inputs["q_weight"].shape[0]
            out = torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
            apart = case.run(operators, clone(inputs) | {"out": out})
            assert all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True)), "in place differs"
        if case.operator.name == "swiglu":
            placed = case.run(operators, clone(inputs) | {"in_place": True})
            assert torch.equal(ours[0], placed[0]), "in place differs"
        _synchronize()
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert not operators.fallbacks, operators.fallbacks
    result = {
        "error": max(_relative(a, b) for a, b in zip(ours, exact, strict=True)),
        "eager_error": max(_relative(a, b) for a, b in zip(eager, exact, strict=True)),
        "flips": max(float((a != b).float().mean()) for a, b in zip(ours, eager, strict=True)),
    }
    assert all(bool(torch.isfinite(tensor).all()) for tensor in ours), "an element was not written"
    assert result["error"] < EXACT_TOLERANCE, result
    assert result["flips"] <= max(FLIP_TOLERANCE, 2 / ours[0].numel()), result
    return result


def _relative(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def time_graph(calls: Sequence[Callable[[], Any]], repeats: int) -> tuple[float, float]:
    """Median and least microseconds of one call: all of `calls` captured once, replayed `repeats` times.

    Results stay alive during capture, so every call writes memory of its own. The CPU calls them all, once.
    """
    if DEVICE == "cpu":
        seconds = time.perf_counter()
        for call in calls:
            call()
        microseconds = (time.perf_counter() - seconds) / len(calls) * 1e6
        return microseconds, microseconds
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept, graph
    return statistics.median(times), min(times)


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def buffers(case: Case, rows: int) -> list[Inputs]:
    count = min(24, max(3, -(-WORKING_SET // (case.row_bytes * rows)))) if DEVICE == "cuda" else 1
    generator = torch.Generator(DEVICE).manual_seed(rows)
    first = case.make(rows, generator)
    return [first] + [clone_rows(first) for _ in range(count - 1)]


def clone_rows(inputs: Inputs) -> Inputs:
    """Copies of the large operands; tables and weights are shared, as between the rows of one block."""
    return {
        name: value.clone() if isinstance(value, Tensor) and value.numel() > 2**20 else value
        for name, value in inputs.items()
    }


def time_copy(bytes_moved: int, repeats: int = 20) -> float:
    """Microseconds of a device copy that reads and writes `bytes_moved` in all: the faster of the driver's copy
    (2.8 TB/s inside a graph on an H200) and an elementwise kernel over the same bytes, 16 at a time: on bytes one by
    one torch's kernel is a fifth slower."""
    numbers = bytes_moved // 8
    count = min(24, max(3, -(-WORKING_SET // bytes_moved)))
    pairs = [(torch.randn(numbers, device=DEVICE), torch.empty(numbers, device=DEVICE)) for _ in range(count)]
    engine = time_graph([partial(target.copy_, source) for source, target in pairs], repeats)[0]
    kernel = time_graph([partial(torch.neg, source, out=target) for source, target in pairs], repeats)[0]
    return min(engine, kernel)


def library_call(case: Case) -> Callable[[Inputs], Any] | None:
    """FlashInfer's operator for the case, where the package is installed and has one (`flashinfer_carry` makes it fit).

    It is compiled when it is first called, before anything is timed; that needs nvcc and ninja.
    """
    try:
        import flashinfer
    except ImportError:
        return None
    if (
        case.operator.name == "swiglu"
    ):  # gate first, one rounding: not the reference numerics, but the same bytes
        return lambda inputs: flashinfer.silu_and_mul(inputs["buffer"])
    if case.method == "rms_norm":
        return lambda inputs: flashinfer.norm.rmsnorm(inputs["x"], inputs["weight"], inputs["eps"])
    return None


def time_case(
    case: Case, rows: int, sets: Mapping[int, KernelSet], stop: float, repeats: int = 25
) -> dict[str, Any]:
    """All times of one case at one row count, in microseconds.

    What ships is timed first; other tunings and the library are skipped when `stop` (of `time.perf_counter`) has passed.
    """
    bytes_moved = case.row_bytes * rows
    inputs = buffers(case, rows)
    copied = time_copy(bytes_moved)
    result: dict[str, Any] = {"rows": rows, "bytes": bytes_moved, "copy_us": copied, "tunings": {}}
    for number in _in_order(case, sets):
        if result["tunings"] and time.perf_counter() > stop:
            continue
        operators = case.fused(sets[number])
        median, least = time_graph([partial(case.run, operators, item) for item in inputs], repeats)
        result["tunings"][number] = {"us": median, "least_us": least}
    eager = inputs[: max(2, len(inputs) // 4)]
    result["eager_us"] = time_graph([partial(case.run, case.eager, item) for item in eager], 5)[0]
    call = library_call(case)
    if call is not None and time.perf_counter() < stop:
        try:
            result["library_us"] = time_graph([partial(call, item) for item in inputs], 20)[0]
        except Exception as cause:  # noqa: BLE001  a library's failure must not cost our own figures
            result["library_error"] = repr(cause)
    return result


def shipped_tuning(case: Case, sets: Mapping[int, KernelSet]) -> int:
    (architecture,) = {kernels.architecture for kernels in sets.values()}
    return SHIPPED[architecture].get(case.operator.name, 0)


def _in_order(case: Case, sets: Mapping[int, KernelSet]) -> list[int]:
    """The tunings of a case that are there; what ships comes first."""
    shipped = shipped_tuning(case, sets)
    numbers = [number for number in sets if number < len(case.operator.tunings)]
    return sorted(numbers, key=lambda number: (number != shipped, number))


def host_cost(kernels: KernelSet, count: int = 500) -> dict[str, float]:
    """Microseconds of host time a call: a whole operator, and the launch alone, at one row."""
    case = CASES["norm_modulate"]
    inputs = case.make(1, torch.Generator(DEVICE).manual_seed(1))
    operators, kernel = Operators(kernels), kernels.find("norm_modulate", 5376)
    assert kernel is not None
    stream = torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0
    x, out = inputs["x"], torch.empty_like(inputs["x"])
    addresses = [inputs[name].data_ptr() for name in ("weight", "shift", "scale", "index")]
    strides = (x.stride(0), inputs["shift"].stride(0), out.stride(0))
    values = (x.data_ptr(), *addresses, out.data_ptr(), *strides, len(x), 1e-5)
    return {
        "operator_us": _host_us(lambda: case.run(operators, inputs), count),
        "launch_us": _host_us(lambda: kernel.launch(1, stream, *values), count),
    }


def _host_us(call: Callable[[], Any], count: int) -> float:
    """Fewer calls than the driver's queue holds, so that the host never waits for the device."""
    times = []
    for _ in range(5):
        _synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return min(times)


def attention_figures(rows: int) -> dict[str, Any]:
    """torch's attention: what the warm-up takes off the first step, and the backends' steady times."""
    from kernels.attention import AttentionChoice, DenseAttention, choose_backend, warm_up

    device = torch.device("cuda")
    shape = {"num_heads": 56, "head_dim": 128, "device": device, "dtype": torch.bfloat16}
    choice = choose_backend(device, torch.bfloat16)
    attention = DenseAttention(choice)
    result: dict[str, Any] = {"backend": choice.backend, "reason": choice.reason, "rows": rows}
    for name, count in (("first_call_s", rows), ("second_call_s", rows), ("new_length_s", rows - 7)):
        start = time.perf_counter()
        warm_up(attention, num_rows=count, **shape)  # type: ignore[arg-type]
        result[name] = round(time.perf_counter() - start, 4)
    generator = torch.Generator(DEVICE).manual_seed(2)
    qkv = torch.randn(rows, 3, 56, 128, generator=generator, device=device, dtype=torch.bfloat16)
    q, k, v = qkv.unbind(1)
    out = attention(q, k, v)
    some = slice(0, rows, max(1, rows // 50))
    scores = torch.einsum("shk,thk->hst", q[some, :4].double(), k[:, :4].double()) * 128**-0.5
    exact = torch.einsum("hst,thk->shk", scores.softmax(-1), v[:, :4].double())
    result["error"] = _relative(out[some, :4], exact)
    for name in ("cudnn", "flash"):
        one = DenseAttention(AttentionChoice(name, "bench"))  # type: ignore[arg-type]
        result[f"{name}_ms"] = round(time_graph([partial(one, q, k, v)], 5)[0] / 1e3, 3)
    return result


def run_case(case: Case, sets: Mapping[int, KernelSet], bandwidth: float, stop: float) -> dict[str, Any]:
    """Checks and times of what ships, then of the other tunings. A failure is a figure, not the end of the bench."""
    result: dict[str, Any] = {"checks": {}, "timed": {}}
    try:
        for place, number in enumerate(_in_order(case, sets)):
            for rows in case.check_rows if place == 0 else case.check_rows[1:2]:
                operators = case.fused(sets[number])
                result["checks"][f"{number}@{rows}"] = check(case, operators, rows, seed=rows + number)
        for rows in case.timed_rows:
            timed = time_case(case, rows, sets, stop)
            result["timed"][str(rows)] = summarise(timed, bandwidth, shipped_tuning(case, sets))
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    except Exception as cause:  # noqa: BLE001  reported in the table, the other operators still run
        result["failed"] = f"{type(cause).__name__}: {cause}"
        traceback.print_exc()
    return result


def tune(
    case: Case,
    sets: Mapping[int, KernelSet],
    bandwidth: float,
    rounds: int,
    check_rows: Sequence[int] = (),
    timed_rows: Sequence[int] = (),
) -> dict[str, Any]:
    """Checks and times every tuning of one operator. Tunings take turns, so that none has the cooler clock."""
    result: dict[str, Any] = {"checks": {}, "timed": {}}
    for number, kernels in sets.items():
        for rows in check_rows or case.check_rows:
            operators = case.fused(kernels)
            result["checks"][f"{number}@{rows}"] = check(case, operators, rows, seed=rows + number)
    for rows in timed_rows or case.timed_rows:
        inputs = buffers(case, rows)
        times: dict[int, list[float]] = {number: [] for number in sets}
        for _ in range(rounds):
            for number, kernels in sets.items():
                calls = [partial(case.run, case.fused(kernels), item) for item in inputs]
                times[number].append(round(time_graph(calls, 25)[0], 3))
        medians = {number: statistics.median(values) for number, values in times.items()}
        best = min(medians, key=lambda number: medians[number])
        floor = case.row_bytes * rows / bandwidth * 1e6
        result["timed"][str(rows)] = {
            "us": times,
            "median_us": medians,
            "best": best,
            "best_us": medians[best],
            "share": floor / medians[best],
        }
        del inputs
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return result


def run_tuning(name: str, architecture: str, rounds: int) -> None:
    """Prints which index belongs into `kernels.catalog.SHIPPED`, and writes `results/tune_<operator>.json`."""
    case = ALL_CASES[name]
    tunings = case.operator.tunings
    figures: dict[str, Any] = {"architecture": architecture, "tunings": [t._asdict() for t in tunings]}
    with tempfile.TemporaryDirectory() as scratch:
        folders = compile_tunings(Path(scratch), architecture, range(len(tunings)), [case.operator.name])
        torch.zeros(1, device="cuda")
        sets = {number: load(folder, architecture, figures) for number, folder in folders.items()}
        entries = {number: read_index(folder)[0] for number, folder in folders.items()}
    figures["registers"] = {number: [e.registers, e.stack_bytes] for number, e in entries.items()}
    copied = 4 * 2**30
    bandwidth = copied / time_copy(copied, 5) * 1e6
    figures |= {"copy_tbps": bandwidth / 1e12, **tune(case, sets, bandwidth, rounds)}
    small = figures["timed"][str(case.timed_rows[0])]
    goals = (
        {} if case.goal_us is None else {f"fused_{name}_us": target(small["best_us"], case.goal_us, "lower")}
    )
    path = write_result(f"tune_{name}", figures, goals)
    if out := os.environ.get("OUT"):
        shutil.copy(path, out)
    print_tuning(case, architecture, figures["timed"])


def write_figures(figures: dict[str, Any]) -> None:
    """The result file, and a copy where the device machine collects files."""
    path = write_result(
        "fused_operators", figures, targets(figures, CASES), "python -m scripts.bench.fused_operators"
    )
    if out := os.environ.get("OUT"):
        shutil.copy(path, out)


class Run:
    """The whole bench: figures so far, and what is not among them. Written after every case.

    figures["complete"] is True only when every part that was asked for was measured and none failed.
    """

    def __init__(
        self,
        cases: Mapping[str, Case],
        progress: Progress,
        write: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.progress, self._cases, self._write = progress, cases, write or write_figures
        self.figures: dict[str, Any] = {"complete": False, "missing": [], "cases": {}, "libraries": LIBRARIES}

    def measure(
        self, sets: Mapping[int, KernelSet], bandwidth: float, others: Mapping[str, Callable[[], Any]]
    ) -> None:
        """All cases, then the other figures. No case is begun when the budget is spent; tunings end at two thirds."""
        figures = self.figures
        figures["copy_tbps"] = bandwidth / 1e12
        soft = time.perf_counter() + self.progress.left_s * 2 / 3
        for name, case in self._cases.items():
            if self.progress.left_s <= 0:
                break
            self.progress.say(name)
            figures["cases"][name] = run_case(case, sets, bandwidth, soft)
            self._save(others)
        for name, take in others.items():
            self.progress.say(name)
            figures[name] = self._guarded(take)
        figures["triton_imported"] = "triton" in sys.modules
        self._save(others)

    def _save(self, others: Iterable[str]) -> None:
        figures = self.figures
        measured = figures["cases"] | {name: figures[name] for name in others if name in figures}
        wanted = [*self._cases, *others]
        figures["missing"] = [
            name for name in wanted if "failed" in measured.get(name, {"failed": "not begun"})
        ]
        figures["complete"] = not figures["missing"]
        self._write(figures)

    def _guarded(self, take: Callable[[], Any]) -> Any:
        if self.progress.left_s <= 0:
            return {"failed": "out of time"}
        try:
            return take()
        except Exception as cause:  # noqa: BLE001  costs only itself
            traceback.print_exc()
            return {"failed": f"{type(cause).__name__}: {cause}"}


def main() -> int:
    """1 if anything is missing."""
    options = _options()
    progress = Progress(options.budget_s)
    architecture = architecture_of(torch.cuda.get_device_capability())
    if options.tune:
        run_tuning(options.tune, architecture, options.rounds)
        return 0
    run = Run({name: ALL_CASES[name] for name in options.operators}, progress)
    figures = run.figures
    figures["architecture"] = architecture
    with tempfile.TemporaryDirectory() as scratch:
        if options.kernels is not None:
            folders = {tuning: options.kernels / str(tuning) for tuning in options.tunings}
        else:
            progress.say(f"compiling {len(options.tunings)} tunings for {architecture}")
            folders = compile_tunings(Path(scratch), architecture, options.tunings)
        figures["compile_s"] = round(progress.seconds, 1)
        progress.say("loading")
        torch.zeros(1, device="cuda")
        sets = {number: load(folder, architecture, figures) for number, folder in folders.items()}
        entries = read_index(next(iter(folders.values())))
    figures["compiler"] = dict(entries[0].compiler)
    figures["registers"] = {entry.title: entry.registers for entry in entries}
    copied = 4 * 2**30
    bandwidth = copied / time_copy(copied, 5) * 1e6
    first = next(iter(sets.values()))
    run.measure(
        sets,
        bandwidth,
        {"host": lambda: host_cost(first), "attention": lambda: attention_figures(ATTENTION_ROWS)},
    )
    print_table(figures)
    progress.say(f"missing: {', '.join(figures['missing']) or 'nothing'}")
    return int(not figures["complete"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tunings", type=int, nargs="*", default=list(range(num_tunings())))
    parser.add_argument("--kernels", type=Path, help="folders 0, 1, … compiled before, instead of compiling")
    parser.add_argument("--operators", nargs="*", choices=sorted(ALL_CASES), default=list(ALL_CASES))
    parser.add_argument(
        "--budget-s", type=float, default=85, help="no operator is begun later; tunings end at two thirds"
    )
    parser.add_argument("--tune", choices=sorted(ALL_CASES), help="only this operator, all of its tunings")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each tuning with --tune")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
