"""Model families that can be prepared. Entries are module names, imported on use; this is the registry's only place.

A family module has one function, `open_source(checkpoint, options) -> FamilySource`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from kernels.catalog import ModelSizes
from loader.errors import RequestError
from prepare.adapters import Adapter
from prepare.digests import FileDigests
from prepare.file_plan import PlannedFile
from prepare.merge import Updates
from prepare.recipe import Recipe
from prepare.repack import Advance, Sources
from prepare.scan import FiniteScan
from runtime.schedules import Schedule

FAMILIES = {"minimax_h3": "prepare.families.minimax_h3.source"}

DTYPES = {"bfloat16": "BF16", "float32": "F32"}
VAE_LINEARS = {"float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class PrepareOptions:
    """What the caller chooses. Everything but `device` and `workers` decides bytes and is written to the manifest.

    tasks, schedules, sigmas: all empty means what the checkpoint's release is for. sigmas: ladders of the caller's own.
    partition: which of a release's transformers. lora: adapter files to merge, each with its scale.
    dtype: `bfloat16` stores published types, `float32` widens everything.
    vae_linears: the video decoder's block linears, published in float32. `float16` rounds them once, as the published
        fast path does before every product: half the bytes, the same pixels on a GPU. `dtype` float32 keeps them.
    adaln: how tables are computed; `device` only matters for `match`.
    ranks: numbers of ranks that the directory serves; with just 1 nothing is cut, and it serves any number whole.
    codec: `ans` stores large tensors coded, without loss, for GPUs to unpack; `none` suits every machine.
    kernels: architectures to compile the operators for, see `kernels.catalog.ARCHITECTURES`.
    max_file_bytes: weight files are cut before this size. workers: files written at the same time; 0 = by CPUs.
    """

    tasks: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    sigmas: tuple[Schedule, ...] = ()
    partition: str = ""
    lora: tuple[tuple[Path, float], ...] = ()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    vae_linears: Literal["float16", "float32"] = "float16"
    adaln: Literal["canonical", "match"] = "canonical"
    device: str = "cpu"
    variant: str = "auto"
    repository: str = ""
    revision: str = ""
    codec: Literal["none", "ans"] = "none"
    ranks: tuple[int, ...] = (1,)
    kernels: tuple[str, ...] = ()
    max_file_bytes: int = 8 << 30
    workers: int = 0


class Table(Protocol):
    """A table of one step schedule and task that prepare computes.

    key: its name in group, tensor and file names. condition_bits, condition_index: of the manifest's `schedules`.
    """

    @property
    def schedule(self) -> Schedule: ...
    @property
    def task(self) -> str: ...
    @property
    def file(self) -> PlannedFile: ...
    @property
    def key(self) -> str: ...
    @property
    def condition_bits(self) -> list[str]: ...
    @property
    def condition_index(self) -> tuple[int, ...]: ...


class FamilySource(Protocol):
    """One opened checkpoint: everything checked that headers and configurations can tell.

    updates: what adapters change. facts: further keys of the manifest's `model`.
    """

    root: Path
    layout: str
    family: str
    variant: str
    notes: Sequence[str]
    tasks: Sequence[str]
    sources: Sources
    recipe: Recipe
    tables: Sequence[Table]
    tokenizer: bytes
    orders: Mapping[str, Sequence[str]]
    updates: Updates
    adapters: Sequence[Adapter]
    facts: Mapping[str, object]
    read_files: Sequence[Path]
    kernel_sizes: ModelSizes

    def config(self) -> dict[str, Any]:
        """Sizes of all networks, as the manifest stores them."""
        ...

    def row_layout(self) -> Mapping[str, str]:
        """Row orders of fused tensors, as the manifest stores them."""
        ...

    def table_bytes(self) -> int:
        """Published bytes that `write_tables` reads."""
        ...

    def write_tables(
        self,
        files: Sequence[BinaryIO],
        options: PrepareOptions,
        scan: FiniteScan,
        advance: Advance,
        workers: int,
    ) -> tuple[list[FileDigests], str]:
        """Fill all tables: new files, open for reading and writing, in the order of `tables`.

        Returns: their digests, and one of the published tensors that they were computed from.
        """
        ...


OpenSource = Callable[[Path, PrepareOptions], FamilySource]


def open_source(
    checkpoint: Path, options: PrepareOptions, family: str = next(iter(FAMILIES))
) -> FamilySource:
    """Open a checkpoint of a family.

    Raises: RequestError: unknown family. ArtifactError, CapabilityError: see the family.
    """
    if family not in FAMILIES:
        raise RequestError(
            "unknown model family", where="family", found=repr(family), expected=", ".join(FAMILIES)
        )
    opener: OpenSource = importlib.import_module(FAMILIES[family]).open_source
    return opener(checkpoint, options)
