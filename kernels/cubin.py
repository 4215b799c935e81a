"""Precompiled kernels at run time: check, load and launch cubins on torch's stream, without Triton or a compiler.

Order: `load_kernels` may run before a CUDA context exists (it reads, hashes and hands the files to the driver);
`KernelSet.bind` needs the context and moves the code to the device, so that the first launch does not. Nothing is
compiled, tuned or cached.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.catalog import OPERATORS, architecture_of
from kernels.cubin_index import KernelEntry, for_architecture, parse_entries
from kernels.driver import CudaDriver, KernelDriver
from loader.errors import ArtifactError, CapabilityError, InternalError, WorkerError

# struct codes of one parameter in a slot of 8 bytes.
_SLOT_FORMATS = {"i32": "i4x", "fp32": "f4x"}
_POINTER_FORMAT = "Q"


class Kernel:
    """One loaded cubin. `launch` is safe from several threads.

    entry: its record. block: tile of the launch rule (columns or heads of one program). rows: of one program.
    """

    def __init__(self, entry: KernelEntry, library: Any, driver: KernelDriver) -> None:
        self.entry = entry
        self.block, self.rows = entry.block, entry.rows
        self._library = library
        self._driver = driver
        self._function: Any = None
        self._threads = 32 * entry.num_warps
        types = [kind for _, kind, _ in entry.arguments]
        # Triton appends two pointers, global and profile scratch; null here (no kernel uses them).
        self._layout = struct.Struct(
            "<" + "".join(_SLOT_FORMATS.get(kind, _POINTER_FORMAT) for kind in types) + "QQ"
        )
        self._values = ctypes.create_string_buffer(self._layout.size)
        base = ctypes.addressof(self._values)
        count = len(types) + 2
        self._slots = (ctypes.c_void_p * count)(*(base + 8 * slot for slot in range(count)))
        self._slots_address = ctypes.addressof(self._slots)
        self._promises = tuple(
            (position, multiple) for position, (_, _, multiple) in enumerate(entry.arguments) if multiple > 1
        )
        self._lock = threading.Lock()

    def bind(self) -> None:
        """Move the code to the device. Needs a current context; harmless when repeated."""
        if self._function is None:
            self._function = self._driver.get_function(self._library, self.entry.symbol)

    def launch(self, programs: int, cuda_stream: int, *values: int | float) -> None:
        """Enqueue `programs` programs on a stream given as an integer handle; nothing for 0.

        Args:
            values: in the order of `entry.arguments`; pointers as addresses.
        Raises: InternalError: not bound, or a value breaks an alignment promise (launching would fault and take
        the context with it); names the argument.
        """
        if programs == 0:
            return
        if self._function is None:
            raise InternalError("kernel is launched before bind()", where=self.entry.title)
        for position, multiple in self._promises:
            if values[position] % multiple:
                self._refuse(position, values[position])
        with self._lock:  # the driver copies the parameters during the call
            self._layout.pack_into(self._values, 0, *values, 0, 0)
            self._driver.launch(
                self._function, programs, self._threads, self.entry.shared, cuda_stream, self._slots_address
            )

    def unload(self) -> None:
        self._function = None
        self._driver.unload(self._library)

    def _refuse(self, position: int, value: int | float) -> None:
        name, _, multiple = self.entry.arguments[position]
        raise InternalError(
            "argument breaks the kernel's alignment promise",
            where=f"{self.entry.title}: {name}",
            found=value,
            expected=f"a multiple of {multiple}",
        )


class KernelSet:
    """The kernels of one architecture, found by operator and constants.

    architecture: the device's. device_type: torch's name for where its driver runs kernels. note: why the set is
    empty, else None; for the timeline.
    """

    def __init__(
        self, architecture: str, kernels: Iterable[Kernel], device_type: str, note: str | None = None
    ) -> None:
        self.architecture = architecture
        self.device_type = device_type
        self.note = note
        self._kernels = {_key(kernel.entry): kernel for kernel in kernels}

    def __len__(self) -> int:
        return len(self._kernels)

    def find(self, operator: str, *constants: int) -> Kernel | None:
        """The kernel with these constants, in the order the catalog declares them, or None."""
        return self._kernels.get((operator, constants))

    def bind(self) -> None:
        """`Kernel.bind` for all: about 0.1 ms each, once a context exists."""
        for kernel in self._kernels.values():
            kernel.bind()

    def close(self) -> None:
        """Unload everything; twice is harmless. No launch may be running."""
        kernels, self._kernels = self._kernels, {}
        for kernel in kernels.values():
            kernel.unload()


def _key(entry: KernelEntry) -> tuple[str, tuple[int, ...]]:
    return entry.operator, tuple(entry.constants[name] for name in OPERATORS[entry.operator].constants)


def open_kernels(
    folder: Path,
    documents: Sequence[Mapping[str, Any]],
    capability: tuple[int, int],
    driver: KernelDriver | None = None,
) -> KernelSet:
    """`load_kernels` from a manifest's `kernels` list, for the device of this compute capability.

    May run before a CUDA context exists. Raises as `parse_entries` and `load_kernels`.
    """
    architecture = architecture_of(capability)
    entries = for_architecture(parse_entries(documents), architecture)
    return load_kernels(folder, entries, architecture, driver or CudaDriver())


def load_kernels(
    folder: Path, entries: Sequence[KernelEntry], architecture: str, driver: KernelDriver
) -> KernelSet:
    """Read, check and load the cubins of one architecture.

    Args:
        folder: what the entries' file names are relative to.
        entries: checked entries (`parse_entries`), all of `architecture`: select with `for_architecture`.
        architecture: of the device (`catalog.architecture_of`).
    Returns: a set, not yet bound; empty and with a note if `entries` is empty. Callers then run the eager
    operators, which are several times slower at those sites and give the same values up to the order of sums.
    Raises: ArtifactError: a file is missing or not what the entry says. CapabilityError: an entry is for another
    architecture, or the driver is older than the compiler that made it. Both name the kernel.
    """
    if not entries:
        return KernelSet(architecture, (), driver.device_type, f"no kernels were prepared for {architecture}")
    for entry in entries:
        _check_runs_here(entry, architecture, driver.version())
    return KernelSet(architecture, [_load(folder, entry, driver) for entry in entries], driver.device_type)


def _check_runs_here(entry: KernelEntry, architecture: str, driver_version: int) -> None:
    if entry.architecture != architecture:
        raise CapabilityError(
            "kernel was compiled for another architecture",
            where=entry.title,
            found=entry.architecture,
            expected=architecture,
            hint="prepare again with this architecture, or run without precompiled kernels",
        )
    needed = int(str(entry.compiler["assembler"]).split(".")[0])
    if driver_version // 1000 < needed:
        raise CapabilityError(
            "driver is older than the kernel's compiler",
            where=entry.title,
            found=f"CUDA {driver_version // 1000}.{driver_version % 1000 // 10}",
            expected=f"CUDA {needed} or newer",
            hint="update the driver, or run without precompiled kernels",
        )


def _load(folder: Path, entry: KernelEntry, driver: KernelDriver) -> Kernel:
    path = folder / entry.file
    where = f"{path}: {entry.title}"
    try:
        image = path.read_bytes()
    except OSError as cause:
        raise ArtifactError("kernel file cannot be read", where=where, found=str(cause)) from cause
    found = hashlib.sha256(image).hexdigest()
    if found != entry.sha256 or len(image) != entry.size:
        raise ArtifactError(
            "kernel file is not the one that was compiled",
            where=where,
            found=f"{len(image)} bytes, sha256 {found}",
            expected=f"{entry.size} bytes, sha256 {entry.sha256}",
        )
    try:
        return Kernel(entry, driver.load_library(image), driver)
    except WorkerError as cause:
        raise ArtifactError("driver refuses the kernel", where=where, found=str(cause)) from cause
