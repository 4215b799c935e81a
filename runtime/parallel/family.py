"""A model family over several ranks: the same interface, with the request's fields kept for the other ranks. No torch."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from runtime.family import Family, ImageResolver, Job, Prepared
from runtime.parallel.prepared import RankWeights, prepared_ranks

if TYPE_CHECKING:
    from loader.manifest import Manifest
    from runtime.compute import Compute
    from runtime.parallel.connect import Connection
    from runtime.weights import WeightSource


class RankFamily(Family, Protocol):
    """A family that can run a request on several ranks."""

    def start_on_ranks(
        self,
        prepared: Prepared,
        weights: WeightSource,
        compute: Compute,
        connection: Connection,
        is_sharded: bool,
    ) -> RankJob:
        """This rank's job. is_sharded: the weights are this rank's shards. Raises: CapabilityError: ranks do not fit."""
        ...


class RankJob(Job, Protocol):
    """A job that all ranks run; rank 0 gets what it decodes."""

    def close(self) -> None:
        """On rank 0, when the request is given up: bring all ranks to a border."""
        ...


@dataclass(frozen=True)
class RankPrepared(Prepared):
    """body: the request's fields as JSON, complete: nothing is drawn again from them."""

    body: Mapping[str, object] | None = None


@dataclass(frozen=True)
class _Parsed:
    request: Any
    body: Mapping[str, object]


class FamilyOnRanks:
    """`runtime.family.Family` over several ranks.

    Args:
        manifest: the directory's own, not a rank's view.
        rank, size: this rank. connection: called when a job starts.
    """

    def __init__(
        self, family: Family, manifest: Manifest, rank: int, size: int, connection: Callable[[], Connection]
    ) -> None:
        self.capabilities = family.capabilities
        self._family: Any = family
        self._groups = manifest.groups
        self._is_sharded = bool(prepared_ranks(manifest.orders))
        self._rank, self._size = rank, size
        self._connection = connection

    def parse(self, body: Mapping[str, object], resolve_image: ImageResolver | None = None) -> _Parsed:
        return _Parsed(self._family.parse(body, resolve_image), body)

    def likely_order(self, body: Mapping[str, object] | None) -> str:
        order: str = self._family.likely_order(body)
        return order

    def prepare(self, request: _Parsed) -> RankPrepared:
        prepared: Prepared = self._family.prepare(request.request)
        body = {**request.body, "seed": prepared.report["seed"]}
        return RankPrepared(**vars(prepared), body=_as_json(body))

    def import_models(self) -> None:
        self._family.import_models()

    def warm_up(self, prepared: Prepared | None, compute: Compute) -> None:
        """With whole weights as on one rank; shards meet their libraries in the first step."""
        if not self._is_sharded:
            self._family.warm_up(prepared, compute)

    def start(self, prepared: Prepared, weights: WeightSource, compute: Compute) -> RankJob:
        connection = self._connection()
        guard = connection.guard
        held = RankWeights(
            weights, self._groups, self._rank, self._size, guard.progress if guard else lambda group: None
        )
        job: RankJob = self._family.start_on_ranks(prepared, held, compute, connection, self._is_sharded)
        return job


def _as_json(body: Mapping[str, object]) -> dict[str, object]:
    """Pictures that are bytes become data URIs, which every family's `parse` takes."""
    return {
        name: f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else value
        for name, value in body.items()
    }
