"""Which release a MiniMax-H3 checkpoint is, and what follows: tasks, default step schedule, gates, sparse attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loader.errors import ArtifactError, RequestError
from prepare.families.minimax_h3.adapter_targets import GATE
from prepare.families.minimax_h3.config_files import check_shifts
from prepare.families.minimax_h3.contract import CONTRACT_NAME, TILE_ROWS, InferenceContract, read_contract
from prepare.families.minimax_h3.published import TRANSFORMER
from prepare.families.minimax_h3.tree import NATIVE, SourceTree
from prepare.schedules import find_schedule
from runtime.schedules import DEFAULT_SCHEDULE, Schedule

AUTO, BASE, FASTH3 = "auto", "base", "fasth3"
FOUR_STEPS, FOUR_STEP_SPARSITY = "fasth3-4", 0.9  # of the adapter bundles that bring gates


@dataclass(frozen=True)
class Release:
    """What a checkpoint was published as.

    variant, facts: of the manifest's `model`. schedule: the default; `is_fixed`: and the only one.
    gated: the DiT has `to_gate_compress` matrices.
    """

    variant: str
    tasks: tuple[str, ...]
    schedule: str
    is_fixed: bool = False
    gated: bool = False
    facts: Mapping[str, object] = field(default_factory=dict)


def read_release(tree: SourceTree, wanted: str) -> Release:
    """The release that a tree's files say it is.

    Args:
        wanted: `"auto"`, or the variant that it must be prepared as.
    Raises: RequestError: no such variant. ArtifactError: gates without their contract, a contract that is wrong, in an
    unknown layout, or shifts that contradict the schedule.
    """
    if wanted not in (AUTO, BASE, FASTH3):
        raise RequestError(
            "unknown variant", where="variant", found=repr(wanted), expected=f"{AUTO}, {BASE}, {FASTH3}"
        )
    has_gates = any(name.endswith(GATE) for name in tree.components[TRANSFORMER].tensors)
    contract = read_contract(tree.root, is_distilled=wanted == FASTH3 or (wanted == AUTO and has_gates))
    if contract is None or wanted == BASE:
        check_shifts(tree)
        return Release(BASE, tree.partition.tasks, DEFAULT_SCHEDULE)
    return _distilled(tree, contract)


def with_bundle_gates(release: Release) -> Release:
    """The release that an adapter makes which brings gates."""
    if release.gated:
        return release
    return Release(FASTH3, ("t2va",), FOUR_STEPS, gated=True, facts=_sparse(FOUR_STEP_SPARSITY, TILE_ROWS))


def choose_tasks(release: Release, asked: Sequence[str]) -> tuple[str, ...]:
    """Tasks to prepare, sorted. Raises: RequestError: the release has no such task."""
    unknown = [task for task in asked if task not in release.tasks]
    if unknown:
        raise RequestError(
            "unknown task", where="task", found=", ".join(unknown), expected=", ".join(release.tasks)
        )
    return tuple(task for task in sorted(release.tasks) if not asked or task in asked)


def check_schedules(release: Release, schedules: Sequence[Schedule]) -> None:
    """Raises: RequestError: another step schedule than the one that the release was distilled for."""
    if not release.is_fixed:
        return
    only = find_schedule(release.schedule)
    others = [schedule.name for schedule in schedules if not schedule.same_trajectory(only)]
    if others:
        raise RequestError(
            "the release was distilled for one step schedule",
            where="schedule",
            found=", ".join(others),
            expected=release.schedule,
        )


def _distilled(tree: SourceTree, contract: InferenceContract) -> Release:
    if tree.layout == NATIVE:
        raise ArtifactError(
            "distilled checkpoint in an unknown layout",
            where=CONTRACT_NAME,
            found=NATIVE,
            expected="diffusers",
        )
    facts = _sparse(contract.sparsity, contract.tile)
    return Release(FASTH3, ("t2va",), contract.schedule, is_fixed=True, gated=True, facts=facts)


def _sparse(sparsity: float, tile: int) -> dict[str, object]:
    return {"sparse_attention": {"kind": "vsa-h3", "sparsity": sparsity, "tile": tile}}
