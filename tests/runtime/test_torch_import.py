"""A trimmed `import torch` gives the same torch: same results, everything there on demand, reasons where it is not trimmed."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from runtime.torch_check import check_operators
from runtime.torch_import import (
    DEFAULT_TRIMS,
    DEFERRED,
    TESTED_VERSIONS,
    TRIMS,
    _frames_without_source,
    _realpath_remembered,
    import_torch,
)
from runtime.torch_preload import let_openmp_sleep

OPERATORS = """
import hashlib, json, sys
from runtime.torch_import import TRIMS, import_torch
record = import_torch("cpu", 1, TRIMS, tested_versions=json.loads(sys.argv[1]))
import torch, torch.nn.functional as F
g = torch.Generator().manual_seed(int(sys.argv[2]))
def r(*shape, dtype=torch.float32): return torch.randn(*shape, generator=g).to(dtype)
x, w, b = r(37, 96), r(64, 96), r(64)
q, k, v = (r(1, 4, 29, 32) for _ in range(3))
results = {
    "linear": F.linear(x, w, b),
    "linear bf16": F.linear(x.bfloat16(), w.bfloat16()),
    "sdpa": F.scaled_dot_product_attention(q, k, v),
    "sdpa causal grouped": F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True),
    "sdpa mask bf16": F.scaled_dot_product_attention(*(t.bfloat16() for t in (q, k, v)), attn_mask=r(29, 29).bfloat16()),
    "rms_norm": F.rms_norm(x, (96,), x[0], 1e-6),
    "layer_norm": F.layer_norm(x, (96,), x[0], x[1], 1e-6),
    "group_norm": F.group_norm(r(1, 8, 3, 6, 5), 4),
    "silu gelu": F.silu(x) * F.gelu(x, approximate="tanh"),
    "embedding": F.embedding(torch.tensor([3, 1, 3]), w),
    "conv3d": F.conv3d(r(1, 3, 5, 9, 8), r(4, 3, 3, 3, 3), padding=1),
    "conv2d": F.conv2d(r(1, 3, 9, 8), r(4, 3, 3, 3), stride=2),
    "conv_transpose1d": F.conv_transpose1d(r(1, 6, 11), r(6, 3, 4), stride=2),
    "interpolate": F.interpolate(r(1, 3, 9, 8), scale_factor=2.0, mode="bilinear"),
    "softmax": torch.softmax(x, -1),
    "unfold": F.pad(x, (1, 2)).unfold(1, 7, 3).contiguous(),
    "where index": torch.where(x > 0, x, x.exp())[:, torch.arange(0, 96, 5)],
    "snake": x + torch.sin(x).pow(2) / (x.abs() + 1e-9),
    "float64": (x.double() @ w.double().T).cumsum(0),
    "generator": torch.rand(5, generator=torch.Generator().manual_seed(3)),
    "weight norm": torch._weight_norm(w, w[:, :1].abs(), 0),
}
digests = {n: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in results.items()}
print(json.dumps({"record": record.facts(), "digests": digests}))
"""

EACH_ALONE = """
import json, os, sys, types
from runtime.torch_import import import_torch
record = import_torch("cpu", 1)
import torch
failed = []
uses = [*record.deferred, "torch._dynamo", "torch.ao.nn.intrinsic.qat", "torch.fx.passes.infra.pass_base"]
for name in uses:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            module = __import__(name, fromlist=["x"]) if name in ("torch._dynamo", "torch.fx.passes.infra.pass_base") else eval(name)
            dir(module)
            status = int(type(module) is not types.ModuleType)
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(json.dumps([len(uses), failed]))
"""

ON_DEMAND = """
import json, sys, tempfile
from runtime.torch_import import import_torch
record = import_torch("cpu", 1)
import torch
from runtime.deferred_modules import _DeferredModule
def pending(): return [n for n in record.deferred if type(sys.modules[n]) is _DeferredModule]
found = {"deferred": list(record.deferred), "pending": [pending()]}
found["quantization"] = [torch.nn.quantized.Linear.__module__, torch.quantization.get_default_qconfig().__class__.__name__]
found["intrinsic"] = torch.nn.intrinsic.ConvReLU2d.__module__
found["qat"] = torch.nn.qat.Linear.__module__
found["lstm"] = torch.nn.quantizable.LSTM.__module__
found["normal"] = torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(0.0)).item()
found["masked"] = torch.masked.sum(torch.ones(3), mask=torch.tensor([True, False, True])).item()
found["sobol"] = torch.quasirandom.SobolEngine(2).draw(2).tolist()
found["window"] = torch.signal.windows.hann(4, sym=False).tolist()
import torch.utils.data.dataloader
found["batches"] = [batch.tolist() for batch in torch.utils.data.DataLoader([1, 2, 3], batch_size=2)]
import torch.distributed as dist
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method="file://" + file.name + ".init", rank=0, world_size=1)
    total = torch.ones(2)
    dist.all_reduce(total)
    dist.destroy_process_group()
found["reduced"] = total.tolist()
found["pending"].append(pending())
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    found["fake"] = list(torch.linalg.qr(torch.empty(4, 3))[0].shape)
found["pending"].append(pending())
found["meta"] = list(torch.linalg.qr(torch.empty(4, 3, device="meta"))[0].shape)
found["init restored"] = FakeTensorMode.__init__.__module__
found["exported"] = type(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))).__name__
found["compiled"] = torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)).tolist()
print(json.dumps(found))
"""


def run(code: str, *arguments: str, **environment: str) -> Any:
    """Last line that `code` prints in a fresh interpreter, parsed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def untrimmed() -> Any:
    """Operators after a plain import, which an untested version gets."""
    return run(OPERATORS, "[]", "3")


@pytest.fixture(scope="module")
def trimmed() -> Any:
    return run(OPERATORS, json.dumps(sorted(TESTED_VERSIONS)), "3")


@pytest.fixture(scope="module")
def on_demand() -> Any:
    return run(ON_DEMAND)


def test_trimmed_torch_computes_the_same_bits(untrimmed: Any, trimmed: Any) -> None:
    assert len(trimmed["digests"]) == 21
    assert trimmed["digests"] == untrimmed["digests"]


def test_all_trims_are_taken_for_a_tested_version(trimmed: Any) -> None:
    record = trimmed["record"]
    assert record["version"].partition("+")[0] in TESTED_VERSIONS
    assert (record["applied"], record["skipped"], record["problems"]) == (list(TRIMS), {}, [])
    assert set(record["deferred"]) == {module for modules in DEFERRED.values() for module in modules}
    assert record["num_ready"] > 0
    assert record["preload_seconds"] > 0


def test_an_untested_version_is_imported_whole_and_the_reason_is_recorded(untrimmed: Any) -> None:
    record = untrimmed["record"]
    release = record["version"].partition("+")[0]
    assert record["deferred"] == []
    assert record["skipped"] == dict.fromkeys(DEFERRED, f"torch {release} is not a tested version ()")
    assert record["applied"] == [name for name in TRIMS if name not in DEFERRED]


def test_nothing_deferred_is_loaded_by_the_import(on_demand: Any) -> None:
    assert on_demand["pending"][0] == on_demand["deferred"]
    assert len(on_demand["deferred"]) == 17


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("quantization", ["torch.ao.nn.quantized.modules.linear", "QConfig"]),
        ("intrinsic", "torch.ao.nn.intrinsic.modules.fused"),
        ("qat", "torch.ao.nn.qat.modules.linear"),
        ("lstm", "torch.ao.nn.quantizable.modules.rnn"),
        ("normal", pytest.approx(-0.9189385332, abs=1e-6)),  # -log(sqrt(2 pi)), float32
        ("masked", 2.0),
        ("sobol", [[0.0, 0.0], [0.5, 0.5]]),
        ("window", pytest.approx([0.0, 0.5, 1.0, 0.5], abs=1e-6)),  # float32 cosine
        ("batches", [[1, 2], [3]]),
        ("reduced", [1.0, 1.0]),
        ("fake", [4, 3]),
        ("meta", [4, 3]),
        ("init restored", "torch._subclasses.fake_tensor"),
        ("exported", "ExportedProgram"),
        ("compiled", [2.0, 2.0]),
    ],
)
def test_what_was_deferred_works_on_first_use(on_demand: Any, what: str, expected: object) -> None:
    assert on_demand[what] == expected


def test_each_deferred_module_can_be_the_first_to_be_used() -> None:
    count, failed = run(EACH_ALONE)
    assert failed == []
    assert count == 20


def test_meta_kernels_stay_deferred_until_a_fake_tensor_needs_them(on_demand: Any) -> None:
    _, after_use, after_fake = on_demand["pending"]
    assert {"torch._meta_registrations", "torch.distributed._meta_registrations"} <= set(after_use)
    assert after_fake == []


def test_unknown_trims_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trims = \['zip'\]; allowed: gc, preload"):
        import_torch("cpu", trims=["zip"])


# ---- a package called torch that is not torch


def fake_torch(folder: Path, body: str, version: str = "2.13.0") -> str:
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(body, "utf-8")
    (package / "version.py").write_text(f"__all__ = []\n__version__ = '{version}+cpu'\n", "utf-8")
    return str(folder)


REPORT_ERROR = """
import json
from loader.errors import WorkerError
from runtime.torch_import import import_torch
try:
    import_torch("cpu")
    print(json.dumps(None))
except WorkerError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_a_torch_that_cannot_be_imported_is_a_named_error(tmp_path: Path) -> None:
    path = fake_torch(tmp_path, "raise ImportError('libcudart.so.13: cannot open')")
    kind, text = run(REPORT_ERROR, PYTHONPATH=path)
    assert kind == "CapabilityError"
    assert "libcudart.so.13: cannot open" in text
    assert "start with fewer of these import trims: gc, " in text


def test_version_is_read_without_importing(tmp_path: Path) -> None:
    path = fake_torch(tmp_path, "raise SystemExit(9)", "2.99.1")
    code = "import json; from runtime.torch_preload import find_torch; i = find_torch()"
    found = run(f"{code}; print(json.dumps([i.version, i.release, i.has_bytecode]))", PYTHONPATH=path)
    assert found == ["2.99.1+cpu", "2.99.1", False]


def test_a_library_that_cannot_be_mapped_is_recorded_and_left_to_torch(tmp_path: Path) -> None:
    broken = tmp_path / "lib" / "libtorch_cpu.so"
    broken.parent.mkdir()
    broken.write_bytes(b"not a library")
    code = """
import json, sys
from runtime.torch_preload import TorchInstall, start_preload
from runtime.torch_import import import_torch
preload = start_preload(TorchInstall(sys.argv[1], "0", True))
preload.join()
record = import_torch("cpu", preload=preload)
import torch
print(json.dumps([record.facts(), torch.ones(2).sum().item()]))
"""
    record, total = run(code, str(tmp_path))
    assert record["applied"] == [name for name in DEFAULT_TRIMS if name != "preload"]
    assert "libtorch_cpu.so" in record["skipped"]["preload"]
    assert total == 2.0


# ---- the parts that need no fresh torch


@pytest.fixture
def torch() -> Any:
    import torch

    return torch


def test_the_check_names_the_operator_that_differs(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_operators() == ()
    monkeypatch.setattr(torch, "softmax", lambda x, dim: x)
    monkeypatch.delattr(torch.nn.functional, "conv1d")
    assert check_operators() == (
        "softmax gives [0.0, 0.0, 0.0, -0.0], recorded [0.5, 0.5, 0.5, 0.5]",
        "conv1d gives AttributeError: module 'torch.nn.functional' has no attribute 'conv1d', recorded [30.0]",
    )


def test_the_check_waits_until_it_is_asked_for() -> None:
    """It may run on any thread, and completes the record."""
    first, last = run(
        textwrap.dedent("""
        import json, sys, threading
        from runtime.torch_import import begin_import
        done, check = begin_import("cpu")
        assert "torch" in sys.modules
        last = []
        thread = threading.Thread(target=lambda: last.append(check()))
        thread.start()
        thread.join()
        print(json.dumps([done.facts(), last[0].facts()]))
    """)
    )
    assert (first["check_seconds"], first["problems"]) == (0.0, [])
    assert last["check_seconds"] > 0
    same = dict.fromkeys(("check_seconds", "deferred"))
    assert {**last, **same} == {**first, **same}


def test_an_operator_that_differs_brings_everything_in_at_the_check() -> None:
    pending, record = run(
        textwrap.dedent("""
        import json, sys
        import runtime.torch_import
        from runtime.torch_import import begin_import
        done, check = begin_import("cpu")
        import torch
        softmax, torch.softmax = torch.softmax, lambda x, dim: x
        load_all = runtime.torch_import.Deferral.load_all
        def restored(deferral):
            torch.softmax = softmax
            load_all(deferral)
        runtime.torch_import.Deferral.load_all = restored
        print(json.dumps([done.facts()["deferred"], check().facts()]))
    """)
    )
    assert "torch._meta_registrations" in pending
    assert record["deferred"] == []
    (problem,) = record["problems"]
    assert problem.startswith("softmax gives")
    assert all("operators differed" in record["skipped"][name] for name in DEFERRED)


@pytest.mark.usefixtures("torch")
def test_a_second_import_only_records_that_torch_was_there() -> None:
    record = import_torch("cpu")
    assert record.applied == ()
    assert record.skipped == dict.fromkeys(DEFAULT_TRIMS, "torch was imported before")


def test_paths_are_resolved_as_before_and_the_function_comes_back(tmp_path: Path) -> None:
    real = os.path.realpath
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    with _realpath_remembered():
        assert os.path.realpath is not real
        found = [os.path.realpath(link), os.path.realpath(str(link)), os.path.realpath(str(link))]
        with pytest.raises(FileNotFoundError):
            os.path.realpath(str(link), strict=True)
    assert os.path.realpath is real
    assert found == [real(link)] * 3


def test_frames_keep_file_and_line(tmp_path: Path) -> None:
    real = inspect.getframeinfo
    frame = sys._getframe()
    with _frames_without_source():
        short = inspect.getframeinfo(frame)
        line = frame.f_lineno - 1
    assert inspect.getframeinfo is real
    assert (short.filename, short.lineno, short.function) == (__file__, line, frame.f_code.co_name)
    assert short.code_context is None


@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_openmp_sleeps_unless_the_environment_decides(given: str | None, found: str) -> None:
    environ = {} if given is None else {"OMP_WAIT_POLICY": given}
    let_openmp_sleep(environ)
    assert environ == {"OMP_WAIT_POLICY": found}
