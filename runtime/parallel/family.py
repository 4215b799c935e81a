"""A model family over several ranks: the same interface, with the request's fields kept for the other ranks. No torch."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from runtime.family import Family, ImageResolver, Job, Prepared
from runtime.parallel.prepared import RankWeights

if TYPE_CHECKING:
    from loader.manifest import Manifest
    from runtime.compute import Compute
    from runtime.native_torch import NativeTorch
    from runtime.parallel.connect import Connection
    from runtime.weights import WeightSource


def _ignore(group: str) -> None:
    return None


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

    def warm_up_on_ranks(
        self,
        prepared: Prepared | None,
        compute: Compute,
        connection: Connection,
        hold: Callable[[WeightSource], WeightSource],
        is_sharded: bool,
    ) -> None:
        """This rank's share, on weights of zeros, of a typical short request, or of conditioning a waiting one.

        hold: from stored groups to this rank's.
        """
        ...

    def native_operations(
        self,
        prepared: Prepared | None,
        native: NativeTorch,
        items: Collection[str],
        ranks: int = 1,
        is_sharded: bool = False,
    ) -> Iterator[str]:
        """See `Family`; in the shapes of one rank's share. is_sharded: as for `start_on_ranks`."""
        ...

    def warm_up_libraries(
        self, prepared: Prepared, device: str, ranks: int = 1, is_sharded: bool = False
    ) -> None:
        """See `Family`; in the shapes of one rank's share. is_sharded: as for `start_on_ranks`."""
        ...

    def warm_attention(self, prepared: Prepared, compute: Compute, ranks: int) -> None:
        """Build the plan of the denoiser's attention over one rank's heads, on the thread that denoises."""
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
        manifest: this rank's view. is_sharded: the directory has shards for this number of ranks.
        rank, size: this rank. connection: called when a job starts.
    """

    def __init__(
        self,
        family: Family,
        manifest: Manifest,
        is_sharded: bool,
        rank: int,
        size: int,
        connection: Callable[[], Connection],
    ) -> None:
        self.capabilities = family.capabilities
        self._family: Any = family
        self._groups = {group for order in manifest.orders.values() for group in order}
        self._is_sharded = is_sharded
        self._rank, self._size = rank, size
        self._connection = connection

    def parse(self, body: Mapping[str, object], resolve_image: ImageResolver | None = None) -> _Parsed:
        return _Parsed(self._family.parse(body, resolve_image), body)

    def spawn_tokenizer(self) -> None:
        self._family.spawn_tokenizer()

    def stop_tokenizer(self) -> None:
        self._family.stop_tokenizer()

    def prepare(self, request: _Parsed) -> RankPrepared:
        prepared: Prepared = self._family.prepare(request.request)
        body = {**request.body, "seed": prepared.report["seed"]}
        return RankPrepared(**vars(prepared), body=_as_json(body))

    def import_models(self) -> None:
        self._family.import_models()

    def warm_up(self, prepared: Prepared | None, compute: Compute) -> None:
        """This rank's share of the work, without waiting for the others."""
        if prepared is None:
            self._warm_up_share(None, compute)
        else:
            self._family.warm_attention(prepared, compute, self._size)

    def native_operations(
        self, prepared: Prepared | None, native: NativeTorch, items: Collection[str]
    ) -> Iterator[str]:
        """Those of this rank's share; nothing of it waits for the other ranks."""
        found: Iterator[str] = self._family.native_operations(
            prepared, native, items, self._size, self._is_sharded
        )
        return found

    def warm_up_libraries(self, prepared: Prepared, device: str) -> None:
        """In this rank's shapes."""
        self._family.warm_up_libraries(prepared, device, self._size, self._is_sharded)

    def warm_up_conditioner(self, prepared: Prepared, compute: Compute) -> None:
        """This rank's share of the work, without waiting for the others."""
        self._warm_up_share(prepared, compute)

    def _warm_up_share(self, prepared: Prepared | None, compute: Compute) -> None:
        from runtime.parallel.connect import silent_connection

        silent = silent_connection(self._rank, self._size)
        self._family.warm_up_on_ranks(prepared, compute, silent, self._hold, self._is_sharded)

    def warm_up_denoiser(self, prepared: Prepared, compute: Compute, items: Sequence[str]) -> bool:
        """Nothing: an evaluation's collectives need the other ranks."""
        return False

    def start(self, prepared: Prepared, weights: WeightSource, compute: Compute) -> RankJob:
        connection = self._connection()
        held = self._hold(weights, connection.guard.progress if connection.guard else _ignore)
        job: RankJob = self._family.start_on_ranks(prepared, held, compute, connection, self._is_sharded)
        return job

    def _hold(self, weights: WeightSource, on_group: Callable[[str], None] = _ignore) -> RankWeights:
        return RankWeights(weights, self._groups, self._rank, self._size, on_group)


def _as_json(body: Mapping[str, object]) -> dict[str, object]:
    """Pictures that are bytes become data URIs, which every family's `parse` takes."""
    return {
        name: f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else value
        for name, value in body.items()
    }
