"""The thread that maps torch's libraries, with a dynamic linker that only takes notes."""

from __future__ import annotations

import pytest

from runtime import torch_preload
from runtime.torch_preload import Preload


def test_what_needs_the_linker_comes_before_it_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def dlopen(path: bytes, flags: int) -> int:
        seen.append(path.decode())
        return 1

    monkeypatch.setattr(torch_preload, "_loader_functions", lambda: (dlopen, lambda: None))
    preload = Preload(["a.so", "b.so"], lambda: seen.append("first"))
    preload.join()
    assert seen == ["first", "a.so", "b.so"]
    assert preload.problem == ""


def test_a_library_that_cannot_be_mapped_ends_it_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch_preload, "_loader_functions", lambda: (lambda path, flags: None, lambda: b"no such file")
    )
    preload = Preload(["a.so", "b.so"])
    preload.join()
    assert preload.problem == "no such file"
