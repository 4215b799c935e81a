"""One plan of reads for all ranks of a host, from the plans of its ranks. Pure.

A chunk that several ranks need is read once. All plans number chunks, files and tensors alike, so that the reader's
records mean the same to every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from loader.errors import InternalError
from loader.load_plan import LoadPlan, PlanChunk, PlanTensor

_Key = tuple[int, int, int]


class HostPlan(NamedTuple):
    """plan: what the reader reads. members: what each rank of the host loads. takers: chunk -> members that need it."""

    plan: LoadPlan
    members: tuple[LoadPlan, ...]
    takers: tuple[tuple[int, ...], ...]


def host_plan(plans: Sequence[LoadPlan]) -> HostPlan:
    """Merge the plans of a host's ranks, of one manifest and chunk size; their orders are interleaved.

    Raises: InternalError: plans of different directories or chunk sizes.
    """
    first = plans[0]
    if any(
        (plan.files, plan.chunk_bytes, plan.hold) != (first.files, first.chunk_bytes, None) for plan in plans
    ):
        raise InternalError("ranks of a host must plan alike", where="loader.host_plan")
    order: dict[_Key, int] = {}
    for chunks in zip_longest(*(plan.chunks for plan in plans)):
        for chunk in chunks:
            if chunk is not None:
                order.setdefault(_key(chunk), len(order))
    takers: list[list[int]] = [[] for _ in order]
    for member, plan in enumerate(plans):
        for chunk in plan.chunks:
            takers[order[_key(chunk)]].append(member)
    tensors: dict[str, PlanTensor] = {}
    for plan in plans:
        for name, tensor in plan.tensors.items():
            tensors.setdefault(name, tensor._replace(arena=-1))
    everything = {
        _key(chunk): chunk._replace(pieces=(), groups=(), coded=()) for plan in plans for chunk in plan.chunks
    }
    base = first._replace(
        arenas=(), runs=(), groups=(), tensors=tensors, chunks=tuple(everything[key] for key in order)
    )
    return HostPlan(
        plan=base,
        members=tuple(_member(plan, base, order) for plan in plans),
        takers=tuple(tuple(members) for members in takers),
    )


def _member(plan: LoadPlan, base: LoadPlan, order: dict[_Key, int]) -> LoadPlan:
    """One rank's plan over the numbers of all: chunks of others have no pieces and belong to no group."""
    chunks = list(base.chunks)
    for chunk in plan.chunks:
        chunks[order[_key(chunk)]] = chunk
    place = [order[_key(chunk)] for chunk in plan.chunks]
    groups = tuple(
        group._replace(chunks=tuple(sorted(place[index] for index in group.chunks))) for group in plan.groups
    )
    tensors = {name: plan.tensors.get(name, tensor) for name, tensor in base.tensors.items()}
    return plan._replace(chunks=tuple(chunks), groups=groups, tensors=tensors)


def _key(chunk: PlanChunk) -> _Key:
    return chunk.file, chunk.offset, chunk.bytes
