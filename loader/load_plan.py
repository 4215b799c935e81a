"""Which bytes go where in which order: a pure function of manifest and group names. No I/O, no CUDA, printable.

A chunk is one read; its pieces are copies (one, unless a plain file's tensors had to be moved to aligned places).
A group is complete when every chunk that touches it is in its arena. Order is the only priority mechanism.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from loader.errors import ArtifactError, InternalError
from loader.header import PAGE_BYTES, round_up
from loader.manifest import CHUNK_BYTES, Manifest, TensorRecord, local_name

if TYPE_CHECKING:
    from loader.codec.records import CodecRecord, CodedRecord


class PlanFile(NamedTuple):
    """A file to open. `digests`: SHA-256 of each `digest_bytes` of the data section; empty for plain files."""

    path: str
    size: int
    data_start: int
    digest_bytes: int
    digests: tuple[str, ...]


class PlanArena(NamedTuple):
    """One contiguous allocation, a whole number of pages."""

    name: str
    bytes: int


class Run(NamedTuple):
    """A range of a file (absolute offset) that is needed, and its place in an arena.

    `coded`: number of the coded tensor that it is, -1 for bytes that are copied as they are.
    """

    file: int
    offset: int
    bytes: int
    arena: int
    arena_offset: int
    coded: int = -1


class Piece(NamedTuple):
    """One copy out of a chunk: `offset` counts from the chunk's first byte."""

    offset: int
    bytes: int
    arena: int
    arena_offset: int


class CodedSpan(NamedTuple):
    """Consecutive pieces of a coded tensor: its number in the plan, first piece, number of pieces."""

    tensor: int
    first: int
    pieces: int


class PlanChunk(NamedTuple):
    """One read of `bytes` at `offset` of a file. `block`: index of the digest that covers it, -1 for none.

    `pieces` are copied to their arena, those of `coded` are unpacked into it.
    """

    file: int
    offset: int
    bytes: int
    block: int
    pieces: tuple[Piece, ...]
    groups: tuple[int, ...]
    coded: tuple[CodedSpan, ...] = ()


class PlanTensor(NamedTuple):
    """A tensor to hand out. `local_name`: its name inside its file. `arena` is -1 for tables, which are gathered.

    `bytes`, `head`, `tail` are those of the tensor as it is handed out, `stored` has those of the file.
    """

    name: str
    local_name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: int
    file_offset: int
    arena: int
    arena_offset: int
    head: str
    tail: str
    coded: CodedRecord | None = None

    @property
    def stored(self) -> tuple[int, str, str]:
        """(bytes, digest of the first KiB, of the last one) in the file."""
        if self.coded is None:
            return self.bytes, self.head, self.tail
        return self.coded.bytes, self.coded.head, self.coded.tail


class PlanGroup(NamedTuple):
    """What is waited for together. `ranges`: (file, first byte, end) in absolute file offsets."""

    name: str
    needed_by: str
    tensors: tuple[str, ...]
    ranges: tuple[tuple[int, int, int], ...]
    chunks: tuple[int, ...]
    bytes: int


class LoadPlan(NamedTuple):
    """Chunks in the order in which they are read. `tensors` are streamed, `tables` are gathered by row.

    `hold`: index of the first group that waits for `WeightStream.release()`; None = nothing waits.
    `is_moved`: tensors of plain files were moved to aligned places (correct, slower).
    `codec`: how the tensors named `coded` are stored; a `CodedSpan` has an index of that list.
    """

    files: tuple[PlanFile, ...]
    arenas: tuple[PlanArena, ...]
    runs: tuple[Run, ...]
    groups: tuple[PlanGroup, ...]
    chunks: tuple[PlanChunk, ...]
    tensors: Mapping[str, PlanTensor]
    tables: Mapping[str, PlanTensor]
    chunk_bytes: int
    rank: int = 0
    hold: int | None = None
    is_moved: bool = False
    codec: CodecRecord | None = None
    coded: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes that are read: tensors as stored, and pads."""
        return sum(chunk.bytes for chunk in self.chunks)

    @property
    def arena_bytes(self) -> int:
        return sum(arena.bytes for arena in self.arenas)

    @property
    def hold_chunk(self) -> int:
        """Number of chunks that may be read before the hold is released."""
        if self.hold is None:
            return len(self.chunks)
        placed = {index for group in self.groups[: self.hold] for index in group.chunks}
        return max(placed, default=-1) + 1

    def group_index(self, name: str) -> int:
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        raise InternalError(
            "group is not in the plan", where=name, expected=", ".join(group.name for group in self.groups)
        )

    def __str__(self) -> str:
        lines = [f"{len(self.chunks)} chunks, {self.total_bytes} bytes, {len(self.files)} files"]
        lines += [f"arena {arena.name}: {arena.bytes} bytes" for arena in self.arenas]
        if self.codec is not None:
            lines.append(f"codec {self.codec.name}: {len(self.coded)} tensors")
        for group in self.groups:
            span = f"{min(group.chunks)}..{max(group.chunks)}" if group.chunks else "none"
            lines.append(
                f"group {group.name}: {group.bytes} bytes, chunks {span}, {len(group.tensors)} tensors"
            )
        return "\n".join(lines)


def plan_load(
    manifest: Manifest,
    groups: Sequence[str],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    rank: int = 0,
    hold: str | None = None,
) -> LoadPlan:
    """Plan one load from a prepared directory.

    Args:
        groups: names in order of use, each once; other groups of their files are not read.
        chunk_bytes: largest read, a multiple of 4096; cut inside the blocks that the manifest has digests of.
        hold: this group and the later ones wait for `release()`.
    Raises: ArtifactError: a name is unknown. InternalError: chunk size or hold is impossible.
    """
    unknown = [name for name in groups if name not in manifest.groups]
    if unknown or len(set(groups)) != len(groups):
        raise ArtifactError(
            "groups must be known and listed once",
            where="groups",
            found=unknown or list(groups),
            expected="manifest groups",
        )
    members: dict[str, list[TensorRecord]] = {name: [] for name in groups}
    for record in manifest.tensors.values():
        if record.group in members:
            members[record.group].append(record)
    arenas, bases, runs = _place(manifest, groups)
    tensors = {record.name: _tensor(manifest, record, bases) for name in groups for record in members[name]}
    coded = tuple(tensor.name for tensor in tensors.values() if tensor.coded is not None)
    runs += _runs_of_tensors(manifest, tensors, coded)
    plan_groups = []
    for name in groups:
        source = manifest.groups[name]
        start = manifest.files[source.file].data_start or 0
        names = tuple(record.name for record in sorted(members[name], key=lambda record: record.offset))
        span = (source.file, start + source.start, start + source.end)
        plan_groups.append(PlanGroup(name, source.needed_by, names, (span,), (), source.end - source.start))
    plan = LoadPlan(
        files=tuple(
            PlanFile(file.path, file.size, file.data_start or 0, file.chunk_bytes or 0, file.chunks)
            for file in manifest.files
        ),
        arenas=arenas,
        runs=runs,
        groups=tuple(plan_groups),
        chunks=(),
        tensors=tensors,
        tables={r.name: _tensor(manifest, r, {}) for r in manifest.tensors.values() if r.group is None},
        chunk_bytes=chunk_bytes,
        rank=rank,
        hold=None if hold is None else list(groups).index(hold) if hold in groups else -1,
        codec=manifest.codec if coded else None,
        coded=coded,
    )
    if plan.hold == -1:
        raise InternalError("hold names a group outside the plan", where="hold", found=hold)
    return recut(plan, chunk_bytes)


def recut(plan: LoadPlan, chunk_bytes: int) -> LoadPlan:
    """The same plan with other chunk sizes; used where memory allows only small slots. Raises: InternalError."""
    if chunk_bytes <= 0 or chunk_bytes % PAGE_BYTES:
        raise InternalError(
            "chunk size is impossible", found=chunk_bytes, expected=f"a multiple of {PAGE_BYTES}"
        )
    runs = _runs_by_file(plan.runs)
    by_file = {
        file: _coded_chunks(plan, file, mine, chunk_bytes)
        if any(run.coded >= 0 for run in mine)
        else _chunks_of_file(plan.files[file], file, mine, chunk_bytes)
        for file, mine in runs.items()
    }
    order: list[PlanChunk] = []
    touched: list[list[int]] = []
    position: dict[tuple[int, int], int] = {}
    groups = []
    for index, group in enumerate(plan.groups):
        mine: dict[int, None] = {}  # a group may have many ranges in one chunk
        for file, start, end in group.ranges:
            for chunk in _overlapping(by_file.get(file, []), start, end):
                place = position.setdefault((file, chunk.offset), len(order))
                if place == len(order):
                    order.append(chunk)
                    touched.append([])
                mine[place] = None
        for place in mine:
            touched[place].append(index)
        groups.append(group._replace(chunks=tuple(sorted(mine))))
    chunks = tuple(
        PlanChunk(file, offset, size, block, pieces, tuple(groups_of), coded)
        for (file, offset, size, block, pieces, _, coded), groups_of in zip(order, touched, strict=True)
    )
    return plan._replace(chunks=chunks, groups=tuple(groups), chunk_bytes=chunk_bytes)


def _place(
    manifest: Manifest, groups: Sequence[str]
) -> tuple[tuple[PlanArena, ...], dict[int, tuple[int, int]], tuple[Run, ...]]:
    """Arenas of the components in use, per file (arena, arena offset of data offset 0), and the needed runs.

    The arena holds of each file the part from its first to its last needed byte, on page borders and as decoded; runs
    of files with coded tensors are not among these.
    """
    needed: dict[int, list[tuple[int, int]]] = {}
    for name in groups:
        group = manifest.groups[name]
        needed.setdefault(group.file, []).append((group.place, group.place_end))
    components: list[str] = list(dict.fromkeys(manifest.groups[name].component for name in groups))
    arenas: list[PlanArena] = []
    bases: dict[int, tuple[int, int]] = {}
    runs: list[Run] = []
    for index, component in enumerate(components):
        size = 0
        for file in manifest.components[component].files:
            spans = _merge(needed.get(file, []))
            if not spans:
                continue
            first, data_start = spans[0][0], manifest.files[file].data_start or 0
            bases[file] = (index, size - first)
            if manifest.files[file].decoded_bytes is None:
                runs += [Run(file, data_start + a, b - a, index, size - first + a) for a, b in spans]
            size += round_up(spans[-1][1] - first, PAGE_BYTES)
        arenas.append(PlanArena(component, size))
    return tuple(arenas), bases, tuple(runs)


def _runs_of_tensors(
    manifest: Manifest, tensors: Mapping[str, PlanTensor], coded: Sequence[str]
) -> tuple[Run, ...]:
    """The tensors of files in which some are coded: there, stored and decoded places differ."""
    numbers = {name: number for number, name in enumerate(coded)}
    return tuple(
        Run(t.file, t.file_offset, t.stored[0], t.arena, t.arena_offset, numbers.get(t.name, -1))
        for t in tensors.values()
        if t.bytes and manifest.files[t.file].decoded_bytes is not None
    )


def _merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges; neighbours that only filler separates (less than a page) become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= round_up(merged[-1][1], PAGE_BYTES):
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _tensor(manifest: Manifest, record: TensorRecord, bases: Mapping[int, tuple[int, int]]) -> PlanTensor:
    arena, base = bases.get(record.file, (-1, -record.place))
    return PlanTensor(
        name=record.name,
        local_name=local_name(record.name, record.group),
        dtype=record.dtype,
        shape=record.shape,
        bytes=record.bytes,
        file=record.file,
        file_offset=(manifest.files[record.file].data_start or 0) + record.offset,
        arena=arena,
        arena_offset=base + record.place,
        head=record.head,
        tail=record.tail,
        coded=record.coded,
    )


def _runs_by_file(runs: Iterable[Run]) -> dict[int, list[Run]]:
    table: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.file, run.offset)):
        table.setdefault(run.file, []).append(run)
    return table


def _cuts(file: PlanFile, runs: Sequence[Run], chunk_bytes: int) -> list[tuple[int, int]]:
    """Absolute ranges of one file's chunks: contiguous runs, cut at multiples of `chunk_bytes` inside digest blocks."""
    spans: list[tuple[int, int]] = []
    for run in runs:
        if spans and spans[-1][1] == run.offset:
            spans[-1] = (spans[-1][0], run.offset + run.bytes)
        else:
            spans.append((run.offset, run.offset + run.bytes))
    cuts = []
    for start, end in spans:
        while start < end:
            inside = start - file.data_start
            block = inside - inside % file.digest_bytes if file.digest_bytes else 0
            border = block + (inside - block) // chunk_bytes * chunk_bytes + chunk_bytes
            if file.digest_bytes:
                border = min(border, block + file.digest_bytes)
            stop = min(end, file.data_start + border)
            cuts.append((start, stop))
            start = stop
    return cuts


def _chunks_of_file(file: PlanFile, index: int, runs: Sequence[Run], chunk_bytes: int) -> list[PlanChunk]:
    """One file's chunks in file order, without their groups. `runs`: sorted by offset."""
    chunks = []
    first = 0  # run that holds the chunk's first byte
    for start, end in _cuts(file, runs, chunk_bytes):
        run = runs[first]
        while run.offset + run.bytes <= start:
            first += 1
            run = runs[first]
        pieces = [
            Piece(
                0, min(end, run.offset + run.bytes) - start, run.arena, run.arena_offset + start - run.offset
            )
        ]
        place = first
        while (done := run.offset + run.bytes) < end:
            place += 1
            run = runs[place]
            pieces.append(Piece(done - start, min(end, done + run.bytes) - done, run.arena, run.arena_offset))
        block = (start - file.data_start) // file.digest_bytes if file.digest_bytes else -1
        chunks.append(PlanChunk(index, start, end - start, block, tuple(pieces), ()))
    return chunks


def _coded_chunks(plan: LoadPlan, file: int, runs: Sequence[Run], chunk_bytes: int) -> list[PlanChunk]:
    from loader.codec.cut import coded_chunks  # here: most directories have nothing coded

    return coded_chunks(plan, file, runs, chunk_bytes)


def _overlapping(chunks: Sequence[PlanChunk], start: int, end: int) -> Iterator[PlanChunk]:
    """The chunks of one file that touch a range."""
    first = max(bisect_right(chunks, start, key=lambda chunk: chunk.offset) - 1, 0)
    for place in range(first, len(chunks)):
        chunk = chunks[place]
        if chunk.offset >= end:
            return
        if chunk.offset + chunk.bytes > start:
            yield chunk
