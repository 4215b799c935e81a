"""Plans over plain safetensors files that nobody prepared: header checks, no digests, any alignment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from loader.errors import ArtifactError
from loader.header import (
    PAD_PREFIX,
    PAGE_BYTES,
    TENSOR_ALIGN_BYTES,
    Header,
    TensorEntry,
    read_header,
    round_up,
)
from loader.load_plan import LoadPlan, PlanArena, PlanFile, PlanGroup, PlanTensor, Run, recut
from loader.manifest import CHUNK_BYTES
from loader.strict_json import is_path_text, load_json

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor of one file and where its bytes go."""

    file: int
    entry: TensorEntry
    arena_offset: int


def plan_files(
    directory: Path | str,
    files: Sequence[str] | None = None,
    *,
    select: Callable[[str], bool] | None = None,
    group_of: Callable[[str], str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> LoadPlan:
    """Plan a load of plain files into one arena.

    Args:
        files: names relative to `directory`; None = its `*.safetensors.index.json`, or else all `*.safetensors` there.
        select: which tensors to load, by name; None = all.
        group_of: tensor name → group name; None = one group per file. Groups are read in order of first appearance.
    Raises: ArtifactError: bad headers, an index that disagrees with its shards, a tensor in two files.
    """
    directory = Path(directory)
    names, index = _resolve(directory, files)
    headers = [read_header(directory / name, name) for name in names]
    _check_names(names, headers, index)
    wanted = [_in_use(header, select) for header in headers]
    is_aligned = all(t.begin % TENSOR_ALIGN_BYTES == 0 for spans in wanted for span in spans for t in span)
    placed, size = _keep_layout(wanted) if is_aligned else _move(wanted)
    start = [header.data_start for header in headers]
    runs = [
        Run(p.file, start[p.file] + p.entry.begin, p.entry.num_bytes, 0, p.arena_offset)
        for p in placed
        if p.entry.num_bytes
    ]
    plan = LoadPlan(
        files=tuple(
            PlanFile(name, header.file_bytes, header.data_start, 0, ())
            for name, header in zip(names, headers, strict=True)
        ),
        arenas=(PlanArena("files", max(round_up(size, PAGE_BYTES), PAGE_BYTES)),),
        runs=tuple(runs),
        groups=_groups(placed, names, start, group_of),
        chunks=(),
        tensors={p.entry.name: _tensor(p, start[p.file]) for p in placed},
        tables={},
        chunk_bytes=chunk_bytes,
        is_moved=not is_aligned,
    )
    return recut(plan, chunk_bytes)


def _resolve(directory: Path, files: Sequence[str] | None) -> tuple[list[str], Mapping[str, str] | None]:
    if files is not None:
        return list(files), None
    indexes = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise ArtifactError(
            "more than one index", where=str(directory), found=[path.name for path in indexes]
        )
    if indexes:
        table = _read_index(indexes[0])
        return sorted(set(table.values())), table
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if not found:
        raise ArtifactError("no safetensors files", where=str(directory))
    return found, None


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot be read ({error.strerror})", where=path.name) from error
    table = load_json(data, f"{path.name}: index").get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ArtifactError("weight_map must map tensor names to file names", where=path.name)
    for name, value in table.items():
        where = f"{path.name}: weight_map: {name!r}"
        if not is_path_text(value):
            raise ArtifactError("path is no text that names a file", where=where, found=repr(value))
        if value.startswith("/") or ".." in value.split("/"):
            raise ArtifactError(
                "path is absolute or points outside the directory", where=where, found=repr(value)
            )
    return table


def _check_names(names: Sequence[str], headers: Sequence[Header], index: Mapping[str, str] | None) -> None:
    """Each tensor once, and index and shards agree in both directions."""
    owner: dict[str, str] = {}
    for name, header in zip(names, headers, strict=True):
        for entry in header.tensors:
            if entry.name.startswith(PAD_PREFIX):
                continue
            if entry.name in owner:
                raise ArtifactError(
                    "tensor is there twice", where=f"{owner[entry.name]}, {name}", found=entry.name
                )
            owner[entry.name] = name
    if index is None:
        return
    differences = [f"{name} is missing" for name in index if name not in owner]
    differences += [f"{name} is not in the index" for name in owner if name not in index]
    differences += [
        f"{name} is in {owner[name]}, not {index[name]}"
        for name in index
        if owner.get(name, index[name]) != index[name]
    ]
    if differences:
        raise ArtifactError(
            "index and files disagree",
            found=f"{len(differences)} differences: {'; '.join(differences[:_MAX_SHOWN])}",
        )


def _in_use(header: Header, select: Callable[[str], bool] | None) -> list[list[TensorEntry]]:
    """A file's selected tensors in spans that only filler interrupts."""
    spans: list[list[TensorEntry]] = [[]]
    for entry in header.tensors:
        if entry.name.startswith(PAD_PREFIX):
            continue
        if select is None or select(entry.name):
            spans[-1].append(entry)
        else:
            spans.append([])
    return [span for span in spans if span]


def _keep_layout(wanted: Sequence[Sequence[Sequence[TensorEntry]]]) -> tuple[list[_Placed], int]:
    """Each span looks as in its file. The next one keeps its distance, or begins on the next page if that is closer."""
    placed, size = [], 0
    for file, spans in enumerate(wanted):
        end = spans[0][0].begin if spans else 0  # in the file, of what is placed
        for span in spans:
            first = span[0].begin
            place = min(size + first - end, round_up(size, PAGE_BYTES))
            placed += [_Placed(file, entry, place + entry.begin - first) for entry in span]
            end = span[-1].end
            size = place + end - first
        size = round_up(size, PAGE_BYTES)
    return placed, size


def _move(wanted: Sequence[Sequence[Sequence[TensorEntry]]]) -> tuple[list[_Placed], int]:
    """Every tensor on an aligned place of its own: a chunk becomes several copies."""
    placed, size = [], 0
    for file, spans in enumerate(wanted):
        for entry in chain.from_iterable(spans):
            placed.append(_Placed(file, entry, size))
            size = round_up(size + entry.num_bytes, TENSOR_ALIGN_BYTES)
    return placed, size


def _groups(
    placed: Sequence[_Placed],
    names: Sequence[str],
    start: Sequence[int],
    group_of: Callable[[str], str] | None,
) -> tuple[PlanGroup, ...]:
    members: dict[str, list[_Placed]] = {}
    for item in placed:
        group = names[item.file] if group_of is None else group_of(item.entry.name)
        members.setdefault(group, []).append(item)
    return tuple(
        PlanGroup(
            name=group,
            needed_by="",
            tensors=tuple(item.entry.name for item in items),
            ranges=tuple(
                (item.file, start[item.file] + item.entry.begin, start[item.file] + item.entry.end)
                for item in items
                if item.entry.num_bytes
            ),
            chunks=(),
            bytes=sum(item.entry.num_bytes for item in items),
        )
        for group, items in members.items()
    )


def _tensor(item: _Placed, data_start: int) -> PlanTensor:
    entry = item.entry
    return PlanTensor(
        name=entry.name,
        local_name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        bytes=entry.num_bytes,
        file=item.file,
        file_offset=data_start + entry.begin,
        arena=0,
        arena_offset=item.arena_offset,
        head="",
        tail="",
    )
