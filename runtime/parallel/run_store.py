"""The key-value store of a run: how a rank finds it, and what all ranks agree on there."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from runtime.native_nccl import Communicator
from runtime.parallel.environment import RankEnvironment

_DIAL_STEP_S = 0.005


def run_stores(environment: RankEnvironment, limit: timedelta) -> tuple[PrefixStore, PrefixStore]:
    """Two connections to the run's store: the launcher's where it keeps one (torchrun), else rank 0's."""
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environment.rank or is_kept:
        limit = await_server(environment, limit)
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


def await_server(environment: RankEnvironment, limit: timedelta) -> timedelta:
    """Until somebody listens there: a store that dials too early waits half a second before it does again, and longer then.

    Whether it is the run's store is for the store to find out, also if nobody comes.
    Returns: what is left of the limit, at least a second.
    """
    deadline = time.monotonic() + limit.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((environment.address, environment.port), timeout=1.0).close()
            break
        time.sleep(_DIAL_STEP_S)
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def agreed(
    store: PrefixStore, environment: RankEnvironment, early: Communicator | None
) -> Communicator | None:
    """This rank's early communicator if every rank has one; otherwise it is left."""
    store.set(f"early/{environment.rank}", "no" if early is None else "yes")
    answers = [store.get(f"early/{rank}") for rank in range(environment.size)]
    if early is not None and b"no" in answers:
        early.abort()
        return None
    return early
