"""Open a MiniMax-H3 checkpoint for prepare: layout, configuration, contract, tensors and tokenizer, all checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from kernels.catalog import ModelSizes
from loader.errors import RequestError
from prepare.accounting import check_tensors
from prepare.adapters import Adapter, read_adapter
from prepare.checkpoint import SourceTensor
from prepare.digests import FileDigests
from prepare.families.minimax_h3.adapter_targets import adapter_targets, gates
from prepare.families.minimax_h3.config_files import config_paths, read_config
from prepare.families.minimax_h3.contract import CONTRACT_NAME
from prepare.families.minimax_h3.native import native_name
from prepare.families.minimax_h3.published import TRANSFORMER, published_tensors
from prepare.families.minimax_h3.recipe import (
    LAYOUT,
    PICTURE_TASKS,
    REFERENCE_TASK,
    build_recipe,
    loading_order,
)
from prepare.families.minimax_h3.release import (
    Release,
    check_schedules,
    choose_tasks,
    read_release,
    with_bundle_gates,
)
from prepare.families.minimax_h3.tables import (
    ProjectionSource,
    Table,
    TableFile,
    plan_table,
    projection_bytes,
    write_tables,
)
from prepare.families.minimax_h3.tree import NATIVE, PARTITIONS, SourceTree, open_tree
from prepare.family import DTYPES, VAE_LINEARS, PrepareOptions
from prepare.merge import Update, Updates
from prepare.recipe import Recipe, TensorSpec
from prepare.repack import Advance, Sources
from prepare.scan import FiniteScan
from prepare.schedules import resolve_schedules
from prepare.shards import check_sizes, shard_groups, shard_orders
from prepare.tokenizer import TOKENIZER_FILES, build_tokenizer, check_vision_ids
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.shards import check_ranks, cut_of
from runtime.schedules import Schedule


@dataclass(frozen=True)
class MiniMaxH3Source:
    """See `prepare.family.FamilySource`."""

    root: Path
    layout: str
    notes: Sequence[str]
    tasks: Sequence[str]
    sources: Sources
    recipe: Recipe
    tables: Sequence[Table]
    tokenizer: bytes
    orders: Mapping[str, Sequence[str]]
    read_files: Sequence[Path]
    model: H3Config
    family: str = "minimax_h3"
    variant: str = "base"
    facts: Mapping[str, object] = field(default_factory=dict)
    adapters: Sequence[Adapter] = ()
    updates: Updates = field(default_factory=dict)

    @property
    def kernel_sizes(self) -> ModelSizes:
        dit, text, vae = self.model.transformer, self.model.text, self.model.video_vae
        return ModelSizes(
            dit.hidden_size, dit.attention_head_dim, dit.rotary_dim, text.hidden_size, text.head_dim,
            vae.decoder_dim, vae.decoder_attention_head_dim,
            int(vae.decoder_attention_head_dim * vae.decoder_rope_dim_ratio),
        )  # fmt: skip

    def config(self) -> dict[str, Any]:
        as_json: dict[str, Any] = json.loads(json.dumps(self.model.to_dict()))
        return as_json

    def row_layout(self) -> Mapping[str, str]:
        return LAYOUT

    def table_bytes(self) -> int:
        return projection_bytes(self.model.transformer)

    def write_tables(
        self,
        files: Sequence[BinaryIO],
        options: PrepareOptions,
        scan: FiniteScan,
        advance: Advance,
        workers: int,
    ) -> tuple[list[FileDigests], str]:
        changes = self.updates.get(TRANSFORMER, {})
        projections = ProjectionSource(
            self.sources, self._projection_name, DTYPES[options.dtype], scan, advance, changes
        )
        targets = [TableFile.create(table, file) for table, file in zip(self.tables, files, strict=True)]
        sha256 = write_tables(
            targets, projections, self.model.transformer, options.adaln, options.device, workers
        )
        return [target.digests() for target in targets], sha256

    def _projection_name(self, name: str) -> str:
        return native_name(TRANSFORMER, name) if self.layout == NATIVE else name


def open_source(checkpoint: Path, options: PrepareOptions) -> MiniMaxH3Source:
    """Open and check everything but tensor data.

    Raises: ArtifactError: see the modules above. RequestError: a task, schedule, variant, partition or number of ranks
    that this checkpoint does not have.
    """
    tree = open_tree(checkpoint, _partition(options.partition))
    release = read_release(tree, options.variant)
    model = read_config(tree)
    adapters = _read_adapters(tree, model, release, options)
    replaced = {name: tensor for adapter in adapters for name, tensor in adapter.replaced.items()}
    if replaced:
        release = with_bundle_gates(release)
    tasks = choose_tasks(release, options.tasks)
    schedules = resolve_schedules(options.schedules, options.sigmas, release.schedule)
    check_schedules(release, schedules)
    dtype = DTYPES[options.dtype]
    linears = VAE_LINEARS[options.vae_linears]
    recipe = build_recipe(model, tree.layout, tasks, dtype, linears, gated=release.gated)
    sources, recipe = _with_replaced(tree, recipe, replaced)
    check_tensors(sources, recipe.published)
    tokenizer, ids = build_tokenizer(tree.root / "tokenizer")
    check_vision_ids(ids, dataclasses.asdict(model.tokens), model.text.vocab_size)
    sizes, cut = _sizes(model, options.ranks), partial(cut_of, model)
    groups = shard_groups(recipe.groups, sizes, cut)
    tables = [_table(model, schedule, task, options) for schedule in schedules for task in tasks]
    orders = {
        f"{table.task}/{table.schedule.name}": loading_order(
            model, table.task, table.key, table.schedule.evaluations
        )
        for table in tables
    }
    return MiniMaxH3Source(
        root=tree.root,
        layout=tree.layout,
        notes=tree.notes,
        tasks=tasks,
        sources=sources,
        recipe=dataclasses.replace(recipe, groups=groups),
        tables=tables,
        tokenizer=tokenizer,
        orders=shard_orders(orders, groups, sizes, cut),
        read_files=_read_files(tree),
        model=model,
        variant=release.variant,
        facts=release.facts,
        adapters=adapters,
        updates={TRANSFORMER: _together(adapters)},
    )


def _partition(asked: str) -> str:
    name = asked or next(iter(PARTITIONS))
    if name not in PARTITIONS:
        raise RequestError(
            "unknown partition", where="partition", found=repr(asked), expected=", ".join(PARTITIONS)
        )
    return name


def _read_adapters(
    tree: SourceTree, model: H3Config, release: Release, options: PrepareOptions
) -> list[Adapter]:
    if not options.lora:
        return []
    own = published_tensors(model, gated=release.gated)[TRANSFORMER]
    targets = adapter_targets(model, tree.layout, own)
    replaceable = gates(published_tensors(model, gated=True)[TRANSFORMER])
    adapters = [read_adapter(path, scale, targets, replaceable) for path, scale in options.lora]
    if sum(bool(adapter.replaced) for adapter in adapters) > 1:
        names = ", ".join(adapter.path.name for adapter in adapters if adapter.replaced)
        raise RequestError("more than one adapter replaces gates", where="--lora", found=names)
    return adapters


def _with_replaced(
    tree: SourceTree, recipe: Recipe, replaced: Mapping[str, SourceTensor]
) -> tuple[Sources, Recipe]:
    """Published tensors with those that an adapter replaces; their types are the adapter's."""
    sources = {name: component.tensors for name, component in tree.components.items()}
    if not replaced:
        return sources, recipe
    named = {
        native_name(TRANSFORMER, name) if tree.layout == NATIVE else name: tensor
        for name, tensor in replaced.items()
    }
    specs = {name: TensorSpec(tensor.dtype, tensor.shape) for name, tensor in named.items()}
    published = {**recipe.published, TRANSFORMER: {**recipe.published[TRANSFORMER], **specs}}
    sources[TRANSFORMER] = {**sources[TRANSFORMER], **named}
    return sources, dataclasses.replace(recipe, published=published)


def _together(adapters: Sequence[Adapter]) -> dict[str, tuple[Update, ...]]:
    names = dict.fromkeys(name for adapter in adapters for name in adapter.updates)
    return {name: tuple(u for a in adapters for u in a.updates.get(name, ())) for name in names}


def _sizes(model: H3Config, ranks: Sequence[int]) -> tuple[int, ...]:
    sizes = check_sizes(ranks)
    for size in sizes:
        check_ranks(model, size)
    return sizes


def _table(model: H3Config, schedule: Schedule, task: str, options: PrepareOptions) -> Table:
    return plan_table(
        schedule,
        task,
        model.transformer,
        DTYPES[options.dtype],
        options.adaln,
        has_keyframes=task in PICTURE_TASKS,
        audio_condition=1.0 if task == REFERENCE_TASK else None,
    )


def _read_files(tree: SourceTree) -> list[Path]:
    """Every file that prepare reads, sorted by its path in the tree."""
    contract = tree.root / CONTRACT_NAME
    files = {*config_paths(tree), *([contract] if contract.is_file() else [])}
    files |= {tree.root / "tokenizer" / name for name in TOKENIZER_FILES}
    for component in tree.components.values():
        files |= {*component.weight_files, *([component.index_file] if component.index_file else [])}
    return sorted(files)
