"""Ranks that are connected as a worker connects them, for benches that have imported torch."""

from __future__ import annotations

from runtime.parallel.connect import Connection, connect
from runtime.parallel.early import early_communicator
from runtime.parallel.environment import choose_transport, narrow_devices, rank_environment
from runtime.timeline import Timeline


def shipped_connection(device: str) -> Connection:
    """This process's end, on the only GPU that it sees from here on; nothing has opened CUDA before."""
    environment = rank_environment()
    if device != "cuda" or environment.size == 1:
        return connect(environment, device)
    narrow_devices(environment)
    choose_transport(environment)
    maker = early_communicator(environment, Timeline(), lambda: None)
    early = maker.make()
    if early is None:
        raise SystemExit(f"no communicator: {maker.problem}")
    return connect(environment, device, early=early)
