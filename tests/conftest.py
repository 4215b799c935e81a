"""What tests of one process must not leave to each other."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # rented hosts have none
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # an example may be preempted for long
    settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """A worker switches gradients off for its process, which is also that of the next test."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_grad_enabled(True)


# What pytest and torch set for themselves, once.
_LIBRARIES_OWN = ("PYTEST_", "TORCH", "TRITON_", "KMP_", "CUDA_MODULE_LOADING")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A test that leaves a variable changed fails itself, instead of the processes that a later test starts."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    left = {name for name in changed if not name.startswith(_LIBRARIES_OWN)}
    for name in left:
        os.environ.pop(name, None)
    os.environ.update({name: before[name] for name in left if name in before})
    assert not left, "variables that the test left changed"
