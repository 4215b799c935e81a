"""Operators through torch's C interface: the values are torch's, also while torch is being imported."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch

from loader.errors import CapabilityError
from runtime.native_torch import Handle, NativeTorch
from runtime.torch_preload import TorchInstall, find_torch


@pytest.fixture
def native() -> Iterator[NativeTorch]:
    opened = NativeTorch(find_torch(), "cpu")
    yield opened
    opened.close()


def filled(native: NativeTorch, value: float, *sizes: int) -> Handle:
    zeros = native.empty(*sizes, dtype="float32")
    native.zero_(zeros)
    return native.add_number(zeros, value)


def with_bias(native: NativeTorch, a: Handle) -> Handle:
    out = native.empty(4, 4, dtype="float32")
    native.add_product(out, native.view(a, 4), a, native.transposed(a, 4, 8))
    return out


def rows(native: NativeTorch, a: Handle) -> Handle:
    index = native.empty(2, dtype="int64")
    native.zero_(index)
    return native.pick_rows(a, index)


def converted(native: NativeTorch, a: Handle) -> Handle:
    half, back = native.empty(4, 8), native.empty(4, 8, dtype="float32")
    native.copy_(half, a)
    native.copy_(back, half)
    return back


def stepped(native: NativeTorch, a: Handle) -> Handle:
    return native.concatenate([native.heads(a, 2, 2, 4, offset=8), native.heads(a, 2, 2, 4, offset=0)], -1)


A = 1.3  # the value of [4, 8] operands
CASES: dict[str, tuple[Callable[[NativeTorch, Handle], Handle], Callable[[torch.Tensor], torch.Tensor]]] = {
    "multiply": (lambda n, a: n.multiply(a, a), lambda a: a * a),
    "add": (lambda n, a: n.add(a, a), lambda a: a + a),
    "power": (lambda n, a: n.power(a, 2.0), lambda a: a.pow(2)),
    "rsqrt": (lambda n, a: n.unary("rsqrt", a), torch.rsqrt),
    "cos": (lambda n, a: n.unary("cos", a), torch.cos),
    "silu": (lambda n, a: n.unary("silu", a), torch.nn.functional.silu),
    "mean": (lambda n, a: n.mean(a), torch.mean),
    "linear": (lambda n, a: n.linear(a, a), lambda a: torch.nn.functional.linear(a, a)),
    "linear with bias": (with_bias, lambda a: torch.nn.functional.linear(a, a, a[0, :4])),
    "index": (rows, lambda a: a[torch.zeros(2).long()]),
    "conversion": (converted, lambda a: a.bfloat16().float()),
    "views and concatenation": (stepped, lambda a: a),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_torch(native: NativeTorch, name: str) -> None:
    run, expected = CASES[name]
    found = native.first_value(run(native, filled(native, A, 4, 8)))
    assert found == float(expected(torch.full((4, 8), A)).flatten()[0])


def test_attention_over_grouped_heads_runs(native: NativeTorch) -> None:
    q, k = native.empty(1, 8, 4, 16), native.empty(1, 2, 4, 16)
    native.flash_attention(q, k, k, causal=True)
    native.cudnn_attention(q, q, q)  # nothing on a CPU
    native.rms_norm(q, k, 16)  # nor this


def test_close_gives_everything_back(native: NativeTorch) -> None:
    first = NativeTorch(find_torch(), "cpu")  # what an operator's first use leaves stays
    first.multiply(filled(first, A, 512, 512), filled(first, A, 512, 512))
    first.close()
    before = live_bytes()
    native.multiply(filled(native, A, 512, 512), filled(native, A, 512, 512))
    assert live_bytes() >= before + 3 * 512 * 512 * 4
    native.close()
    native.close()
    assert live_bytes() < before + 512 * 512 * 4


def live_bytes() -> int:
    """Resident memory of the process, freed pages given back."""
    import ctypes
    from pathlib import Path

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * 4096


def test_what_is_missing_is_named(native: NativeTorch) -> None:
    with pytest.raises(CapabilityError, match="aoti_torch_call_dispatcher"):
        native.unary("no_such_operator", filled(native, A, 2))
    with pytest.raises(CapabilityError, match=r"aoti_torch_no_such.*has no such function"):
        native._call("no_such")
    with pytest.raises(CapabilityError, match="libtorch"):
        NativeTorch(TorchInstall("/nowhere", "2.11.0", has_bytecode=True), "cpu")


def test_operators_run_while_torch_is_imported() -> None:
    """In a fresh process: calls go on during the whole import, and torch is as it should be afterwards."""
    code = textwrap.dedent("""
        import json, sys, threading
        from runtime.native_torch import NativeTorch
        from runtime.torch_preload import find_torch, start_preload

        preload, found, done = start_preload(), [], threading.Event()
        preload.join()
        assert not preload.problem, preload.problem
        assert "torch" not in sys.modules

        def run():
            while not done.is_set():
                native = NativeTorch(find_torch(), "cpu")
                a = native.empty(8, 8, dtype="float32")
                native.zero_(a)
                b = native.unary("rsqrt", native.add_number(a, 4.0))
                found.append(native.first_value(native.linear(native.multiply(b, b), b)))
                native.close()

        thread = threading.Thread(target=run)
        thread.start()
        from runtime.torch_import import import_torch
        facts = import_torch("cpu", preload=preload).facts()
        done.set()
        thread.join()
        import torch
        print(json.dumps([len(found), sorted(set(found)), facts["problems"], float(torch.ones(2).sum())]))
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, values, problems, total = json.loads(done.stdout)
    assert count > 3
    assert (values, problems, total) == ([1.0], [], 2.0)  # 8 x 0.25 x 0.5
