"""One test suite for all rungs of the ladder: opens streams on a rung and reads back what arrived."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loader.load_plan import LoadPlan
from loader.options import StreamOptions
from loader.progress import LoadMark
from loader.reader_link import ReaderLink
from loader.stream import WeightStream, start
from tests.fakes.driver import SHARED_UNIT, FakeDriver

RUNGS = ["U", "A", "B", "C", "D", "E", "E-threads"]
CHILD_RUNGS = ["U", "A", "D", "E"]


class Rung:
    """`start` opens a stream on the rung; `contents` waits for all of it; `finish` checks the fake driver's books."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_device = not name.startswith("E")
        self.driver = FakeDriver() if self.is_device else None
        self.marks: list[Callable[[], list[LoadMark]]] = []

    def start(
        self, plan: LoadPlan, directory: Path, reader_link: ReaderLink | None = None, **options: Any
    ) -> WeightStream:
        if not self.is_device:
            reader = "threads" if self.name == "E-threads" else "child"
            settings = StreamOptions(reader=reader, **options)
            return start(plan, directory, options=settings, reader=reader_link)
        settings = {"path": self.name, "ring_bytes": 2 * plan.chunk_bytes, **options}
        if self.name == "U":
            settings.setdefault("uploader_driver", "tests.fakes.remote_driver:plain")
        stream = start(
            plan,
            directory,
            device="cuda",
            options=StreamOptions(driver=self.driver, **settings),
            reader=reader_link,
        )
        self.marks.append(stream.marks)
        return stream

    def contents(self, stream: WeightStream) -> dict[str, bytes]:
        state = stream.state_dict()
        if self.driver is not None:
            self.driver.caller.synchronize()
        return {name: raw_bytes(tensor) for name, tensor in state.items()}

    def device_bytes(self, *arenas: int) -> int:
        """What the fake device holds for arenas of these sizes."""
        unit = SHARED_UNIT if self.name == "U" else 1
        return sum(-(-size // unit) * unit for size in arenas)

    def finish(self) -> None:
        if self.driver is not None:
            self.driver.finish()
        endings = [mark.name for marks in self.marks for mark in marks() if "process ended" in mark.name]
        assert endings == []


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's memory. Copied by address: torch refuses to reinterpret bool."""
    return (
        ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""
    )
