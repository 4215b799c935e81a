"""Open a MiniMax-H3 checkpoint for prepare: layout, configuration, contract, tensors and tokenizer, all checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kernels.catalog import ModelSizes
from loader.errors import CapabilityError, RequestError
from prepare.accounting import check_tensors
from prepare.adaln import Table, plan_table
from prepare.contract import CONTRACT_NAME, read_contract
from prepare.families.minimax_h3.config_files import check_shifts, config_paths, read_config
from prepare.families.minimax_h3.native import native_name
from prepare.families.minimax_h3.published import TRANSFORMER
from prepare.families.minimax_h3.recipe import LAYOUT, build_recipe, loading_order
from prepare.families.minimax_h3.tree import NATIVE, TASKS, SourceTree, open_tree
from prepare.family import DTYPES, VAE_LINEARS, PrepareOptions
from prepare.recipe import Recipe
from prepare.repack import Sources
from prepare.shards import check_sizes, shard_groups, shard_orders
from prepare.tokenizer import TOKENIZER_FILES, build_tokenizer, check_vision_ids
from runtime.families.minimax_h3.config import H3Config, TransformerConfig
from runtime.families.minimax_h3.shards import check_ranks, cut_of
from runtime.schedules import DEFAULT_SCHEDULE, named_schedule


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

    @property
    def modulation(self) -> TransformerConfig:
        return self.model.transformer

    @property
    def kernel_sizes(self) -> ModelSizes:
        dit, text = self.model.transformer, self.model.text
        return ModelSizes(
            dit.hidden_size, dit.attention_head_dim, dit.rotary_dim, text.hidden_size, text.head_dim
        )

    def config(self) -> dict[str, Any]:
        as_json: dict[str, Any] = json.loads(json.dumps(self.model.to_dict()))
        return as_json

    def row_layout(self) -> Mapping[str, str]:
        return LAYOUT

    def projection_name(self, name: str) -> str:
        return native_name(TRANSFORMER, name) if self.layout == NATIVE else name


def open_source(checkpoint: Path, options: PrepareOptions) -> MiniMaxH3Source:
    """Open and check everything but tensor data.

    Raises: ArtifactError: see the modules above. RequestError: unknown task or schedule. CapabilityError: a distilled
    variant, whose transformer this recipe does not cover.
    """
    tasks = _tasks(options.tasks)
    tree = open_tree(checkpoint)
    _refuse_distilled(tree, options.variant)
    model = read_config(tree)
    check_shifts(tree)
    dtype = DTYPES[options.dtype]
    recipe = build_recipe(model, tree.layout, tasks, dtype, VAE_LINEARS[options.vae_linears])
    sizes = check_sizes(options.ranks)
    for size in sizes:
        check_ranks(model, size)
    cut = partial(cut_of, model)
    recipe = dataclasses.replace(recipe, groups=shard_groups(recipe.groups, sizes, cut))
    sources = {name: component.tensors for name, component in tree.components.items()}
    check_tensors(sources, recipe.published)
    tokenizer, ids = build_tokenizer(tree.root / "tokenizer")
    check_vision_ids(ids, dataclasses.asdict(model.tokens), model.text.vocab_size)
    schedules = [named_schedule(name) for name in dict.fromkeys(options.schedules or (DEFAULT_SCHEDULE,))]
    tables = [
        plan_table(schedule, task, model.transformer, dtype, options.adaln, has_keyframes=task == "fl2va")
        for schedule in schedules
        for task in tasks
    ]
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
        recipe=recipe,
        tables=tables,
        tokenizer=tokenizer,
        orders=shard_orders(orders, recipe.groups, sizes, cut),
        read_files=_read_files(tree),
        model=model,
    )


def _tasks(asked: Sequence[str]) -> tuple[str, ...]:
    unknown = [task for task in asked if task not in TASKS]
    if unknown:
        raise RequestError("unknown task", where="task", found=", ".join(unknown), expected=", ".join(TASKS))
    return tuple(task for task in sorted(TASKS) if not asked or task in asked)


def _refuse_distilled(tree: SourceTree, variant: str) -> None:
    contract = read_contract(tree.root, is_distilled=variant == "fasth3")
    if contract is not None and variant != "base":
        raise CapabilityError(
            "distilled checkpoints cannot be prepared by this version",
            where=CONTRACT_NAME,
            found=contract.schedule,
            expected="the base checkpoint",
        )


def _read_files(tree: SourceTree) -> list[Path]:
    """Every file that prepare reads, sorted by its path in the tree."""
    files = set(config_paths(tree)) | {tree.root / "tokenizer" / name for name in TOKENIZER_FILES}
    for component in tree.components.values():
        files |= {*component.weight_files, *([component.index_file] if component.index_file else [])}
    return sorted(files)
