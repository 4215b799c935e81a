"""Which rank this process is, from the variables that torchrun and other launchers set. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from loader.errors import RequestError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnvironment:
    """One process of a run on several ranks.

    local_rank: its number on this host, also its GPU; local_size: ranks on this host.
    run_id: what launchers call the run, distinct for runs at the same time on one host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    run_id: str = "none"

    @property
    def host_ranks(self) -> range:
        """Ranks on this host; launchers number the ranks of a host one after the other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read the standard variables; none of them set means one rank.

    Raises: RequestError: some are missing, or a number is out of range (all problems together).
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankEnvironment()
    missing = [name for name in _VARIABLES if name not in environ]
    if missing:
        raise RequestError(
            "variables are missing", where="ranks", found=", ".join(missing), hint="start with torchrun"
        )
    try:
        rank, size, local_rank, local_size = (int(environ[name]) for name in _VARIABLES[:4])
        port = int(environ["MASTER_PORT"])
    except ValueError as error:
        raise RequestError(f"a variable is no whole number ({error})", where=", ".join(_VARIABLES)) from None
    problems = []
    if not 0 <= rank < size:
        problems.append(f"RANK={rank} with WORLD_SIZE={size}")
    if not (0 <= local_rank < local_size <= size and local_rank <= rank):
        problems.append(f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_size} and RANK={rank}")
    if not 0 < port < 65536:
        problems.append(f"MASTER_PORT={port}")
    if problems:
        raise RequestError("variables contradict each other", where="ranks", found="; ".join(problems))
    run_id = f"{environ.get('TORCHELASTIC_RUN_ID', 'none')}-{port}"
    return RankEnvironment(rank, size, local_rank, local_size, environ["MASTER_ADDR"], port, run_id)


def narrow_devices(environment: RankEnvironment, environ: MutableMapping[str, str] | None = None) -> None:
    """Let this process see its own GPU only, before anything opens CUDA, so that all code means the same device 0.

    Raises: RequestError: fewer GPUs are visible than there are ranks on this host.
    """
    if environment.size == 1:
        return
    environ = os.environ if environ is None else environ
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(number) for number in range(environment.local_size)]
    if environment.local_rank >= len(visible):
        raise RequestError(
            "not a GPU for every rank of this host",
            where="CUDA_VISIBLE_DEVICES",
            found=listed,
            expected=f"{environment.local_size} devices",
        )
    environ["CUDA_VISIBLE_DEVICES"] = visible[environment.local_rank]


def choose_transport(environment: RankEnvironment, environ: MutableMapping[str, str] | None = None) -> None:
    """On one host NCCL maps its peers' memory by CUDA's older handles, unless the environment decides. Before NCCL is used.

    With handles of virtual memory it spends 0.4 s connecting channel after channel, and gathers are no faster
    (`scripts.bench.connect_ranks`).
    """
    if environment.local_size == environment.size:
        (os.environ if environ is None else environ).setdefault("NCCL_CUMEM_ENABLE", "0")
