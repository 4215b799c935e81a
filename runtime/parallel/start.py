"""The start of a worker over several ranks: every rank runs the graph of `runtime.nodes`, with one node more.

A host's GPUs are connected during the import of torch; the ranks come together as soon as it is there. Both on threads, beside the load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loader.errors import InternalError
from runtime.bootstrap import without_collector
from runtime.nodes import WorkerStart, choose_device, run_start
from runtime.parallel.environment import RankEnvironment, choose_transport, narrow_devices
from runtime.parallel.family import FamilyOnRanks
from runtime.parallel.prepared import prepared_ranks, rank_manifest
from runtime.startup import Node, Results
from runtime.timeline import Timeline

if TYPE_CHECKING:
    from loader.hub_link import HubProcess
    from loader.manifest import Manifest
    from loader.options import StreamOptions
    from loader.stream import WeightStream
    from runtime.engine import Engine
    from runtime.family import Family, ImageResolver, Prepared
    from runtime.first_request import FirstRequest
    from runtime.native_nccl import Communicator
    from runtime.parallel.connect import Connection
    from runtime.parallel.early import EarlyCommunicator
    from runtime.parallel.engine import RankEngine
    from runtime.parallel.first_relay import FirstRelay
    from runtime.settings import Settings


def start_on_ranks(
    environment: RankEnvironment,
    settings: Settings,
    timeline: Timeline,
    body: Mapping[str, object] | None,
    resolve_image: ImageResolver | None,
    on_family: Callable[[Family], None] | None = None,
    first: FirstRequest | None = None,
) -> tuple[Engine, Prepared | None]:
    """Like `runtime.nodes.start_engine`, on every rank. Returns on rank 0 only.

    Args: first: on the other ranks a place of their own, with the same `follows`.

    The other ranks serve rank 0 until it ends and then leave the process.
    Raises: WorkerError, on all ranks: the first cause of whatever failed on any rank that was already connected.
    """
    if choose_device(settings.device) == "cuda":
        narrow_devices(environment)
        choose_transport(environment)
    start = RankStart(environment, settings, timeline, body, resolve_image, on_family, first)
    with without_collector():
        engine, prepared = run_start(start, timeline)
    if environment.rank == 0:
        return engine, prepared
    with engine:
        engine.follow(prepared)
    sys.exit(0)


class RankStart(WorkerStart):
    """The nodes of one rank."""

    def __init__(self, environment: RankEnvironment, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.environment = environment
        self.connection: Connection | None = None
        self.hub: HubProcess | None = None
        self.early: EarlyCommunicator | None = None
        self.relay: FirstRelay | None = None
        if self.first is not None:
            self.relay = self.relayed(self.first)
        self.whole: Manifest | None = None

    def relayed(self, first: FirstRequest) -> FirstRelay | None:
        """Told to all ranks of this host. On several hosts none is taken from here on: they have no socket in common."""
        if self.environment.local_size < self.environment.size:
            first.close()
            return None
        from runtime.parallel.first_relay import FirstRelay

        return FirstRelay(self.environment, first)

    def body_to_load_by(self, first: FirstRequest) -> Mapping[str, object] | None:
        """The same on all ranks: without a relay it may be on one and not on another."""
        if self.relay is None:
            return None
        try:
            return self.relay.load_body()
        except InternalError as error:
            if self.shares_reader:  # all ranks must read in one order
                raise
            self.timeline.note(first_request=str(error))
            return None

    def give_up(self) -> None:
        if self.relay is not None:
            self.relay.close()
        super().give_up()

    def nodes(self) -> list[Node]:
        return [
            *super().nodes(),
            Node("communicator", self.communicator, ("load",), "communicator", cancel=self.no_communicator),
            Node("ranks", self.ranks, ("torch", "communicator"), "ranks", cancel=self.leave),
        ]

    def manifest(self, results: Results) -> Manifest:
        """The manifest as this rank sees it."""
        rank, size = self.environment.rank, self.environment.size
        self.timeline.note(rank=rank, ranks=size)
        self.whole = super().manifest(results)
        return rank_manifest(self.whole, rank, size)

    def family(self, results: Results) -> FamilyOnRanks:
        """A family whose jobs run on all ranks."""
        from runtime.family import family_for

        assert self.whole is not None, "the manifest was read before"
        manifest, rank, size = results["manifest"], self.environment.rank, self.environment.size
        family = family_for(manifest, self.directory, self.settings.task, self.settings.schedule)
        on_ranks = FamilyOnRanks(
            family, manifest, size in prepared_ranks(self.whole.orders), rank, size, self._connected
        )
        if self.on_family is not None:
            self.on_family(on_ranks)
        return on_ranks

    def spawn_processes(self) -> None:
        """An uploader on every rank; a reader on each, or one for the host's ranks and the hub between."""
        if not self.shares_reader:
            super().spawn_processes()
            return
        self.spawn_uploader()
        if self.environment.local_rank == 0:
            from loader.hub_link import spawn_hub

            self.spawn_reader()
            self.hub = spawn_hub()

    @property
    def shares_reader(self) -> bool:
        """On the CPU every rank needs the bytes in memory of its own, so nothing would be gained."""
        is_forced = bool(self.settings.loader_path) or self.settings.host_reader == "own"
        return self.device == "cuda" and self.environment.local_size > 1 and not is_forced

    def start_stream(self, manifest: Manifest, groups: Sequence[str]) -> WeightStream:
        """The first load is every rank's and shared; what a later request needs besides, each rank reads itself."""
        assert self.weights is not None, "it is what asks for the stream"
        assert self.whole is not None, "the manifest was read before"
        if self.weights.streams or not self.shares_reader:
            return super().start_stream(manifest, groups)
        from runtime.parallel.shared_load import start_shared

        reader, self.reader = self.reader, None  # they belong to the load from here on
        hub, self.hub = self.hub, None
        uploader, self.uploader = self.uploader, None
        return start_shared(
            self.environment,
            self.whole,
            self.order,
            self.directory,
            self.device,
            self.stream_options(),
            reader,
            hub,
            uploader,
        )

    def stream_options(self) -> StreamOptions:
        """Readers of one rank leave the other ranks' CPUs to them."""
        sharers = 1 if self.shares_reader else self.environment.local_size
        return replace(super().stream_options(), sharers=sharers)

    def stop_loading(self) -> None:
        super().stop_loading()
        hub, self.hub = self.hub, None
        if hub is not None:
            hub.stop()

    def communicator(self, results: Results) -> Communicator | None:
        """Connect the GPUs during the import of torch, where the settings ask for it; None: left to torch."""
        environment, preload = self.environment, self.preload
        if self.settings.nccl != "early" or self.device != "cuda" or environment.size == 1:
            return None
        communicator, problem = None, ""
        if environment.local_size < environment.size:
            problem = "ranks on several hosts"
        elif preload is None:
            problem = "its libraries are not mapped early"
        else:
            from runtime.parallel.early import early_communicator

            self.early = early_communicator(environment, self.timeline, preload.join)
            communicator, problem = self.early.make(), self.early.problem
        self.timeline.note(communicator="early" if communicator else f"left to torch: {problem}")
        return communicator

    def no_communicator(self) -> None:
        if self.early is not None:
            self.early.cancel()

    def ranks(self, results: Results) -> Connection:
        from runtime.parallel.connect import connect
        from runtime.parallel.guard import GuardTimes

        self.connection = connect(
            self.environment,
            self.device,
            GuardTimes(limit_s=self.settings.rank_limit_s),
            early=results["communicator"],
        )
        self.timeline.note(connect_s=dict(self.connection.seconds))
        if results["communicator"] is not None and self.connection.early is None:
            self.timeline.note(communicator="left to torch: another rank has none")
        return self.connection

    def leave(self) -> None:
        """The start failed on this rank: tell the others, if they are connected."""
        if self.connection is not None and self.connection.guard is not None:
            self.connection.guard.report("its start failed")
            self.connection.close()

    def engine(self, results: Results) -> RankEngine:
        from runtime.parallel.engine import RankEngine

        return RankEngine(
            self.settings,
            self.timeline,
            results["manifest"],
            results["family"],
            results["load"],
            results["compute"],
            connection=results["ranks"],
        )

    def _connected(self) -> Connection:
        assert self.connection is not None, "jobs start after the graph has run"
        return self.connection
