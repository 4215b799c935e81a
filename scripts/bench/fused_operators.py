"""Fused operators on one GPU: correctness, then eager, ours, a library's and a copy of the same bytes.

    python -m scripts.bench.fused_operators                        # everything, about a minute on an H200
    python -m scripts.bench.fused_operators --tune norm_modulate   # every tuning of one operator, taking turns

Compiles the kernels of every tuning in child processes (this one never imports triton), checks each operator on fresh
random inputs against float64 and the eager form with outputs poisoned by NaN, times each through CUDA graphs over
buffers that do not fit the L2 cache, prints a table and writes `results/fused_operators.json`.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.catalog import OPERATORS, SHIPPED, architecture_of, num_tunings
from kernels.cubin import KernelSet, load_kernels
from kernels.cubin_index import for_architecture, read_index
from kernels.driver import CudaDriver
from kernels.ops import Operators
from scripts.bench.common import target, write_result
from scripts.bench.fused_cases import CASES, LIBRARIES, Case, Inputs, clone

ROOT = Path(__file__).parents[2]
# The CPU is for dry runs over Triton's interpreter; its times mean nothing.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECK_ROWS = (1, 63, 4722)
TIMED_ROWS = (4722, 22519)
SHARE_GOAL = 0.8
# Distinct buffers must exceed the 60 MB L2 several times, or repeated runs measure the cache.
WORKING_SET = 512 * 2**20
# bf16 results against float64: up to five roundings of 2^-9, added in quadrature and doubled for cancellation.
EXACT_TOLERANCE = 1e-2
# Elements that may differ from eager by a step: the order of a norm's sum and the last bits of exp.
FLIP_TOLERANCE = 5e-3


def compile_tunings(
    folder: Path, architecture: str, tunings: Sequence[int], operators: Sequence[str] = ()
) -> list[Path]:
    """One folder of cubins per tuning, compiled at the same time. operators: only these; none: all."""
    jobs = str(max(1, (os.cpu_count() or 1) // len(tunings)))
    children = []
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
        command += [part for name in operators for part in ("--operator", name)]
        children.append(subprocess.Popen(command, cwd=ROOT))
    failed = [tuning for tuning, child in zip(tunings, children, strict=True) if child.wait() != 0]
    if failed:
        print(f"tunings {failed} did not compile")
    return [folder / str(tuning) for tuning in tunings if tuning not in failed]


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


def check(case: Case, operators: Operators, rows: int, seed: int) -> dict[str, float]:
    """Errors on fresh inputs. Raises AssertionError on an unwritten element, a fallback or too large an error."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    inputs = case.make(rows, generator)
    exact, eager = case.exact(reference, inputs), case.run(reference, clone(inputs))
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
        if case.method == "swiglu":
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
    if case.method == "swiglu":  # gate first, one rounding: not the reference numerics, but the same bytes
        return lambda inputs: flashinfer.silu_and_mul(inputs["buffer"])
    if case.method == "rms_norm":
        return lambda inputs: flashinfer.norm.rmsnorm(inputs["x"], inputs["weight"], inputs["eps"])
    return None


def time_case(case: Case, rows: int, sets: Sequence[KernelSet], stop: float) -> dict[str, Any]:
    """All times of one case at one row count, in microseconds; tunings are skipped when `stop` has passed."""
    bytes_moved = case.row_bytes * rows
    inputs = buffers(case, rows)
    result: dict[str, Any] = {
        "rows": rows,
        "bytes": bytes_moved,
        "copy_us": time_copy(bytes_moved),
        "tunings": {},
    }
    eager = inputs[: max(2, len(inputs) // 4)]
    result["eager_us"] = time_graph([partial(case.run, reference, item) for item in eager], 5)[0]
    call = library_call(case)
    if call is not None:
        try:
            result["library_us"] = time_graph([partial(call, item) for item in inputs], 20)[0]
        except Exception as cause:  # noqa: BLE001  a library's failure must not cost our own figures
            result["library_error"] = repr(cause)
    for number, kernels in enumerate(sets):
        if number >= len(OPERATORS[case.method].tunings) or (number and time.perf_counter() > stop):
            break
        operators = Operators(kernels)
        median, least = time_graph([partial(case.run, operators, item) for item in inputs], 25)
        result["tunings"][number] = {"us": median, "least_us": least}
    return result


def host_cost(kernels: KernelSet) -> dict[str, float]:
    """Microseconds of host time a call: a whole operator, and the launch alone, at one row."""
    case = CASES["norm_modulate"]
    inputs = case.make(1, torch.Generator(DEVICE).manual_seed(1))
    operators, kernel = Operators(kernels), kernels.find("norm_modulate", 5376)
    assert kernel is not None
    stream = torch.cuda.current_stream().cuda_stream
    x, out = inputs["x"], torch.empty_like(inputs["x"])
    addresses = [inputs[name].data_ptr() for name in ("weight", "shift", "scale", "index")]
    strides = (x.stride(0), inputs["shift"].stride(0), out.stride(0), 1e-5)
    values = (x.data_ptr(), *addresses, out.data_ptr(), *strides)
    return {
        "operator_us": _host_us(lambda: case.run(operators, inputs)),
        "launch_us": _host_us(lambda: kernel.launch(1, stream, *values)),
    }


def _host_us(call: Callable[[], Any], count: int = 500) -> float:
    """Fewer calls than the driver's queue holds, so that the host never waits for the device."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
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


def targets(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Names fixed by the plan of this work. Shares are of the large copy's bandwidth, at the smaller row count."""
    result: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        timed = figures["cases"].get(name, {}).get("timed", {}).get(str(TIMED_ROWS[0]))
        if timed is None:
            continue
        value = timed["ours_us"]
        if case.goal_us is not None:
            result[f"fused_{name}_us"] = target(value, case.goal_us, "lower")
        result[f"fused_{name}_bandwidth_share"] = target(timed["share"], SHARE_GOAL, "higher")
    return result


def summarise(timed: dict[str, Any], bandwidth: float, shipped: int) -> dict[str, Any]:
    """Adds what ships, the best tuning and shares of the copy rate."""
    if not timed["tunings"]:
        return timed
    best = min(timed["tunings"], key=lambda number: timed["tunings"][number]["us"])
    ours = timed["tunings"].get(shipped, timed["tunings"][best])["us"]
    floor = timed["bytes"] / bandwidth * 1e6
    return timed | {
        "ours_us": ours,
        "floor_us": floor,
        "share": floor / ours,
        "share_of_same_copy": timed["copy_us"] / ours,
        "best_tuning": best,
        "best_us": timed["tunings"][best]["us"],
    }


def run_case(case: Case, sets: Sequence[KernelSet], bandwidth: float, stop: float) -> dict[str, Any]:
    """Checks of every tuning, then times. A failure is a figure, not the end of the bench."""
    result: dict[str, Any] = {"checks": {}, "timed": {}}
    try:
        for number, kernels in enumerate(sets[: len(OPERATORS[case.method].tunings)]):
            for rows in CHECK_ROWS if number == 0 else CHECK_ROWS[1:2]:
                result["checks"][f"{number}@{rows}"] = check(
                    case, Operators(kernels), rows, seed=rows + number
                )
        for rows in TIMED_ROWS:
            shipped = SHIPPED[sets[0].architecture].get(case.method, 0)
            result["timed"][str(rows)] = summarise(time_case(case, rows, sets, stop), bandwidth, shipped)
            torch.cuda.empty_cache()
    except Exception as cause:  # noqa: BLE001  reported in the table, the other operators still run
        result["failed"] = f"{type(cause).__name__}: {cause}"
        traceback.print_exc()
    return result


def print_table(figures: dict[str, Any]) -> None:
    print(f"\ncopy {figures['copy_tbps']:.2f} TB/s, host {figures['host']}, attention {figures['attention']}")
    print(
        f"{'operator':<22}{'rows':>6}{'eager':>9}{'ours':>8}{'best':>8}{'@':>2}{'lib':>8}{'copy':>8}{'floor':>8}{'share':>7}{'error':>10}{'flips':>10}"
    )
    for name, case in figures["cases"].items():
        if "failed" in case:
            print(f"{name:<22}  FAILED {case['failed'][:120]}")
        worst = (
            {key: max(c[key] for c in case["checks"].values()) for key in ("error", "flips")}
            if case["checks"]
            else {}
        )
        for rows, t in case["timed"].items():
            if "ours_us" not in t:
                continue
            library = f"{t['library_us']:.1f}" if "library_us" in t else "-"
            print(
                f"{name:<22}{rows:>6}{t['eager_us']:>9.1f}{t['ours_us']:>8.1f}{t['best_us']:>8.1f}{t['best_tuning']:>2}"
                f"{library:>8}{t['copy_us']:>8.1f}{t['floor_us']:>8.1f}{t['share']:>7.2f}"
                f"{worst.get('error', -1):>10.1e}{worst.get('flips', -1):>10.1e}"
            )


def tune(
    case: Case,
    sets: Mapping[int, KernelSet],
    bandwidth: float,
    rounds: int,
    check_rows: Sequence[int] = CHECK_ROWS,
    timed_rows: Sequence[int] = TIMED_ROWS,
) -> dict[str, Any]:
    """Checks and times every tuning of one operator. Tunings take turns, so that none has the cooler clock."""
    result: dict[str, Any] = {"checks": {}, "timed": {}}
    for number, kernels in sets.items():
        for rows in check_rows:
            result["checks"][f"{number}@{rows}"] = check(case, Operators(kernels), rows, seed=rows + number)
    for rows in timed_rows:
        inputs = buffers(case, rows)
        times: dict[int, list[float]] = {number: [] for number in sets}
        for _ in range(rounds):
            for number, kernels in sets.items():
                calls = [partial(case.run, Operators(kernels), item) for item in inputs]
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
    case = CASES[name]
    tunings = OPERATORS[case.method].tunings
    figures: dict[str, Any] = {"architecture": architecture, "tunings": [t._asdict() for t in tunings]}
    with tempfile.TemporaryDirectory() as scratch:
        folders = compile_tunings(Path(scratch), architecture, range(len(tunings)), [case.method])
        torch.zeros(1, device="cuda")
        sets = {int(folder.name): load(folder, architecture, figures) for folder in folders}
        entries = {int(folder.name): read_index(folder)[0] for folder in folders}
    figures["registers"] = {number: [e.registers, e.stack_bytes] for number, e in entries.items()}
    copied = 4 * 2**30
    bandwidth = copied / time_copy(copied, 5) * 1e6
    figures |= {"copy_tbps": bandwidth / 1e12, **tune(case, sets, bandwidth, rounds)}
    small = figures["timed"][str(TIMED_ROWS[0])]
    goals = (
        {} if case.goal_us is None else {f"fused_{name}_us": target(small["best_us"], case.goal_us, "lower")}
    )
    path = write_result(f"tune_{name}", figures, goals)
    if out := os.environ.get("OUT"):
        shutil.copy(path, out)
    print_tuning(case, architecture, figures["timed"])


def print_tuning(case: Case, architecture: str, timed: Mapping[str, Mapping[str, Any]]) -> None:
    tunings = OPERATORS[case.method].tunings
    for rows, times in timed.items():
        for number, microseconds in sorted(times["median_us"].items(), key=lambda item: item[1]):
            print(f"{rows:>6} rows  tuning {number}  {microseconds:8.2f} us  {tunings[number]}")
        print(f"SHIPPED[{architecture!r}][{case.method!r}] = {times['best']}  # at {rows} rows")


def write(figures: dict[str, Any]) -> None:
    """The result file, and a copy where the device machine collects files."""
    path = write_result(
        "fused_operators", figures, targets(figures), "python -m scripts.bench.fused_operators"
    )
    if out := os.environ.get("OUT"):
        shutil.copy(path, out)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tunings", type=int, nargs="*", default=list(range(num_tunings())))
    parser.add_argument("--kernels", type=Path, help="folders 0, 1, … compiled before, instead of compiling")
    parser.add_argument("--operators", nargs="*", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--budget-s", type=float, default=95, help="skip further tunings after this long")
    parser.add_argument("--tune", choices=sorted(CASES), help="only this operator, all of its tunings")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each tuning with --tune")
    options = parser.parse_args()
    stop = time.perf_counter() + options.budget_s
    architecture = architecture_of(torch.cuda.get_device_capability())
    if options.tune:
        run_tuning(options.tune, architecture, options.rounds)
        return
    figures: dict[str, Any] = {"architecture": architecture, "cases": {}, "libraries": LIBRARIES}
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        if options.kernels is not None:
            folders = [options.kernels / str(tuning) for tuning in options.tunings]
        else:
            folders = compile_tunings(Path(scratch), architecture, options.tunings)
        figures["compile_s"] = round(time.perf_counter() - start, 1)
        torch.zeros(1, device="cuda")
        sets = [load(folder, architecture, figures) for folder in folders]
        entries = read_index(folders[0])
    figures["compiler"] = dict(entries[0].compiler)
    figures["registers"] = {entry.title: entry.registers for entry in entries}
    figures["attention"] = attention_figures(TIMED_ROWS[1])
    copied = 4 * 2**30
    bandwidth = copied / time_copy(copied, 5) * 1e6
    figures["copy_tbps"] = bandwidth / 1e12
    figures["host"] = host_cost(sets[0])
    for name in options.operators:
        figures["cases"][name] = run_case(CASES[name], sets, bandwidth, stop)
    figures["triton_imported"] = "triton" in sys.modules
    write(figures)
    print_table(figures)


if __name__ == "__main__":
    main()
