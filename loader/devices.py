"""Names of devices. On the way to the uploader's process, which is spawned before anything else is imported."""

from __future__ import annotations

from loader.errors import CapabilityError

_MAX_DIGITS = 3


def device_ordinal(device: str) -> int:
    """-1 for "cpu", N for "cuda:N", 0 for "cuda". Raises: CapabilityError."""
    kind, colon, number = device.partition(":")
    is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
    if device != "cpu" and (kind != "cuda" or (colon and not is_number)):
        raise CapabilityError(
            "unknown device", where="device", found=repr(device), expected="cpu, cuda, cuda:<number>"
        )
    return -1 if device == "cpu" else int(number or 0)
