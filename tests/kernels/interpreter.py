"""Triton's interpreter behind the driver interface: a "cubin" is JSON that names a source, a launch runs it on the CPU.

So the tests go through the whole run-time path: index, hashes, parameter packing, alignment promises, call sites. Import
this only after `TRITON_INTERPRET=1` is set (the `interpreted` fixture does).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kernels.catalog import OPERATORS, ModelSizes, Specialisation, source_sha256, specialisations
from kernels.cubin import KernelSet, load_kernels
from kernels.cubin_index import INDEX_NAME, KernelEntry, index_bytes, read_index

ARCHITECTURE = "sm_90a"
_DTYPES = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32, "*i32": torch.int32}
_SCALARS = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}


class InterpreterDriver:
    """`kernels.driver.KernelDriver` over host memory."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, int]] = []
        self.unloaded = 0

    def version(self) -> int:
        return 13000

    def load_library(self, image: bytes) -> Any:
        return json.loads(image)

    def get_function(self, library: Any, symbol: str) -> Any:
        return symbol, library

    def launch(
        self, function: Any, grid: int, threads: int, shared: int, cuda_stream: int, slots: int
    ) -> None:
        symbol, constants = function
        self.launches.append((symbol, grid, threads))
        arguments = OPERATORS[symbol].arguments
        addresses = (ctypes.c_void_p * (len(arguments) + 2)).from_address(slots)
        values = [
            _read(argument.type, address)
            for argument, address in zip(arguments, addresses[: len(arguments)], strict=True)
        ]
        for address in addresses[len(arguments) :]:
            assert ctypes.c_uint64.from_address(address).value == 0
        kernel = getattr(importlib.import_module(f"kernels.aot.{symbol}"), symbol)
        kernel[(grid,)](*values, **constants, NATIVE=False)

    def unload(self, library: Any) -> None:
        self.unloaded += 1


def _read(kind: str, address: int) -> Any:
    """A parameter by its slot; pointers become one-element tensors at that address."""
    if kind in _SCALARS:
        return _SCALARS[kind].from_address(address).value
    target = ctypes.c_uint64.from_address(address).value
    size = _DTYPES[kind].itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(target), dtype=_DTYPES[kind])


def write_fake_kernels(folder: Path, wanted: Iterable[Specialisation]) -> None:
    """An index and its "cubins" for the interpreter, as `kernels.aot.compile` lays them out."""
    entries = []
    for item in wanted:
        image = json.dumps({**item.constants, **item.options, "BLOCK": item.block}).encode()
        digest = hashlib.sha256(image).hexdigest()
        entry = KernelEntry(
            operator=item.operator.name,
            architecture=ARCHITECTURE,
            constants=dict(item.constants),
            symbol=item.operator.name,
            arguments=tuple((a.name, a.type, a.multiple) for a in item.operator.arguments),
            grid=item.operator.grid,
            block=item.block,
            rows=item.rows,
            num_warps=item.num_warps,
            num_ctas=1,
            shared=0,
            scratch=0,
            file=f"{ARCHITECTURE}/{item.operator.name}-{digest[:12]}.cubin",
            size=len(image),
            sha256=digest,
            source_sha256=source_sha256(item.operator),
            registers=None,
            stack_bytes=None,
            compiler={"name": "interpreter", "version": "1", "assembler": "13.0.0", "options": {}},
        )
        (folder / entry.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry.file).write_bytes(image)
        entries.append(entry)
    (folder / INDEX_NAME).write_bytes(index_bytes(entries))


def fake_kernels(
    folder: Path, sizes: ModelSizes, tuning: int | None = None
) -> tuple[KernelSet, InterpreterDriver]:
    """A bound set for `sizes`."""
    write_fake_kernels(folder, specialisations(sizes, tuning))
    driver = InterpreterDriver()
    kernels = load_kernels(folder, read_index(folder), ARCHITECTURE, driver)
    kernels.bind()
    return kernels, driver
