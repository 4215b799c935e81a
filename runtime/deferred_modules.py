"""Modules that are imported by name now and executed on first use.

`importlib.util.LazyLoader` does almost this, but any attribute sets it off, also the `__spec__` that the import
statement itself looks at, so a module that is imported twice is never lazy. Here the attributes that the import
system and `inspect` read are real, and everything else loads. Standard library only.
"""

from __future__ import annotations

import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Collection, Sequence

_READ_BY_INSPECTION = frozenset({"__warningregistry__", "__wrapped__", "__test__", "__annotations__"})
"""Attributes that others look for on every module of a process; a module rarely has them, so they load nothing."""


class _DeferredModule(types.ModuleType):
    """A module whose code has not run. It becomes an ordinary module, the same object, on first use."""

    def __getattr__(self, name: str) -> object:
        if name in _READ_BY_INSPECTION:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _load(self)
        setattr(self, name, value)  # it is an ordinary module now

    def __delattr__(self, name: str) -> None:
        _load(self)
        delattr(self, name)

    def __dir__(self) -> list[str]:
        _load(self)
        return dir(self)


class _LoadingModule(types.ModuleType):
    """A module whose code runs now. Its own thread sees it as it is; other threads wait for what is not there yet."""

    def __getattr__(self, name: str) -> object:
        loader: _DeferredLoader = self.__dict__["__spec__"].loader_state
        if not loader.runs_here() and name not in _READ_BY_INSPECTION:
            with loader.owner.lock:  # held by the thread that loads
                pass
            return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _DeferredLoader:
    """Makes a placeholder instead of running the module; `load` runs it."""

    def __init__(self, real: importlib.machinery.SourceFileLoader, owner: Deferral) -> None:
        self.real = real
        self.owner = owner
        self.path: list[str] | None = None
        self._thread: int | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Turn a fresh module into a placeholder.

        `__path__` is taken away because the import of a submodule reads it: so a package's own code runs before
        its submodules do, as it would without this loader.
        """
        spec = module.__spec__
        assert spec is not None
        spec.loader_state = self
        self.path = module.__dict__.pop("__path__", None)
        module.__dict__.pop("__doc__", None)
        _become(module, _DeferredModule)

    def runs_here(self) -> bool:
        return self._thread == threading.get_ident()

    def load(self, module: types.ModuleType) -> None:
        """Run the module once; a second thread waits for the first.

        Raises: whatever the module's code raises; the placeholder stays and the next use tries again.
        """
        with self.owner.lock:
            if type(module) is not _DeferredModule:
                return
            spec = module.__spec__
            assert spec is not None
            self._thread = threading.get_ident()
            self.owner.num_running += 1
            _become(module, _LoadingModule)
            if self.path is not None:
                module.__path__ = self.path
            spec.loader = module.__loader__ = self.real
            try:
                self.real.exec_module(module)
            except BaseException:
                module.__dict__.pop("__path__", None)
                _become(module, _DeferredModule)
                raise
            finally:
                self._thread = None
                self.owner.num_running -= 1
            _become(module, types.ModuleType)
            module.__dict__.setdefault("__doc__", None)


class _Present:
    """Ends an import with the module that is there already, as it is."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec


def _become(module: types.ModuleType, kind: type[types.ModuleType]) -> None:
    object.__setattr__(module, "__class__", kind)  # past `_DeferredModule.__setattr__`


def _load(module: types.ModuleType) -> None:
    spec = module.__dict__["__spec__"]
    spec.loader_state.load(module)


class Deferral:
    """Defers the named modules while it is active, and knows afterwards which are still placeholders.

    Args:
        names: full names of modules; a name that does not exist or is no Python source is imported as usual.
        needed_by: first dotted names below which an import runs everything deferred first (all its prefixes count).
        on_load_all: called once before everything deferred is run.
    """

    def __init__(
        self,
        names: Collection[str],
        needed_by: Collection[str] = (),
        on_load_all: Callable[[], None] | None = None,
    ) -> None:
        self.names = frozenset(names)
        self.needed_by = frozenset(needed_by)
        self.on_load_all = on_load_all
        self.is_active = False
        self.deferred: list[str] = []
        self.lock = threading.RLock()
        self.num_running = 0  # deferred modules whose code runs now, all on the thread that holds the lock

    def install(self) -> None:
        """Start deferring. The finder stays first on `sys.meta_path`, so that `needed_by` keeps working."""
        self.is_active = True
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Defer no further module; placeholders stay placeholders."""
        self.is_active = False

    def remove(self) -> None:
        """Take the finder away; placeholders stay placeholders. May be called twice."""
        self.stop()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.is_active:
            return self._deferred_spec(fullname, path) if fullname in self.names else None
        return self._after_everything(fullname) if fullname in self.needed_by else None

    def _after_everything(self, fullname: str) -> importlib.machinery.ModuleSpec | None:
        """Run everything deferred, unless this import is part of that; it may import `fullname` on the way."""
        with self.lock:
            if self.num_running:
                return None
            self.load_all()
        present = sys.modules.get(fullname)
        if present is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, _Present(present))  # type: ignore[arg-type]
        present.__spec__ = spec  # the import system prefers the spec of a module that appeared meanwhile
        return spec

    def _deferred_spec(
        self, fullname: str, path: Sequence[str] | None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        spec.loader = _DeferredLoader(spec.loader, self)  # type: ignore[assignment]  # a loader by duck type
        self.deferred.append(fullname)
        return spec

    def pending(self) -> tuple[str, ...]:
        """Names of the modules that are still placeholders, in the order in which they were asked for."""
        return tuple(name for name in self.deferred if type(sys.modules.get(name)) is _DeferredModule)

    def load_all(self) -> None:
        """Run everything that is still deferred, in the order in which it was asked for."""
        with self.lock:
            on_load_all, self.on_load_all = self.on_load_all, None
            if on_load_all is not None:
                on_load_all()
            for name in self.pending():
                _load(sys.modules[name])
