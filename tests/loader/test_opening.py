"""The uploader's context is made while its driver package is imported: both are needed, and either's failure is the cause."""

from __future__ import annotations

import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from loader import cuda_library, driver
from loader.errors import CapabilityError, InternalError
from loader.upload_post import Refused
from loader.upload_process import Opening, open_beside_import


class Machine:
    """A driver library and a package over it. The context is made only once the import has begun, and the other way round."""

    def __init__(self, context: Exception | int = 7, package: Exception | None = None) -> None:
        self.context, self.package = context, package
        self.meet = threading.Barrier(2)
        self.retained: list[int] = []
        self.used: list[int] = []

    def library(self) -> Any:
        return SimpleNamespace(retain_context=self.retain)

    def retain(self, ordinal: int) -> int:
        self.meet.wait(60)
        self.retained.append(ordinal)
        if isinstance(self.context, Exception):
            raise self.context
        return self.context

    def imported(self) -> Any:
        self.meet.wait(60)
        if self.package is not None:
            raise self.package
        return self

    def use_context(self, context: int) -> None:
        self.used.append(context)


def put_in_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "cuda_library", machine.library)
    monkeypatch.setattr(driver, "CudaDriver", machine.imported)


def test_both_happen_at_once_and_the_context_is_retained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    put_in_place(machine, monkeypatch)
    assert open_beside_import(3) == (machine, 7)
    assert machine.retained == [3]


@pytest.mark.parametrize(
    "machine",
    [
        Machine(context=CapabilityError("CUDA cannot start", where="cuInit")),
        Machine(package=CapabilityError("CUDA cannot start", where="cuda.bindings")),
    ],
    ids=["context", "package"],
)
def test_a_failure_of_either_is_the_reason_to_refuse(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(machine, monkeypatch)
    opening = Opening("", 0)
    assert select.select([opening.fd], [], [], 60)[0]
    with pytest.raises(Refused, match="CUDA cannot start"):
        opening.take()


def test_what_was_opened_is_current_for_its_taker(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    put_in_place(machine, monkeypatch)
    opening = Opening("", 0)
    assert select.select([opening.fd], [], [], 60)[0]
    assert opening.take() is machine  # type: ignore[comparison-overlap]
    assert machine.used == [7]


def test_a_library_that_does_not_start_says_what_to_check() -> None:
    """cuInit of a machine that has the library and no device."""

    class Broken(cuda_library.CudaLibrary):
        def __init__(self) -> None:
            return

        def _call(self, name: str, *arguments: object) -> None:
            raise InternalError(f"{name} failed: CUDA_ERROR_NO_DEVICE", where="CUDA driver")

    with pytest.raises(
        CapabilityError, match=r"CUDA cannot start.*CUDA_ERROR_NO_DEVICE.*check that the container"
    ):
        Broken().retain_context(0)
