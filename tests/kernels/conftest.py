"""Fixtures of the kernel tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Triton sources run in its interpreter, on the CPU.

    Triton decides that when its own library is imported, and something else may have imported it in this process
    already; so the module is imported afresh here and put back afterwards. The native part stays: it cannot be
    initialised twice, and does not take part.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in list(sys.modules):
            if _is_triton_source(name):
                patch.delitem(sys.modules, name)
        yield
        for name in list(sys.modules):
            if _is_triton_source(name):
                del sys.modules[name]


def _is_triton_source(name: str) -> bool:
    if name.startswith("triton._C"):
        return False
    return name == "triton" or name.startswith(("triton.", "kernels.aot."))
