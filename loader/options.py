"""How a load runs, as opposed to what it loads."""

from __future__ import annotations

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
        for name in (
            "threads",
            "sharers",
            "ring_bytes",
            "slot_bytes",
            "part_bytes",
            "staging_slots",
            "storage_gbps",
            "max_load_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise CapabilityError("option must be positive", where=name, found=value)
        for name in ("ring_bytes", "slot_bytes", "part_bytes"):
            if (getattr(self, name) or 0) % 4096:
                raise CapabilityError(
                    "option must be a multiple of 4096", where=name, found=getattr(self, name)
                )


def _check(name: str, value: object, allowed: object) -> None:
    if value not in allowed:  # type: ignore[operator]
        raise CapabilityError("unknown option value", where=name, found=repr(value), expected=list(allowed))  # type: ignore[call-overload]
