"""Fixtures of the benches' dry runs."""

from tests.kernels.conftest import interpreted

__all__ = ["interpreted"]
