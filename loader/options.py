"""How a load runs, as opposed to what it loads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loader.errors import CapabilityError
from loader.plan_wire import VERIFY_LEVELS
from loader.reader import PART_BYTES

if TYPE_CHECKING:
    from loader.driver import Driver

PATHS = ("U", "A", "B", "C", "D", "E")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Everything is optional; None means: chosen by budget or by probing.

    Raises: CapabilityError: a value that cannot be; names the field and what is allowed.

    Attributes:
        threads: reader threads.
        sharers: processes of this host that load at the same time, each with readers of its own; the CPUs are shared out.
        verify: "edges" (default), "full" or "auto"; what each finds is in `loader.verify`.
        path: force a rung of the ladder, "U", "A" … "E" (see `loader.ladder`).
        reader: force "child" or "threads".
        ring_bytes, slot_bytes: size of the host ring and of its slots; multiples of 4096.
        part_bytes: what one thread reads of a slot at a time; a multiple of 4096.
        staging_slots: of the device ring that coded weights are unpacked from (None: 24); a slot is `slot_bytes`.
        reserve_bytes: device memory that must stay free besides the arenas.
        storage_gbps: throttle in 10^9 bytes per second, for experiments.
        max_load_s: give up after this time.
        storage_fault: test hook of the reader.
        driver: another implementation of the driver calls, for tests.
        uploader_driver: `module:function` that makes one in the uploader's process; test hook like `storage_fault`.
    """

    threads: int | None = None
    sharers: int = 1
    verify: str = "edges"
    path: str | None = None
    reader: str | None = None
    ring_bytes: int | None = None
    slot_bytes: int | None = None
    part_bytes: int = PART_BYTES
    staging_slots: int | None = None
    reserve_bytes: int = 0
    storage_gbps: float | None = None
    max_load_s: float | None = None
    storage_fault: str = ""
    driver: Driver | None = None
    uploader_driver: str = ""

    def __post_init__(self) -> None:
        _check("verify", self.verify, VERIFY_LEVELS)
        _check("path", self.path, (None, *PATHS))
        _check("reader", self.reader, (None, "child", "threads"))
        for name, (least, most, unit, is_optional) in _INTEGERS.items():
            value = getattr(self, name)
            if not ((value is None and is_optional) or _is_integer(value, least, most, unit)):
                allowed = f"an integer from {least} to {most}"
                allowed += f" that is a multiple of {unit}" if unit > 1 else ""
                raise _bad_value(name, value, allowed, is_optional)
        for name in ("storage_gbps", "max_load_s"):
            value = getattr(self, name)
            if not (value is None or _is_positive(value)):
                raise _bad_value(name, value, "a finite number above 0", True)


_MOST_COUNT, _MOST_BYTES = 2**32 - 1, 2**63 - 1  # what the wire formats hold
# least, most, a multiple of, whether None is allowed
_INTEGERS: Mapping[str, tuple[int, int, int, bool]] = {
    "threads": (1, _MOST_COUNT, 1, True),
    "sharers": (1, _MOST_COUNT, 1, False),
    "ring_bytes": (4096, _MOST_BYTES, 4096, True),
    "slot_bytes": (4096, _MOST_BYTES, 4096, True),
    "part_bytes": (4096, _MOST_COUNT, 4096, False),
    "staging_slots": (1, _MOST_COUNT, 1, True),
    "reserve_bytes": (0, _MOST_BYTES, 1, False),
}


def _is_integer(value: object, least: int, most: int, unit: int) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and least <= value <= most and value % unit == 0  # type: ignore[operator]


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


def _bad_value(name: str, value: object, allowed: str, is_optional: bool) -> CapabilityError:
    return CapabilityError(
        "option is out of range",
        where=name,
        found=repr(value),
        expected=f"{allowed}, or None" if is_optional else allowed,
    )


def _check(name: str, value: object, allowed: Iterable[str | None]) -> None:
    if value not in list(allowed):
        raise CapabilityError("unknown option value", where=name, found=repr(value), expected=list(allowed))
