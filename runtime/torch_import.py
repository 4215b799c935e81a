"""The one place where a worker imports torch, and what is left out of the import until someone needs it.

Every shortcut ("trim") has a name, can be left out by argument, and is recorded with the reason where it was not
taken. Those that change what is imported are used for tested versions of torch only, and a handful of operators is
compared with recorded results afterwards (beside the rest of the start, which runs on zeros until then); if one differs, everything left out is imported at once. Anything left out
is imported on first use: `runtime.deferred_modules`. What each trim is worth: `scripts/bench/import_torch.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from loader.errors import CapabilityError, InternalError
from runtime.deferred_modules import Deferral
from runtime.torch_check import check_operators
from runtime.torch_preload import (
    Preload,
    ReadyCode,
    find_torch,
    import_early_modules,
    start_preload,
)

TESTED_VERSIONS = frozenset({"2.11.0", "2.13.0"})
"""Releases of torch for which the deferred modules were tried: same results, everything loads on demand."""

DEFERRED = {
    # Python kernels for tensors without data (device "meta", fake tensors of the compiler), 1 s to register, and
    # what only they import.
    "meta": (
        "torch._meta_registrations",
        "torch.distributed._meta_registrations",
        "torch._decomp",
        "torch._prims",
        "torch._refs",
        "torch._custom_ops",
    ),
    # Quantised layers for training and PyTorch-1 style export; the worker has its own formats.
    "quantization": (
        "torch.quantization",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
    ),
    # Packages that torch imports for the user's convenience and does not use itself.
    "extras": (
        "torch.distributions",
        "torch.export",
        "torch.masked",
        "torch.quasirandom",
        "torch.signal.windows",
        "torch.utils.data",
    ),
}
"""Trim → modules that it defers. None is read by the rest of `import torch` in the tested versions."""

TRIMS = ("gc", "preload", "bytecode", "frames", "realpath", *DEFERRED)
"""All trims: collector off; libraries mapped on a thread; bytecode read meanwhile; frames described without their source
lines; paths resolved once; deferred modules."""

DEFAULT_TRIMS = tuple(name for name in TRIMS if name != "realpath")
"""`realpath` is worth nothing once frames are described without their source (`docs/log.md`)."""

_NEED_EVERYTHING = frozenset(
    {
        "torch._dynamo",
        "torch._inductor",
        "torch.ao.nn",
        "torch.ao.quantization",
        "torch.onnx",
        "torch.testing._internal",
    }
)
"""Importing one of these (`torch.compile` does) first imports all that was deferred."""


@dataclass(frozen=True)
class TorchImport:
    """What was done to import torch, for the timeline.

    `applied` are the trims taken, `skipped` says why each other one was not. `deferred` modules are not imported yet;
    bytecode of `num_ready` modules was read while libraries were being mapped. Without bytecode on disk
    (`has_bytecode`) torch is compiled in every start, which costs many seconds: ship it with the image.
    """

    version: str
    seconds: float
    check_seconds: float = 0.0
    applied: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    deferred: tuple[str, ...] = ()
    preload_seconds: float | None = None
    num_ready: int = 0
    has_bytecode: bool = True
    problems: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """JSON-ready form."""
        return {
            "version": self.version,
            "seconds": round(self.seconds, 3),
            "check_seconds": round(self.check_seconds, 4),
            "applied": list(self.applied),
            "skipped": dict(self.skipped),
            "deferred": list(self.deferred),
            "preload_seconds": None if self.preload_seconds is None else round(self.preload_seconds, 3),
            "num_ready": self.num_ready,
            "has_bytecode": self.has_bytecode,
            "problems": list(self.problems),
        }


def choose_trims(text: str) -> tuple[str, ...]:
    """Trims out of a setting: `all`, `none`, or names separated by commas. Raises: CapabilityError: unknown name."""
    names = (
        DEFAULT_TRIMS
        if text == "all"
        else tuple(name for name in map(str.strip, text.split(",")) if name not in ("", "none"))
    )
    unknown = sorted(set(names) - set(TRIMS))
    if unknown:
        raise CapabilityError(
            "unknown trims", where="torch_trims", found=unknown, expected=["all", "none", *TRIMS]
        )
    return names


def import_torch(
    device: str,
    cpu_threads: int = 0,
    trims: Collection[str] = DEFAULT_TRIMS,
    preload: Preload | None = None,
    tested_versions: Collection[str] = TESTED_VERSIONS,
) -> TorchImport:
    """Import torch, then set what the model's numbers depend on.

    Args:
        device: `"cpu"` or `"cuda"`.
        cpu_threads: threads of CPU operators; 0 keeps torch's choice.
        trims: names out of `TRIMS`.
        preload: started earlier with `start_preload`; None starts one here if `"preload"` is among the trims.
        tested_versions: releases for which modules may be deferred.
    Returns: what was done.
    Raises: CapabilityError: torch is not installed or cannot be imported. ValueError: unknown trim.
        InternalError: operators are wrong although everything was imported.
    """
    _, check = begin_import(device, cpu_threads, trims, preload, tested_versions)
    return check()


def begin_import(
    device: str,
    cpu_threads: int = 0,
    trims: Collection[str] = DEFAULT_TRIMS,
    preload: Preload | None = None,
    tested_versions: Collection[str] = TESTED_VERSIONS,
) -> tuple[TorchImport, Callable[[], TorchImport]]:
    """`import_torch` but for the check of its operators, which mostly waits for threads and kernels to be made.

    Returns: what was done so far, and the check: to be called once, on any thread, before a result of torch is used. It returns
        the whole record. Arguments and errors as in `import_torch`.
    """
    unknown = sorted(set(trims) - set(TRIMS))
    if unknown:
        raise ValueError(f"trims = {unknown}; allowed: {', '.join(TRIMS)}")
    if "torch" in sys.modules:
        done = _already_imported(trims)
        _configure(device, cpu_threads)
        return done, lambda: done
    importer = _Importer(trims, preload, tested_versions)
    done = importer.run()
    _configure(device, cpu_threads)
    return done, partial(importer.check, done)


def _already_imported(trims: Collection[str]) -> TorchImport:
    import torch

    reason = "torch was imported before"
    return TorchImport(torch.__version__, 0.0, skipped={name: reason for name in TRIMS if name in trims})


def _configure(device: str, cpu_threads: int) -> None:
    import torch

    torch.set_grad_enabled(False)
    if cpu_threads:
        torch.set_num_threads(cpu_threads)
    if device == "cuda":  # float32 layers of the model are exact float32 (no TF32)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


class _Importer:
    """One import of torch."""

    def __init__(
        self, trims: Collection[str], preload: Preload | None, tested_versions: Collection[str]
    ) -> None:
        self.skipped = {name: "not asked for" for name in TRIMS if name not in trims}
        self.wanted = [name for name in TRIMS if name in trims]
        self.preload = preload
        self.install = find_torch()
        release = self.install.release
        if release not in tested_versions:
            reason = f"torch {release} is not a tested version ({', '.join(sorted(tested_versions))})"
            for name in DEFERRED:
                self._skip(name, reason)
        self.hook = _FakeTensorHook()
        self.names = [module for trim in self.wanted for module in DEFERRED.get(trim, ())]
        self.deferral = Deferral(self.names, _NEED_EVERYTHING, self.hook.remove)

    def _skip(self, name: str, reason: str) -> None:
        if name in self.wanted:
            self.wanted.remove(name)
            self.skipped[name] = reason

    def run(self) -> TorchImport:
        start_ns = time.monotonic_ns()
        names, deferral = self.names, self.deferral
        with contextlib.ExitStack() as stack:
            if "gc" in self.wanted:
                stack.enter_context(_collector_off())
            if "realpath" in self.wanted:
                stack.enter_context(_realpath_remembered())
            if "frames" in self.wanted:
                stack.enter_context(_frames_without_source())
            code = ReadyCode(self.install.site)
            self._finish_preload(code)
            num_ready = len(code)
            code.install()
            stack.callback(code.remove)
            if names:
                deferral.install()
                stack.callback(deferral.stop)
            _import_torch_itself(self.wanted)
            for name in names:  # also those that only a deferred module imports: they are attributes of torch
                with contextlib.suppress(ModuleNotFoundError):
                    importlib.import_module(name)
            if "meta" in self.wanted:
                _complete_generator()
            if "meta" in self.wanted:
                self.hook.install(deferral)
        imported_ns = time.monotonic_ns()
        if "gc" in self.wanted:
            gc.freeze()  # what exists now lives as long as the process
        return TorchImport(
            version=self.install.version,
            seconds=(imported_ns - start_ns) / 1e9,
            applied=tuple(self.wanted),
            skipped=dict(self.skipped),
            deferred=deferral.pending(),
            preload_seconds=self.preload.seconds if self.preload else None,
            num_ready=num_ready,
            has_bytecode=self.install.has_bytecode,
        )

    def _finish_preload(self, code: ReadyCode) -> None:
        """Wait for the libraries; import standard modules and read bytecode meanwhile.

        Waiting in `join` leaves the interpreter to other threads; waiting in the import of `torch._C` does not.
        """
        if "preload" not in self.wanted:
            self._skip("bytecode", "only while libraries are being mapped")
            return
        if self.preload is None:
            self.preload = start_preload(self.install)
        if "bytecode" in self.wanted:
            from runtime.torch_module_names import MODULE_NAMES

            code.read(MODULE_NAMES, self.preload)
        import_early_modules()
        self.preload.join()
        if self.preload.problem:
            self._skip("preload", self.preload.problem)

    def check(self, done: TorchImport) -> TorchImport:
        """Compare operators with recorded results, unless nothing was left out; the completed record of `done`.

        Raises: InternalError: they differ, also after everything was imported.
        """
        if not self.names:
            return done
        start_ns = time.monotonic_ns()
        problems = self._check_operators()
        return dataclasses.replace(
            done,
            check_seconds=(time.monotonic_ns() - start_ns) / 1e9,
            applied=tuple(self.wanted),
            skipped=dict(self.skipped),
            deferred=self.deferral.pending(),
            problems=problems,
        )

    def _check_operators(self) -> tuple[str, ...]:
        """Import what was deferred if an operator differs; which ones did."""
        problems = check_operators()
        if not problems:
            return ()
        self.deferral.load_all()
        for name in DEFERRED:
            self._skip(name, f"operators differed: {'; '.join(problems)}")
        remaining = check_operators()
        if remaining:
            raise InternalError(
                f"operators of torch {self.install.version} give wrong results: {'; '.join(remaining)}",
                where="torch",
            )
        return problems


def _import_torch_itself(trims: Sequence[str]) -> None:
    try:
        import torch  # noqa: F401
    except Exception as cause:  # a half-imported torch cannot be imported again in the same process
        hint = f"start with fewer of these import trims: {', '.join(trims)}" if trims else ""
        raise CapabilityError(f"torch cannot be imported: {cause}", where="torch", hint=hint) from cause


# ---- trims that do not change what is imported


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """The collector would walk the growing heap again and again, and find nothing to collect."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _realpath_remembered() -> Iterator[None]:
    """Resolve each path once: registrations ask for the source file of each caller, 18,000 `lstat` calls in all."""
    real = os.path.realpath
    known: dict[object, Any] = {}

    def remembered(filename: Any, **options: Any) -> Any:
        if options:
            return real(filename, **options)
        found = known.get(filename)
        if found is None:
            found = known[filename] = real(filename)
        return found

    os.path.realpath = remembered
    try:
        yield
    finally:
        os.path.realpath = real


@contextlib.contextmanager
def _frames_without_source() -> Iterator[None]:
    """Describe frames by file and line only.

    Registrations ask for the caller's frame to keep its file and line; the source lines that come along cost a
    search of all modules and the parsing of the file, and nobody reads them.
    """
    real = inspect.getframeinfo

    def without_source(frame: Any, context: int = 0) -> inspect.Traceback:
        return real(frame, context=0)

    inspect.getframeinfo = without_source
    try:
        yield
    finally:
        inspect.getframeinfo = real


# ---- deferred meta kernels


def _complete_generator() -> None:
    """Give `torch.Generator` its metaclass, without which torch 2.13 refuses to make one.

    It is set from Python by a module that only the meta kernels import (`torch._prims.rng_prims`), which sets it again.
    """
    import torch

    if hasattr(torch._C, "_set_generator_metaclass"):
        from torch._opaque_base import OpaqueBaseMeta

        torch._C._set_generator_metaclass(OpaqueBaseMeta)


class _FakeTensorHook:
    """Imports what was deferred when the first `FakeTensorMode` is made: it looks meta kernels up by operator."""

    def __init__(self) -> None:
        self._mode: Any = None
        self._init: Callable[..., None] | None = None

    def install(self, deferral: Deferral) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode
        init = self._init = self._mode.__init__

        @functools.wraps(init)
        def load_and_init(mode: Any, *args: Any, **kwargs: Any) -> None:
            deferral.load_all()
            init(mode, *args, **kwargs)

        self._mode.__init__ = load_and_init

    def remove(self) -> None:
        """Put the class back as it was. May be called twice."""
        if self._init is not None:
            self._mode.__init__ = self._init
            self._init = None


def import_deferred() -> None:
    """Import everything that was left out.

    Needed before operators run on tensors of the device "meta": torch finds those kernels by registration alone.
    All other uses (attributes, `torch.compile`, fake tensors) import it by themselves.
    """
    for finder in list(sys.meta_path):
        if isinstance(finder, Deferral):
            finder.load_all()
