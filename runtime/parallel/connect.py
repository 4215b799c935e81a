"""Join the run: store, guard, process groups. NCCL on GPUs, gloo on CPUs, and gloo for control on both.

`connect` blocks until all ranks are there; a start calls it on a thread of its own, so that it overlaps the load.
NVLink multicast and whatever else NCCL reads from the environment stays as the environment has it
(`NCCL_NVLS_ENABLE=0` turns multicast off).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from loader.errors import CapabilityError, InternalError
from runtime.parallel.control import Control
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.guard import Guard, GuardTimes
from runtime.parallel.ranks import GroupRanks, OneRank, Ranks, SilentRanks

_IDLE = timedelta(days=365)  # ranks wait for the next request this long; the guard knows idling from hanging


@dataclass(frozen=True)
class Connection:
    """This rank's part of a run. `ranks` moves tensors of the device, `control` words of the host."""

    environment: RankEnvironment
    ranks: Ranks
    control: Control
    guard: Guard | None

    def close(self) -> None:
        """Leave the run. After a failure nobody is waited for."""
        if self.guard is None:
            return
        self.guard.close()
        if self.guard.failure is None:
            dist.destroy_process_group()
        else:
            call_off()


def connect(
    environment: RankEnvironment,
    device: str,
    times: GuardTimes | None = None,
    end_process: Callable[[InternalError], None] | None = None,
) -> Connection:
    """Join all ranks of the run.

    Args:
        device: "cpu", or "cuda" of which this rank takes number `local_rank`, or the only one that it sees.
        times: limits of the guard and of every collective.
        end_process: see `Guard`; the default prints the error and exits with its code.
    Raises: CapabilityError: the device is missing, or not all ranks came in time.
    """
    times = times or GuardTimes()
    if environment.size == 1:
        return Connection(environment, OneRank(), Control(OneRank()), None)
    limit = timedelta(seconds=times.limit_s)
    gpu = _take_gpu(environment) if device == "cuda" else None
    try:
        store, guard_store = _stores(environment, limit)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.size,
            timeout=limit,
            device_id=gpu,
        )
        guard = Guard(
            guard_store,
            environment.rank,
            environment.size,
            times,
            call_off,
            end_process or _exit,
        )
        guard.announce()
        control = dist.new_group(backend="gloo", timeout=_IDLE)
        dist.barrier(group=control)
        guard.start()
    except RuntimeError as error:
        raise CapabilityError(
            f"ranks did not come together ({str(error).partition(chr(10))[0]})",
            where=f"rank {environment.rank} of {environment.size}",
            found=f"{environment.address}:{environment.port}",
            expected=f"all ranks within {times.limit_s:g} s",
        ) from error
    return Connection(environment, GroupRanks(None, guard), Control(GroupRanks(control, guard), guard), guard)


def silent_connection(rank: int, size: int) -> Connection:
    """A connection that moves nothing, see `SilentRanks`. Every rank leads itself."""
    environment = RankEnvironment(rank, size, rank, size)
    return Connection(environment, SilentRanks(rank, size), Control(OneRank()), None)


def call_off() -> None:
    """Make collectives under way fail on this rank, so that its main thread leaves them; NCCL can, gloo cannot."""
    world = dist.group.WORLD
    if world is not None and dist.get_backend(world) == "nccl":
        world.abort()


def _take_gpu(environment: RankEnvironment) -> torch.device:
    count = torch.cuda.device_count()
    ordinal = 0 if count == 1 else environment.local_rank
    if ordinal >= count:
        raise CapabilityError(
            "not a GPU for every rank of this host",
            where="device",
            found=count,
            expected=environment.local_size,
        )
    torch.cuda.set_device(ordinal)
    return torch.device("cuda", ordinal)


def _stores(environment: RankEnvironment, limit: timedelta) -> tuple[PrefixStore, PrefixStore]:
    """Two connections to the run's store: the launcher's where it keeps one (torchrun), else rank 0's."""
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix = f"coldframe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # a restart starts afresh
    connections = [
        TCPStore(
            environment.address,
            environment.port,
            is_master=environment.rank == 0 and not is_kept and purpose == "groups",
            timeout=limit,
            wait_for_workers=False,
        )
        for purpose in ("groups", "guard")
    ]
    groups, guard = connections
    return PrefixStore(f"{prefix}/groups", groups), PrefixStore(f"{prefix}/guard", guard)


def _exit(error: InternalError) -> None:
    """The main thread is stuck where Python cannot reach it."""
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(error.exit_code)
