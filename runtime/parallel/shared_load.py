"""Weights of a host's ranks through one reader. Standard library only: runs before torch is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from loader.errors import CapabilityError
from loader.host_link import JOIN_S, join_host, socket_address
from loader.host_plan import HostPlan, host_plan
from loader.host_reader import HostReader
from loader.load_plan import plan_load
from loader.reader_link import end_links
from loader.stream import start
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.prepared import rank_manifest

if TYPE_CHECKING:
    from loader.hub_link import HubProcess
    from loader.manifest import Manifest
    from loader.options import StreamOptions
    from loader.reader_link import ChildReader
    from loader.stream import WeightStream
    from loader.uploader_link import UploaderProcess


def start_shared(
    environment: RankEnvironment,
    manifest: Manifest,
    order: str,
    directory: Path,
    device: str,
    options: StreamOptions,
    reader: ChildReader | None = None,
    hub: HubProcess | None = None,
    uploader: UploaderProcess | None = None,
) -> WeightStream:
    """This rank's stream of a load that all ranks of the host start alike. Returns when the first rank's reader is there.

    Args:
        manifest: the directory's own, not a rank's view. order: key into this rank's view of its orders.
        reader, hub: on the host's first rank, ones that were spawned early. uploader: on every rank.
    Raises: CapabilityError: no shared memory, child process or socket on the first rank. InternalError: it did not come.
        Nothing of this rank is left running then.
    """
    host: HostReader | None = None
    try:
        shared = host_plan([plan_load(manifest, groups) for groups in _orders(environment, manifest, order)])
        address = socket_address(environment.run_id, environment.host_ranks.start)
        if environment.local_rank == 0:
            host = _read_for_host(shared, directory, options, address, reader, hub)
        link = join_host(address, environment.local_rank, JOIN_S)
    except BaseException:
        for owned in (host, hub):
            if owned is not None:
                owned.stop()
        end_links(reader, uploader)
        raise
    return start(
        shared.members[environment.local_rank],
        directory,
        device=device,
        options=replace(options, ring_bytes=link.ring_bytes, slot_bytes=link.slot_bytes),
        reader=link,
        uploader=uploader,
    )


def _read_for_host(
    shared: HostPlan,
    directory: Path,
    options: StreamOptions,
    address: str,
    reader: ChildReader | None,
    hub: HubProcess | None,
) -> HostReader:
    try:
        return HostReader(shared, directory, options, address, reader, hub)
    except OSError as error:
        raise CapabilityError(
            f"ranks cannot share a reader here ({error})",
            where="loader",
            hint="set COLDFRAME_HOST_READER=own, then every rank reads for itself",
        ) from error


def _orders(environment: RankEnvironment, manifest: Manifest, order: str) -> list[Sequence[str]]:
    views = (rank_manifest(manifest, rank, environment.size) for rank in environment.host_ranks)
    return [view.orders[order] for view in views]
