"""What tests of one process must not leave to each other."""

from __future__ import annotations

import importlib.util
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
