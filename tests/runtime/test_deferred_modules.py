"""Deferred modules on packages written here: what sets one off, what does not, and in which order code runs."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.deferred_modules import Deferral
from runtime.torch_preload import Preload, ReadyCode

RAN: list[str] = []
"""Names of modules in the order in which their code ran (the packages below append to it)."""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a module of the package `shelf` that records its run; afterwards nothing of it stays."""
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    RAN.clear()
    monkeypatch.setattr(sys, "shelf_ran", RAN, raising=False)

    def write_module(name: str, body: str = "") -> None:
        path = tmp_path.joinpath(*name.split("."))
        path = path / "__init__.py" if name in {"shelf", "shelf.box"} else path.with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import sys\nsys.shelf_ran.append(__name__)\n{body}\n", "utf-8")

    write_module("shelf")
    yield write_module
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "shelf"]:
        del sys.modules[name]


def deferred(*names: str, **options: object) -> Deferral:
    deferral = Deferral(names, **options)  # type: ignore[arg-type]
    deferral.install()
    return deferral


def test_import_runs_nothing_and_an_attribute_runs_it_once(write: Callable[[str, str], None]) -> None:
    write("shelf.late", "value = 7")
    deferral = deferred("shelf.late")
    import_twice = [importlib.import_module("shelf.late") for _ in range(2)]
    assert RAN == ["shelf"]
    assert deferral.pending() == ("shelf.late",)
    assert [module.value for module in import_twice] == [7, 7]
    assert RAN == ["shelf", "shelf.late"]
    assert deferral.pending() == ()
    assert type(import_twice[0]) is types.ModuleType
    assert sys.modules["shelf.late"] is import_twice[0]


@pytest.mark.parametrize("use", ["setattr(m, 'x', 1)", "dir(m)", "del m.value", "from shelf.late import *"])
def test_other_uses_run_it_too(write: Callable[[str, str], None], use: str) -> None:
    write("shelf.late", "value = 7")
    deferred("shelf.late")
    scope = {"m": importlib.import_module("shelf.late")}
    exec(use, scope)
    assert RAN == ["shelf", "shelf.late"]


def test_what_inspection_reads_runs_nothing(write: Callable[[str, str], None]) -> None:
    write("shelf.late", "value = 7")
    deferred("shelf.late")
    module = importlib.import_module("shelf.late")
    assert module.__name__ == "shelf.late"
    assert Path(module.__file__ or "").name == "late.py"
    assert not hasattr(module, "__warningregistry__")
    assert inspect.getmodule(write) is sys.modules[__name__]  # walks every module of the process
    assert RAN == ["shelf"]


def test_a_package_runs_before_its_submodules(write: Callable[[str, str], None]) -> None:
    write("shelf.box", "inside = 1")
    write("shelf.box.item", "from shelf.box import inside")
    deferred("shelf.box")
    importlib.import_module("shelf.box")
    assert RAN == ["shelf"]
    importlib.import_module("shelf.box.item")
    assert RAN == ["shelf", "shelf.box", "shelf.box.item"]


def test_a_module_may_import_itself_while_it_runs(write: Callable[[str, str], None]) -> None:
    write(
        "shelf.late",
        "first = 1\nfrom shelf import late\nsecond = late.first + 1\nhas_third = hasattr(late, 'third')",
    )
    deferred("shelf.late")
    module = importlib.import_module("shelf.late")
    assert (module.second, module.has_third) == (2, False)


def test_a_failure_is_raised_and_the_next_use_tries_again(write: Callable[[str, str], None]) -> None:
    write("shelf.late", "if len(sys.shelf_ran) < 3: raise OSError('disk')\nvalue = 7")
    deferred("shelf.late")
    module = importlib.import_module("shelf.late")
    with pytest.raises(OSError, match="disk"):
        module.value  # noqa: B018
    assert module.value == 7


def test_a_missing_attribute_is_the_usual_error(write: Callable[[str, str], None]) -> None:
    write("shelf.late", "value = 7")
    deferred("shelf.late")
    with pytest.raises(AttributeError, match=r"module 'shelf\.late' has no attribute 'nothing'"):
        importlib.import_module("shelf.late").nothing  # noqa: B018


def test_names_that_are_not_there_and_later_imports_are_as_usual(write: Callable[[str, str], None]) -> None:
    write("shelf.later", "value = 7")
    deferral = deferred("shelf.absent", "shelf.later")
    with pytest.raises(ModuleNotFoundError, match=r"shelf\.absent"):
        importlib.import_module("shelf.absent")
    deferral.stop()
    importlib.import_module("shelf.later")
    assert RAN == ["shelf", "shelf.later"]
    deferral.remove()
    deferral.remove()
    assert deferral not in sys.meta_path


def test_an_import_that_needs_everything_runs_it_first(write: Callable[[str, str], None]) -> None:
    for name in ("shelf.a", "shelf.b", "shelf.compiler"):
        write(name, "")
    calls: list[list[str]] = []
    deferral = deferred(
        "shelf.b", "shelf.a", needed_by=["shelf.compiler"], on_load_all=lambda: calls.append([*RAN])
    )
    importlib.import_module("shelf.b")
    importlib.import_module("shelf.a")
    deferral.stop()
    importlib.import_module("shelf.compiler")
    assert RAN == ["shelf", "shelf.b", "shelf.a", "shelf.compiler"]
    deferral.load_all()
    assert calls == [["shelf"]]


def test_what_needs_everything_runs_once_if_something_deferred_imports_it(
    write: Callable[[str, str], None],
) -> None:
    write("shelf.a", "import shelf.compiler")
    write("shelf.compiler", "import shelf.b")
    write("shelf.b", "")
    deferral = deferred("shelf.a", needed_by=["shelf.compiler", "shelf.b"])
    importlib.import_module("shelf.a")
    deferral.stop()
    module = importlib.import_module("shelf.compiler")
    assert RAN == ["shelf", "shelf.a", "shelf.compiler", "shelf.b"]
    assert sys.modules["shelf.compiler"] is module
    assert module.__spec__ is not None
    assert Path(module.__spec__.origin or "").name == "compiler.py"


def test_threads_see_a_module_only_when_it_is_complete(write: Callable[[str, str], None]) -> None:
    entered, go_on = threading.Event(), threading.Event()
    sys.shelf_events = (entered, go_on)  # type: ignore[attr-defined]
    write("shelf.late", "entered, go_on = sys.shelf_events\nentered.set()\nassert go_on.wait(20)\nvalue = 7")
    deferred("shelf.late")
    module = importlib.import_module("shelf.late")
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(module.value)) for _ in range(4)]
    threads[0].start()
    assert entered.wait(20)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    del sys.shelf_events  # type: ignore[attr-defined]
    assert seen == [7] * 4
    assert RAN == ["shelf", "shelf.late"]


# ---- bytecode read ahead


class Mapping(Preload):
    """A preload that is over after a number of questions."""

    def __init__(self, answers: int) -> None:
        super().__init__([])
        self.answers = answers

    @property
    def is_running(self) -> bool:
        self.answers -= 1
        return self.answers >= 0


def test_code_read_ahead_is_what_the_import_runs(write: Callable[[str, str], None], tmp_path: Path) -> None:
    write("shelf.late", "value = 7")
    code = ReadyCode(str(tmp_path))
    code.read(["shelf", "shelf.late", "shelf.absent", "shelf.none.deep"], Mapping(9))
    assert len(code) == 2
    assert RAN == []
    code.install()
    module = importlib.import_module("shelf.late")
    assert (module.value, RAN) == (7, ["shelf", "shelf.late"])
    assert len(code) == 0
    assert "value = 7" in inspect.getsource(module)
    code.remove()
    assert code not in sys.meta_path


def test_reading_ahead_ends_with_the_mapping(write: Callable[[str, str], None], tmp_path: Path) -> None:
    write("shelf.a", "")
    code = ReadyCode(str(tmp_path))
    code.read(["shelf", "shelf.a"], Mapping(1))
    assert len(code) == 1


def test_a_module_that_does_not_compile_is_left_to_the_import(
    write: Callable[[str, str], None], tmp_path: Path
) -> None:
    write("shelf.late", "value = = 7")
    code = ReadyCode(str(tmp_path))
    code.read(["shelf.late"], Mapping(9))
    code.install()
    assert len(code) == 0
    with pytest.raises(SyntaxError):
        importlib.import_module("shelf.late")
