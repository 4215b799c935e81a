"""Names of devices."""

from __future__ import annotations

import pytest

from loader.devices import device_ordinal
from loader.errors import CapabilityError


@pytest.mark.parametrize(
    ("name", "ordinal"), [("cpu", -1), ("cuda", 0), ("cuda:0", 0), ("cuda:7", 7), ("cuda:012", 12)]
)
def test_ordinal(name: str, ordinal: int) -> None:
    assert device_ordinal(name) == ordinal


@pytest.mark.parametrize(
    "name",
    ["", "CUDA", "cuda:", "cuda:-1", "cuda:1.0", "cuda:1234", "cuda:٣", "cuda: 1", "cpu:0", "mps", "cuda1"],
)
def test_others_are_refused_by_name(name: str) -> None:
    with pytest.raises(CapabilityError, match="unknown device") as refusal:
        device_ordinal(name)
    assert repr(name) in str(refusal.value)
