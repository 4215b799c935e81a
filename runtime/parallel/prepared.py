"""Prepared directories with shards, as one rank sees them. No torch.

Group `<component>/rank-<r>-of-<P>/<name>` holds a rank's parts of tensors that belong to `<component>/<name>`, group
`<component>/whole/<name>` those of its tensors that other numbers of ranks cut. Order
`<task>/<schedule>/rank-<r>-of-<P>` lists what that rank uses; `<task>/<schedule>` what one rank uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from loader.errors import CapabilityError
from loader.manifest import Manifest
from runtime.weights import WeightSource

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = "whole"
_SHARD_ORDER = re.compile(r"(?P<order>.+)/rank-(?P<rank>\d+)-of-(?P<size>\d+)")


def shard_name(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}"


def shard_prefix(group: str, shard: str) -> str:
    """`transformer/blocks.0`, `rank-0-of-2` -> `transformer/rank-0-of-2/blocks.0`."""
    component, _, name = group.partition("/")
    return f"{component}/{shard}/{name}"


def prepared_ranks(orders: Mapping[str, object]) -> tuple[int, ...]:
    """Numbers of ranks above one that a prepared directory has shards for, ascending."""
    found = (_SHARD_ORDER.fullmatch(order) for order in orders)
    return tuple(sorted({int(match["size"]) for match in found if match}))


def rank_manifest(manifest: Manifest, rank: int, size: int) -> Manifest:
    """The manifest as one rank sees it: its orders under the plain names.

    A directory without any shards serves every number of ranks: each rank loads everything.
    Raises: CapabilityError: there are shards, but not for this many ranks.
    """
    sizes = prepared_ranks(manifest.orders)
    if not sizes or size == 1:
        return manifest
    if size not in sizes:
        raise CapabilityError(
            "not prepared for this number of ranks",
            where="manifest.json: orders",
            found=size,
            expected=sizes,
            hint=f"coldframe prepare --ranks {size}",
        )
    suffix = f"/{shard_name(rank, size)}"
    orders = {
        order.removesuffix(suffix): groups
        for order, groups in manifest.orders.items()
        if order.endswith(suffix)
    }
    return manifest._replace(orders=orders)


def some_view(manifest: Manifest) -> Manifest:
    """The manifest as one rank sees it; where all orders are of shards, as the first of the fewest ranks."""
    if all(map(_SHARD_ORDER.fullmatch, manifest.orders)):
        return rank_manifest(manifest, 0, prepared_ranks(manifest.orders)[0])
    return manifest


class RankWeights:
    """One rank's weights under the names of whole groups: the shared tensors of a group and this rank's parts.

    Args:
        groups: names of all groups that this rank's orders list.
        on_group: called with a group's name when it has arrived.
    """

    def __init__(
        self,
        source: WeightSource,
        groups: Collection[str],
        rank: int,
        size: int,
        on_group: Callable[[str], None] = lambda group: None,
    ) -> None:
        self._source, self._groups = source, groups
        self._rank, self._size = rank, size
        self._on_group = on_group

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for name in self._names(group):
            merged.update(self._source.tensors(name))
        self._on_group(group)
        return merged

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        return self._source.rows(tensor, rows)

    def is_ready(self, group: str) -> bool:
        return all(self._source.is_ready(name) for name in self._names(group))

    def _names(self, group: str) -> list[str]:
        """Where the group's tensors are; an unknown group is left to the source to refuse."""
        shards = (shard_prefix(group, shard) for shard in (WHOLE, shard_name(self._rank, self._size)))
        return [name for name in (group, *shards) if name in self._groups] or [group]


def whole_weights(source: WeightSource, manifest: Manifest) -> WeightSource:
    """One rank's weights: `source` itself, unless the directory was prepared for several numbers of ranks."""
    return RankWeights(source, manifest.groups, 0, 1) if prepared_ranks(manifest.orders) else source
