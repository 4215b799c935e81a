"""What can be done for `import torch` before it: find it, map its libraries, read its bytecode.

Mapping and relocating takes a third of the import. `ctypes.CDLL(path)` holds the interpreter lock for all of it, like an
import does; the C function `dlopen` called through `ctypes` does not, so on a thread of its own it leaves the main
thread free to import standard modules and unmarshal torch's bytecode. `import torch` then finds both ready. Nothing
here runs Python code of torch. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

from loader.errors import CapabilityError

# ruff: noqa: PTH110, PTH118, PTH120, PTH123 (pathlib is not imported on the cold path)

_EARLY_MODULES = (
    "argparse", "ast", "concurrent.futures", "copy", "dataclasses", "difflib", "inspect", "logging", "pathlib",
    "platform", "pprint", "pstats", "queue", "string", "textwrap", "timeit", "traceback", "typing", "unittest",
)  # fmt: skip
"""Standard modules that torch imports and that need no extension module: opening one waits for the loader's own lock
until `dlopen` on the other thread returns, and holds the interpreter lock meanwhile."""


@dataclass(frozen=True)
class TorchInstall:
    """An installed torch that has not been imported."""

    directory: str
    version: str
    has_bytecode: bool

    @property
    def site(self) -> str:
        """The folder that torch lies in."""
        return os.path.dirname(self.directory)

    @property
    def release(self) -> str:
        """Version without its build: `2.11.0` of `2.11.0+cu130`."""
        return self.version.partition("+")[0]


def find_torch() -> TorchInstall:
    """Find torch and read its version, importing nothing.

    Raises: CapabilityError: not installed, or its version cannot be read.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CapabilityError("torch is not installed", where="torch", hint="pip install torch")
    directory = os.path.dirname(spec.origin)
    try:
        with open(os.path.join(directory, "version.py"), encoding="utf-8") as file:
            text = file.read()
    except OSError as cause:
        raise CapabilityError(f"torch's version.py cannot be read: {cause}", where="torch") from cause
    found = re.search(r"^__version__(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    has_bytecode = spec.cached is not None and os.path.exists(spec.cached)
    return TorchInstall(directory, found.group(1) if found else "unknown", has_bytecode)


class Preload:
    """Shared libraries of torch being mapped on a thread.

    Args:
        first: what must look for functions of other libraries before the dynamic linker is busy.
    """

    def __init__(self, paths: Sequence[str], first: Callable[[], None] = lambda: None) -> None:
        self.paths = paths
        self._first = first
        self.seconds: float | None = None
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="preload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._first()
        start_ns = time.monotonic_ns()
        try:
            dlopen, dlerror = _loader_functions()
        except AttributeError as cause:
            self.problem = f"this C library has no dlopen: {cause}"
            return
        for path in self.paths:
            is_global = path.endswith("libtorch_global_deps.so")  # torch opens this one so, too
            if not dlopen(os.fsencode(path), os.RTLD_NOW | (os.RTLD_GLOBAL if is_global else os.RTLD_LOCAL)):
                reason = dlerror()  # torch itself has more ways to find its libraries
                self.problem = (reason or b"unknown").decode(errors="replace")
                break
        self.seconds = (time.monotonic_ns() - start_ns) / 1e9

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until all is mapped, or one failed."""
        self._thread.join()


def _loader_functions() -> tuple[Callable[[bytes, int], int | None], Callable[[], bytes | None]]:
    """`dlopen` and `dlerror` of the C library; a call of either runs without the interpreter lock."""
    library = ctypes.CDLL(None)
    library.dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    library.dlopen.restype = ctypes.c_void_p
    library.dlerror.argtypes = ()
    library.dlerror.restype = ctypes.c_char_p
    return library.dlopen, library.dlerror


def start_preload(install: TorchInstall | None = None, first: Callable[[], None] = lambda: None) -> Preload:
    """Begin to map torch's libraries in the order in which torch opens them; what is absent is left out.

    Libraries that contain Python bindings are not touched: their initialisation needs the interpreter lock.
    """
    directory = (install or find_torch()).directory
    names = ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch.so")
    paths = [os.path.join(directory, "lib", name) for name in names]
    return Preload([path for path in paths if os.path.exists(path)], first)


def let_openmp_sleep(environ: MutableMapping[str, str] | None = None) -> None:
    """Have OpenMP's threads of this process sleep between two parallel operators, unless the environment decides.

    By default each of them spins for about ten milliseconds, on CPUs that the reader's threads need: on 16 CPUs every warm-up
    of a start burnt ten times its own length. Read when libgomp is mapped. Values do not depend on it.
    """
    (os.environ if environ is None else environ).setdefault("OMP_WAIT_POLICY", "PASSIVE")


def import_early_modules() -> None:
    """Import the standard modules that torch will import."""
    for name in _EARLY_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class ReadyCode:
    """Bytecode of modules, read before they are imported. As a finder it hands it to the import.

    Reading is the standard loader's own `get_code`, with its check against the source file, only earlier.
    """

    def __init__(self, site: str) -> None:
        self.site = site
        self._specs: dict[str, importlib.machinery.ModuleSpec] = {}

    def __len__(self) -> int:
        return len(self._specs)

    def read(self, names: Iterable[str], preload: Preload) -> None:
        """Read modules below `site` in this order until the libraries are mapped; what is not there is left out."""
        for name in names:
            if not preload.is_running:
                return
            self._read_one(name)

    def _read_one(self, name: str) -> None:
        folder = os.path.join(self.site, *name.split(".")[:-1])
        spec = importlib.machinery.PathFinder.find_spec(name, [folder])
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return
        with contextlib.suppress(ImportError, SyntaxError, OSError):  # the import itself will report it
            code = spec.loader.get_code(name)
            if code is not None:
                spec.loader = _ReadyLoader(name, spec.loader.path, code)
                self._specs[name] = spec

    def install(self) -> None:
        """Hand code out from now on."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop, and forget what was not used."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._specs.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return self._specs.pop(fullname, None)


class _ReadyLoader(importlib.machinery.SourceFileLoader):
    """The standard loader of a module whose code has been read."""

    def __init__(self, name: str, path: str, code: types.CodeType) -> None:
        super().__init__(name, path)
        self._code: types.CodeType | None = code

    def get_code(self, fullname: str) -> types.CodeType | None:
        code, self._code = self._code, None
        return code if code is not None else super().get_code(fullname)
