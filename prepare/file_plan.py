"""Which prepared file holds which tensor at which offset. Pure: specs in, places and header bytes out.

Tensors start at multiples of 256 bytes and groups at pages; explicit `__pad__.<n>` tensors fill the holes, because a
safetensors file may have none. Tensors whose size is no multiple of 256 go to the end of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loader.header import (
    PAD_PREFIX,
    PAGE_BYTES,
    TENSOR_ALIGN_BYTES,
    TensorEntry,
    build_header,
    round_up,
)
from prepare.recipe import OutputGroup, OutputTensor

MAX_FILE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """An output tensor, or filler if `output` is None, at [begin, end) of the data section."""

    output: OutputTensor | None
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """Range of the data section, fillers up to the next group included; the last group ends with the data."""

    group: OutputGroup
    start: int
    end: int


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file. `header` has a multiple of 4096 bytes."""

    path: str
    component: str
    header: bytes
    tensors: tuple[PlacedTensor, ...]
    groups: tuple[PlacedGroup, ...]

    @property
    def shard(self) -> str:
        return self.groups[0].group.shard

    @property
    def data_bytes(self) -> int:
        return self.tensors[-1].end

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.data_bytes


def plan_weight_files(
    groups: Sequence[OutputGroup], model: str, limit: int = MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Cut each component's groups, in their order, into `weights/<component>[.<shard>]-<n>.safetensors`.

    A file closes before the group that would take its data section past `limit`; a group is never split.
    """
    parts: dict[str, list[list[OutputGroup]]] = {}
    sizes: dict[str, int] = {}
    for group in groups:
        size = round_up(
            sum(round_up(t.spec.num_bytes, TENSOR_ALIGN_BYTES) for t in group.tensors), PAGE_BYTES
        )
        series = f"{group.component}.{group.shard}" if group.shard else group.component
        files = parts.setdefault(series, [[]])
        if files[-1] and sizes[series] + size > limit:
            files.append([])
        sizes[series] = size + (sizes[series] if files[-1] else 0)
        files[-1].append(group)
    return [
        plan_file(
            f"weights/{series}-{number}.safetensors", file_groups, {"model": model, "part": str(number)}
        )
        for series, files in parts.items()
        for number, file_groups in enumerate(files, start=1)
    ]


def plan_file(path: str, groups: Sequence[OutputGroup], metadata: dict[str, str]) -> PlannedFile:
    """Place the groups of one file. All belong to one component."""
    placed: list[PlacedTensor] = []
    starts: list[int] = []
    for group in groups:
        _pad(placed, PAGE_BYTES)
        starts.append(placed[-1].end if placed else 0)
        for tensor in sorted(group.tensors, key=lambda t: t.spec.num_bytes % TENSOR_ALIGN_BYTES != 0):
            _pad(placed, TENSOR_ALIGN_BYTES)
            begin = placed[-1].end if placed else 0
            placed.append(PlacedTensor(tensor, begin, begin + tensor.spec.num_bytes))
    ends = [*starts[1:], placed[-1].end]
    component = groups[0].component
    note = {"format": "pt", "component": component, "note": f"{PAD_PREFIX}* is filler", **metadata}
    return PlannedFile(
        path,
        component,
        build_header(_entries(placed), note),
        tuple(placed),
        tuple(PlacedGroup(g, start, end) for g, start, end in zip(groups, starts, ends, strict=True)),
    )


def _pad(placed: list[PlacedTensor], multiple: int) -> None:
    end = placed[-1].end if placed else 0
    if end % multiple:
        placed.append(PlacedTensor(None, end, round_up(end, multiple)))


def _entries(placed: Sequence[PlacedTensor]) -> list[TensorEntry]:
    entries: list[TensorEntry] = []
    num_pads = 0
    for tensor in placed:
        if tensor.output is None:
            shape: tuple[int, ...] = (tensor.end - tensor.begin,)
            entries.append(TensorEntry(f"{PAD_PREFIX}{num_pads}", "U8", shape, tensor.begin, tensor.end))
            num_pads += 1
        else:
            spec = tensor.output.spec
            entries.append(TensorEntry(tensor.output.name, spec.dtype, spec.shape, tensor.begin, tensor.end))
    return entries
