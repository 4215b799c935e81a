"""Join the run: store, guard, process groups. NCCL on GPUs, gloo on CPUs, and gloo for control on both.

`connect` blocks until all ranks are there; a start calls it on a thread of its own, so that it overlaps the load. On GPUs it
takes the communicator that was made before (`runtime.parallel.early`) if every rank has one, else torch makes it.
What NCCL reads from the environment is left as it is here (`NCCL_NVLS_ENABLE=0` turns NVLink multicast off); a start has chosen
before (`runtime.parallel.environment.choose_transport`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from loader.errors import CapabilityError, WorkerError
from runtime.native_nccl import Communicator
from runtime.parallel.control import Control
from runtime.parallel.early import first_uses
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.guard import Guard, GuardTimes
from runtime.parallel.nccl_ranks import NcclRanks, StreamOrder
from runtime.parallel.ranks import GroupRanks, OneRank, Ranks, SilentRanks
from runtime.parallel.run_store import agreed, run_stores
from runtime.timeline import Laps

_IDLE = timedelta(days=365)  # ranks wait for the next request this long; the guard knows idling from hanging


@dataclass(frozen=True)
class Connection:
    """This rank's part of a run. `ranks` moves tensors of the device, `control` words of the host.

    early: the communicator under `ranks`, if it is not torch's. seconds: what each part of joining took.
    """

    environment: RankEnvironment
    ranks: Ranks
    control: Control
    guard: Guard | None
    early: Communicator | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def close(self) -> None:
        """Leave the run. After a failure nobody is waited for."""
        if self.guard is None:
            return
        self.guard.close()
        if self.guard.failure is not None:
            call_off(self.early)
            return
        if self.early is not None:
            self.early.close()
        dist.destroy_process_group()


def connect(
    environment: RankEnvironment,
    device: str,
    times: GuardTimes | None = None,
    end_process: Callable[[WorkerError], None] | None = None,
    early: Communicator | None = None,
) -> Connection:
    """Join all ranks of the run.

    Args:
        device: "cpu", or "cuda" of which this rank takes number `local_rank`, or the only one that it sees.
        times: limits of the guard, of every collective and of the ranks' coming together.
        end_process: see `Guard`; the default prints the error and exits with its code.
        early: this rank's end of a communicator, if there is one; left again unless all ranks have theirs.
    Returns: its `seconds` say how long each part took.
    Raises: CapabilityError: the device is missing, or not all ranks came in time.
    """
    times = times or GuardTimes()
    if environment.size == 1:
        return Connection(environment, OneRank(), Control(OneRank()), None)
    limit = timedelta(seconds=times.limit_s)
    gpu = _take_gpu(environment) if device == "cuda" else None
    clock = Laps()
    try:
        store, guard_store = run_stores(environment, timedelta(seconds=times.join_s))
        clock.lap("store")
        if gpu is not None:
            early = agreed(store, environment, early)
            clock.lap("agreement")
        uses_torch = gpu is not None and early is None
        dist.init_process_group(
            "nccl" if uses_torch else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.size,
            timeout=limit,
            device_id=gpu if uses_torch else None,
        )
        clock.lap("group")
        guard = Guard(
            guard_store,
            environment.rank,
            environment.size,
            times,
            partial(call_off, early),
            end_process or _exit,
        )
        guard.announce()
        beats = [f"beat/{rank}" for rank in range(environment.size)]
        guard_store.wait(beats, timedelta(seconds=times.join_s))
        guard.start()  # from here on a rank that dies or hangs is noticed, also where a group waits for ever
        clock.lap("guard")
    except RuntimeError as error:
        raise CapabilityError(
            f"ranks did not come together ({str(error).partition(chr(10))[0]})",
            where=f"rank {environment.rank} of {environment.size}",
            found=f"{environment.address}:{environment.port}",
            expected=f"all ranks within {times.join_s:g} s, groups within {times.limit_s:g} s",
        ) from error
    control = _control_group(guard, clock)
    ranks = GroupRanks(None, guard) if early is None else NcclRanks(early, StreamOrder(early.stream), guard)
    if uses_torch:
        _use_at_start(ranks, gpu, guard)
        clock.lap("use")
    control_ranks = Control(GroupRanks(control, guard), guard)
    return Connection(environment, ranks, control_ranks, guard, early, clock.seconds)


def _control_group(guard: Guard, clock: Laps) -> dist.ProcessGroup:
    """Raises: WorkerError: a failure, which is everybody's."""
    try:
        control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_IDLE)
        clock.lap("control")
        dist.barrier(group=control)
        clock.lap("barrier")
    except RuntimeError as error:
        failure = guard.explain(f"coming together: {error}", CapabilityError.kind)
        guard.close()
        raise failure from error
    return control


def _use_at_start(ranks: Ranks, gpu: torch.device | None, guard: Guard) -> None:
    """On a stream of its own: nothing that another thread warms up meanwhile waits for the other ranks.

    Raises: WorkerError: a failure, which is everybody's.
    """
    try:
        with torch.cuda.stream(torch.cuda.Stream(gpu)):  # type: ignore[no-untyped-call]
            use_once(ranks, gpu)
        guard.check()
    except (RuntimeError, WorkerError) as error:
        failure = guard.report(f"first use of the transport: {error}")
        guard.close()
        call_off()
        raise failure from error


def use_once(ranks: Ranks, device: torch.device | None) -> None:
    """On all ranks: the transport connects to a peer, and loads a kernel, when it is first needed. Waits for the device."""
    gathered, exchanged = first_uses(ranks.size)
    sent = torch.zeros(max(*gathered, ranks.size * exchanged), dtype=torch.uint8, device=device)
    received = torch.empty(ranks.size * max(*gathered, exchanged), dtype=torch.uint8, device=device)
    for count in gathered:
        ranks.all_gather(received[: ranks.size * count].view(ranks.size, count), sent[:count]).wait()
    counts = [exchanged] * ranks.size
    ranks.all_to_all(received[: sum(counts)], sent[: sum(counts)], counts, counts).wait()
    received[:1].tolist()
    ranks.received_bytes = 0


def silent_connection(rank: int, size: int) -> Connection:
    """A connection that moves nothing, see `SilentRanks`. Every rank leads itself."""
    environment = RankEnvironment(rank, size, rank, size)
    return Connection(environment, SilentRanks(rank, size), Control(OneRank()), None)


def call_off(early: Communicator | None = None) -> None:
    """Make collectives under way fail on this rank, so that its main thread leaves them; NCCL can, gloo cannot."""
    if early is not None:
        early.abort()
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


def _exit(error: WorkerError) -> None:
    """The main thread is stuck where Python cannot reach it."""
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(error.exit_code)
