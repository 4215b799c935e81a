"""Modulation tables: every AdaLN projection evaluated at every timestep of the prepared schedules.

The projections are evaluated once for all schedules and tasks. `canonical` streams them in slices of one (row kind,
term), 26 MiB at the released size, several layers at a time, and gives the same bytes on any machine. `match` holds one
whole projection (0.5 GB) and evaluates it once per plan with that plan's rows, as a live model on this device would.
Their digest is one long chain, so a thread of its own reads the projections again for it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, Literal

from loader.errors import ArtifactError, CapabilityError
from loader.header import DTYPE_BYTES
from loader.manifest import EDGE_BYTES
from prepare.checkpoint import SourceTensor
from prepare.digests import ChunkDigests, FileDigests, edge_digest
from prepare.file_plan import PlannedFile, plan_file
from prepare.merge import Update, update_digest
from prepare.recipe import OutputGroup, OutputTensor, Rows, TensorSpec
from prepare.repack import Advance, SourceReader, Sources, as_words, merged_pieces, widen
from prepare.scan import FiniteScan
from runtime.families.minimax_h3.config import CONDITION_TIMESTEP, TransformerConfig
from runtime.schedules import Schedule, float32_bits

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.families.minimax_h3.model.adaln import TimestepPlan

Mode = Literal["canonical", "match"]

NO_CHANGES: Mapping[str, tuple[Update, ...]] = MappingProxyType({})
_KINDS, _TERMS, _FINAL_TERMS = 3, 6, 2
_READ_BYTES = 8 << 20
_EMBEDDER = tuple(f"time_embedder.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias"))
_FEATURES = 1344  # of one product: 1344 x 2688 float64 are 29 MB, which stay in the caches of a server core


@dataclass(frozen=True)
class Table:
    """One modulation table to write.

    condition_timesteps: timesteps of keyframe rows, one per row of `condition.blocks`; empty for tasks without keyframes.
    `match` has one per distinct (timestep, rows of the plan), because the plan's size decides the rounding.
    condition_index: evaluation -> index into them.
    audio_condition: timestep of audio reference rows, the one row of `condition.audio`; None for tasks without.
    """

    schedule: Schedule
    task: str
    file: PlannedFile
    condition_timesteps: tuple[float, ...]
    condition_index: tuple[int, ...]
    audio_condition: float | None = None

    @property
    def key(self) -> str:
        return table_key(self.schedule.name, self.task)

    @property
    def has_condition(self) -> bool:
        return bool(self.condition_timesteps)

    @property
    def condition_bits(self) -> list[str]:
        """Timesteps as float32 bit patterns, the form of the manifest."""
        return [float32_bits(value) for value in self.condition_timesteps]


def table_key(schedule: str, task: str) -> str:
    """Name of a table in group names, tensor names and its file name."""
    return f"{schedule}.{task}"


def plan_table(
    schedule: Schedule,
    task: str,
    config: TransformerConfig,
    dtype: str,
    mode: Mode,
    *,
    has_keyframes: bool,
    audio_condition: float | None = None,
) -> Table:
    """Shapes, groups and places of one table. `dtype`: `"BF16"` or `"F32"`, that of the stored projections.

    Raises: CapabilityError: `match` with audio references, whose live plans this version does not know.
    """
    if audio_condition is not None and mode == "match":
        raise CapabilityError(
            "tables with audio references are canonical only",
            where="--adaln",
            found=mode,
            expected="canonical",
        )
    key = table_key(schedule.name, task)
    levels: tuple[float, ...] = ()
    index: tuple[int, ...] = ()
    if has_keyframes:
        rows = [
            (
                schedule.condition_timestep(e, CONDITION_TIMESTEP),
                len(schedule.plan(e, CONDITION_TIMESTEP)) if mode == "match" else 0,
            )
            for e in range(schedule.evaluations)
        ]
        distinct = sorted(set(rows))
        levels = tuple(level for level, _ in distinct)
        index = tuple(distinct.index(row) for row in rows)
    L, D = config.num_layers, config.hidden_size
    groups = []
    if levels:
        condition: dict[str, tuple[int, ...]] = {"condition.blocks": (L, len(levels), _TERMS, D)}
        if audio_condition is not None:
            condition["condition.audio"] = (L, 1, _TERMS, D)
        groups.append(_group(f"adaln/{key}/condition", condition, dtype))
    for e in range(schedule.evaluations):
        shapes = {f"step.{e:03d}.blocks": (L, _KINDS, _TERMS, D), f"step.{e:03d}.final": (2, _FINAL_TERMS, D)}
        groups.append(_group(f"adaln/{key}/step.{e:03d}", shapes, dtype))
    file = plan_file(f"adaln/{key}.safetensors", groups, {"schedule": schedule.name, "task": task})
    return Table(schedule, task, file, levels, index, audio_condition)


def _group(name: str, shapes: dict[str, tuple[int, ...]], dtype: str) -> OutputGroup:
    tensors = tuple(OutputTensor(tensor, TensorSpec(dtype, shape), ()) for tensor, shape in shapes.items())
    return OutputGroup(name, "adaln", tensors, "denoise")


@dataclass(frozen=True)
class TableFile:
    """A table and the file it is written to: open for reading and writing, header and size already there."""

    table: Table
    file: BinaryIO

    @classmethod
    def create(cls, table: Table, file: BinaryIO) -> TableFile:
        """Write the header and reserve the data section; fillers stay the zeros that this gives."""
        file.write(table.file.header)
        file.flush()
        file.truncate(table.file.num_bytes)
        return cls(table, file)

    def put(self, tensor: str, element: int, values: Tensor) -> None:
        """Write contiguous elements of one tensor, starting at `element`. Threads may call it."""
        begin = next(
            p.begin for p in self.table.file.tensors if p.output is not None and p.output.name == tensor
        )
        data, position = (
            _tensor_bytes(values),
            len(self.table.file.header) + begin + element * values.element_size(),
        )
        while len(data):
            count = os.pwrite(self.file.fileno(), data, position)
            data, position = data[count:], position + count

    def digests(self) -> FileDigests:
        """Read the finished file back and hash it."""
        plan = self.table.file
        self.file.flush()
        self.file.seek(len(plan.header))
        with ChunkDigests(plan.header) as digests:
            while piece := self.file.read(_READ_BYTES):
                digests.update(memoryview(piece))
        edges = {}
        for placed in plan.tensors:
            if placed.output is None:
                continue
            edges[placed.output.name] = (
                edge_digest(self._read(placed.begin, min(placed.end, placed.begin + EDGE_BYTES))),
                edge_digest(self._read(max(placed.begin, placed.end - EDGE_BYTES), placed.end)),
            )
        sha256, chunks = digests.finish()
        return FileDigests(plan.num_bytes, sha256, chunks, edges)

    def _read(self, begin: int, end: int) -> bytes:
        self.file.seek(len(self.table.file.header) + begin)
        return self.file.read(end - begin)


def projection_bytes(config: TransformerConfig) -> int:
    """Published bytes that `write_tables` reads."""
    T = config.time_embed_dim
    outputs = config.num_layers * _KINDS * _TERMS * config.hidden_size + _FINAL_TERMS * config.hidden_size
    embedder = config.time_embed_hidden_dim * (config.freq_dim + 1) + T * (config.time_embed_hidden_dim + 1)
    return outputs * (T + 1) * 2 + embedder * 4


def write_tables(
    files: Sequence[TableFile],
    projections: ProjectionSource,
    config: TransformerConfig,
    mode: Mode,
    device: str = "cpu",
    workers: int = 1,
) -> str:
    """Fill all tables.

    Args:
        files: from `TableFile.create`.
        mode, device: see the module; `canonical` ignores the device.
        workers: layers at a time; `match` takes one.
    Returns: SHA-256 over the projection tensors, see `ProjectionSource.sha256`.
    Raises: ArtifactError: a projection or a table entry is not finite.
    """
    import torch

    num_threads = torch.get_num_threads()
    if mode == "match":
        workers = 1
    try:
        with ThreadPoolExecutor(workers + 1, thread_name_prefix="adaln") as pool:
            digest = pool.submit(projections.sha256, config.num_layers)
            if workers > 1:
                torch.set_num_threads(1)
            embedder = projections.time_embedder()
            writer = _CanonicalTables if mode == "canonical" else _MatchTables
            tables = writer(files, embedder, config, projections.dtype, device)
            jobs = [pool.submit(_write_layer, tables, n, projections) for n in range(config.num_layers)]
            jobs.append(pool.submit(_write_layer, tables, None, projections))
            try:
                for job in jobs:
                    job.result()
                return digest.result()
            except BaseException:
                projections.cancel()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(num_threads)


def _write_layer(
    tables: _CanonicalTables | _MatchTables, layer: int | None, projections: ProjectionSource
) -> None:
    """One layer, or the output norm. Threads have their own gradient mode and number of threads."""
    import torch

    if isinstance(tables, _CanonicalTables):
        torch.set_num_threads(1)
    with torch.no_grad():
        if layer is None:
            tables.write_final(projections)
        else:
            tables.write_layer(layer, projections)


class ProjectionSource:
    """Reads AdaLN weights by row slices, with the changes of adapters. Diffusers tensor names.

    Threads may share it: each call has its own reader.
    """

    def __init__(
        self,
        sources: Sources,
        names: Callable[[str], str],
        dtype: str,
        scan: FiniteScan,
        advance: Advance,
        updates: Mapping[str, tuple[Update, ...]] = NO_CHANGES,
    ) -> None:
        """`names`: Diffusers name -> name in this checkpoint. `dtype`: `"BF16"` or `"F32"`, type handed out.

        `updates`: changes by name in this checkpoint; summed in float64, rounded once to the type handed out.
        """
        self._sources, self._names, self._advance = sources, names, advance
        self.dtype, self.scan, self._updates = dtype, scan, updates
        self._is_cancelled = False

    def cancel(self) -> None:
        """Let `sha256` give up: nobody will ask for the digest."""
        self._is_cancelled = True

    def time_embedder(self) -> dict[str, Tensor]:
        """The four tensors of the time embedder, float32."""
        with SourceReader(self._sources) as reader:
            return {name: self._load(reader, name, 0, None, "F32") for name in _EMBEDDER}

    def slices(self, linear: str, num_slices: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight, bias) of `num_slices` equal slices of the output features of one linear layer."""
        with SourceReader(self._sources) as reader:
            bias = self._load(reader, f"{linear}.bias", 0, None, self.dtype)
            step = bias.shape[0] // num_slices
            for i in range(num_slices):
                weight = self._load(reader, f"{linear}.weight", i * step, (i + 1) * step, self.dtype)
                yield weight, bias[i * step : (i + 1) * step]

    def sha256(self, num_layers: int) -> str:
        """Digest of all tensors in the order time embedder, blocks, output norm, weight before bias.

        Of each its published bytes and, sorted, the digests of its changes: merging again would be the longest chain.
        """
        linears = [
            *(f"transformer_blocks.{i}.adaln_proj.linear" for i in range(num_layers)),
            "norm_out.linear",
        ]
        names = [*_EMBEDDER, *(f"{linear}.{kind}" for linear in linears for kind in ("weight", "bias"))]
        digest = hashlib.sha256()
        with SourceReader(self._sources) as reader:
            for name in map(self._names, names):
                num_rows = self._sources["transformer"][name].shape[0]
                for piece in reader.pieces(Rows("transformer", name, 0, num_rows)):
                    digest.update(piece)
                    self._advance(0)  # may stop
                    if self._is_cancelled:
                        return ""
                changes = (update_digest(update, reader) for update in self._updates.get(name, ()))
                digest.update(b"".join(sorted(changes)))
        return digest.hexdigest()

    def _load(self, reader: SourceReader, name: str, start: int, stop: int | None, dtype: str) -> Tensor:
        import torch

        source_name = self._names(name)
        source = self._sources["transformer"][source_name]
        stop = source.shape[0] if stop is None else stop
        shape = (stop - start, *source.shape[1:])
        out = torch.empty(shape, dtype=torch.bfloat16 if dtype == "BF16" else torch.float32)
        target, position = memoryview(out.view(torch.uint8).numpy().reshape(-1).data), 0
        for data in self._pieces(reader, Rows("transformer", source_name, start, stop), source, dtype):
            target[position : position + len(data)] = data
            position += len(data)
            self._advance(len(data) * DTYPE_BYTES[source.dtype] // DTYPE_BYTES[dtype])
        self.scan.raise_if_bad()
        return out

    def _pieces(
        self, reader: SourceReader, rows: Rows, source: SourceTensor, dtype: str
    ) -> Iterator[memoryview]:
        if changes := self._updates.get(rows.tensor, ()):
            yield from merged_pieces(rows, source, changes, dtype, reader, self.scan)
            return
        for piece in reader.pieces(rows):
            words = as_words(piece, source.dtype)
            self.scan.check(f"transformer/{rows.tensor}", source.dtype, words)
            yield piece if source.dtype == dtype else widen(words)


class _CanonicalTables:
    """Exact sums; one product per slice for all tables, because the result does not depend on the rows beside it."""

    def __init__(
        self,
        files: Sequence[TableFile],
        embedder: dict[str, Tensor],
        config: TransformerConfig,
        dtype: str,
        device: str,
    ) -> None:
        self._files, self._config, self._dtype = files, config, dtype
        schedules = [file.table.schedule for file in files]
        conditions = [value for file in files for value in file.table.condition_timesteps]
        video = [value for schedule in schedules for value in schedule.video_timesteps] + conditions
        audio = [value for schedule in schedules for value in schedule.audio_timesteps]
        audio += [file.table.audio_condition for file in files if file.table.audio_condition is not None]
        self._rows = {value: i for i, value in enumerate(sorted({*video, *audio}))}
        self._input = canonical_input(list(self._rows), embedder, config, dtype)
        # Row kinds: target video (and keyframes, which have the same tag), text at the video timestep, audio.
        self._needed = [sorted({self._rows[v] for v in values}) for values in (video, video, audio)]

    def write_layer(self, layer: int, projections: ProjectionSource) -> None:
        D = self._config.hidden_size
        slices = projections.slices(f"transformer_blocks.{layer}.adaln_proj.linear", _KINDS * _TERMS)
        blocks = [_empty((f.table.schedule.evaluations, _KINDS, _TERMS, D), self._dtype) for f in self._files]
        conditions = [_empty((len(f.table.condition_timesteps), _TERMS, D), self._dtype) for f in self._files]
        for number, (weight, bias) in enumerate(slices):
            kind, term = divmod(number, _TERMS)
            values = self._project(weight, bias, self._needed[kind])
            for file, block, condition in zip(self._files, blocks, conditions, strict=True):
                schedule = file.table.schedule
                steps = schedule.audio_timesteps if kind == _KINDS - 1 else schedule.video_timesteps
                block[:, kind, term] = self._pick(values, kind, steps)
                if kind == 0 and file.table.has_condition:
                    condition[:, term] = self._pick(values, kind, file.table.condition_timesteps)
                if kind == _KINDS - 1 and file.table.audio_condition is not None:
                    row = self._pick(values, kind, [file.table.audio_condition])
                    file.put("condition.audio", (layer * _TERMS + term) * D, row)
        for file, block, condition in zip(self._files, blocks, conditions, strict=True):
            _put_layer(file, layer, block, condition)

    def write_final(self, projections: ProjectionSource) -> None:
        both = sorted({*self._needed[0], *self._needed[2]})
        terms = [self._project(w, b, both) for w, b in projections.slices("norm_out.linear", _FINAL_TERMS)]
        place = {row: i for i, row in enumerate(both)}
        for file in self._files:
            schedule = file.table.schedule
            for e in range(schedule.evaluations):
                steps = (schedule.video_timesteps[e], schedule.audio_timesteps[e])
                rows = [terms[t][place[self._rows[step]]] for step in steps for t in range(_FINAL_TERMS)]
                _put_final(file, e, rows)

    def _project(self, weight: Tensor, bias: Tensor, rows: Sequence[int]) -> Tensor:
        import torch

        from runtime.families.minimax_h3.model.adaln import project

        inputs = self._input[list(rows)]
        parts = [
            project(inputs, weight[i : i + _FEATURES], bias[i : i + _FEATURES], "canonical")
            for i in range(0, weight.shape[0], _FEATURES)
        ]
        return torch.cat(parts, dim=1)

    def _pick(self, values: Tensor, kind: int, timesteps: Sequence[float]) -> Tensor:
        place = {row: i for i, row in enumerate(self._needed[kind])}
        return values[[place[self._rows[step]] for step in timesteps]]


class _MatchTables:
    """One `linear` per plan of distinct timesteps, with that plan's own number of rows, on `device`."""

    def __init__(
        self,
        files: Sequence[TableFile],
        embedder: dict[str, Tensor],
        config: TransformerConfig,
        dtype: str,
        device: str,
    ) -> None:
        import torch

        from runtime.families.minimax_h3.model.adaln import adaln_input, plan_timesteps, timestep_embedding

        self._files, self._config, self._dtype, self._device = files, config, dtype, device
        weights = {name: value.to(device) for name, value in embedder.items()}
        stored = torch.bfloat16 if dtype == "BF16" else torch.float32
        self._plans: list[list[tuple[TimestepPlan, Tensor]]] = []
        for file in files:
            schedule = file.table.schedule
            plans = plan_timesteps(
                schedule.video_timesteps, schedule.audio_timesteps, has_condition=file.table.has_condition
            )
            inputs = []
            for plan in plans:
                steps = torch.tensor(plan.timesteps, dtype=torch.float32, device=device)
                inputs.append((plan, adaln_input(timestep_embedding(steps, weights, config), stored)))
            self._plans.append(inputs)

    def write_layer(self, layer: int, projections: ProjectionSource) -> None:
        from runtime.families.minimax_h3.model.adaln import block_rows, condition_rows, project

        D = self._config.hidden_size
        weight, bias = self._load(projections, f"transformer_blocks.{layer}.adaln_proj.linear")
        for file, plans in zip(self._files, self._plans, strict=True):
            block = _empty((len(plans), _KINDS, _TERMS, D), self._dtype)
            condition = _empty((len(file.table.condition_timesteps), _TERMS, D), self._dtype)
            for e, (plan, inputs) in enumerate(plans):
                projected = project(inputs, weight, bias, "match")
                block[e] = block_rows(projected, plan)
                if file.table.has_condition:
                    condition[file.table.condition_index[e]] = condition_rows(projected, plan)
            _put_layer(file, layer, block, condition)

    def write_final(self, projections: ProjectionSource) -> None:
        from runtime.families.minimax_h3.model.adaln import final_rows, project

        weight, bias = self._load(projections, "norm_out.linear")
        for file, plans in zip(self._files, self._plans, strict=True):
            for e, (plan, inputs) in enumerate(plans):
                rows = final_rows(project(inputs, weight, bias, "match"), plan)
                _put_final(file, e, [*rows.flatten(0, 1).cpu()])

    def _load(self, projections: ProjectionSource, linear: str) -> tuple[Tensor, Tensor]:
        """The whole layer at once: a BLAS may round a slice of the features differently."""
        (pair,) = projections.slices(linear, 1)
        return pair[0].to(self._device), pair[1].to(self._device)


def canonical_input(
    timesteps: Sequence[float], embedder: dict[str, Tensor], config: TransformerConfig, dtype: str
) -> Tensor:
    """[M, time_embed_dim] input of the projections, the same bits on every machine.

    As `adaln_input(timestep_embedding(...))`, but with correctly rounded linear layers and elementwise functions
    evaluated in float64 and rounded once to float32. Differs from it in the last float32 bit at most.
    """
    import torch

    from runtime.families.minimax_h3.model.adaln import project

    half = config.freq_dim // 2
    exponents = (-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half).tolist()
    frequencies = torch.tensor([math.exp(x) for x in exponents], dtype=torch.float32)
    angles = (torch.tensor(timesteps, dtype=torch.float32)[:, None] * frequencies).double()
    features = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    for number in (1, 2):
        linear = f"time_embedder.linear_{number}"
        sums = project(
            features, embedder[f"{linear}.weight"], embedder[f"{linear}.bias"], "canonical"
        ).double()
        features = (sums * torch.sigmoid(sums)).float()  # silu
    return features.to(torch.bfloat16 if dtype == "BF16" else torch.float32)


def _empty(shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    return torch.empty(shape, dtype=torch.bfloat16 if dtype == "BF16" else torch.float32)


def _put_layer(file: TableFile, layer: int, block: Tensor, condition: Tensor) -> None:
    """block [E, 3, 6, D], condition [C, 6, D] of one layer."""
    _check_finite(file.table, f"layer {layer}", block, condition)
    for e in range(block.shape[0]):
        file.put(f"step.{e:03d}.blocks", layer * block[e].numel(), block[e])
    if file.table.has_condition:
        file.put("condition.blocks", layer * condition.numel(), condition)


def _put_final(file: TableFile, evaluation: int, rows: Sequence[Tensor]) -> None:
    """rows: video shift, video scale, audio shift, audio scale; [D] each."""
    import torch

    final = torch.stack(list(rows))
    _check_finite(file.table, f"final of step {evaluation}", final)
    file.put(f"step.{evaluation:03d}.final", 0, final)


def _check_finite(table: Table, part: str, *values: Tensor) -> None:
    if not all(value.isfinite().all() for value in values):
        raise ArtifactError("modulation table is not finite", where=f"{table.file.path}: {part}")


def _tensor_bytes(values: Tensor) -> memoryview:
    import torch

    data = values.contiguous().view(torch.uint8).numpy().reshape(-1).data
    assert len(data) == values.numel() * DTYPE_BYTES["BF16" if values.dtype == torch.bfloat16 else "F32"]
    return data
