"""One rank as a process: obeys commands on stdin, answers on stdout, one JSON object a line.

    python -m tests.runtime.parallel.rank_process     with the variables that torchrun sets

Commands name a function of this module; `result` files hold what it returned. Started once for many cases.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loader.errors import InternalError, WorkerError
from runtime.compute import Compute
from runtime.families.minimax_h3.model.job import H3Job
from runtime.families.minimax_h3.model.ranks_job import RanksJob
from runtime.families.minimax_h3.model.ranks_video import ArrivedUnit
from runtime.ops.attention import attention
from runtime.parallel.connect import Connection, connect
from runtime.parallel.control import Control
from runtime.parallel.environment import rank_environment
from runtime.parallel.guard import GuardTimes
from runtime.parallel.ranks import GroupRanks, OneRank
from runtime.pipeline import Hooks, denoise
from runtime.timeline import Timeline
from tests.fakes.weights import DictWeights
from tests.runtime.parallel.tiny import job_input, rank_weights


def run_job(connection: Connection, size: int, is_sharded: bool, weights: str, **request: Any) -> Any:
    """A request on the first `size` ranks: latents, pixels and samples (rank 0), or None on the other ranks."""
    groups = [dist.new_group(list(range(size))) for _ in range(2)] if size > 1 else [None, None]
    if connection.environment.rank >= size:
        return None
    team = connection
    if size == 1:
        team = Connection(connection.environment, OneRank(), Control(OneRank()), None)
    elif size < connection.environment.size:
        ranks, control = (GroupRanks(group, connection.guard) for group in groups)
        team = Connection(connection.environment, ranks, Control(control), connection.guard)
    given, stored, tables = job_input(**request), *torch.load(weights)
    held = (
        rank_weights(given.config, stored, team.ranks.rank, size, tables)
        if is_sharded
        else DictWeights(stored, tables)
    )
    job = RanksJob(given, held, Compute("cpu", attention, attention), team, is_sharded)
    with team.control.request():
        return {**run_to_media(job), "received_bytes": team.ranks.received_bytes}


def decode(connection: Connection, latents_of: str, weights: str, **request: Any) -> Any:
    """Pixels and samples of another call's latents, decoded by this rank alone."""
    if connection.environment.rank:
        return None
    given, (groups, tables) = job_input(**request), torch.load(weights)
    job, latents = H3Job(given, DictWeights(groups, tables), "cpu"), torch.load(latents_of)
    decoders = job.decoders()
    (samples,) = decoders["audio"].units(latents)
    return [_pixels(unit) for unit in decoders["video"].units(latents)], torch.from_numpy(samples)


def run_to_media(job: H3Job) -> dict[str, Any]:
    """Latents, all pixels in order and samples of a job."""
    job.condition()
    latents = denoise(job, Hooks(Timeline(), threading.Event()))
    decoders = job.decoders()
    is_first = not isinstance(job, RanksJob) or job.leads
    samples = [torch.from_numpy(part) for part in decoders["audio"].units(latents)] if is_first else []
    pixels = [_pixels(unit) for unit in decoders["video"].units(latents)]
    return {**latents, "pixels": pixels, "samples": samples, "noise": job.report()["noise_sha256"]}


def _pixels(unit: Any) -> Tensor:
    assert isinstance(unit, ArrivedUnit) or unit.layout == "yuv420p"
    target = bytearray(unit.num_frames * 64 * 64 * 3 // 2)
    arrival = unit.copy_into(memoryview(target))
    assert arrival is None
    return torch.frombuffer(target, dtype=torch.uint8)


def idle(connection: Connection, seconds: float) -> Any:
    """Rank 0 lets the others wait for a command; longer than what would be a hang during a request."""
    if connection.control.leads:
        threading.Event().wait(seconds)
        return connection.control.exchange({"op": "wake"})
    return connection.control.exchange()


def fail(connection: Connection, rank: int, how: str) -> Any:
    """All ranks gather again and again; `rank` fails after the first time."""
    part = torch.zeros(1000)
    out = torch.empty(connection.ranks.size, 1000)
    assert connection.guard is not None
    with connection.guard.job():
        connection.ranks.all_gather(out, part).wait()
        if connection.ranks.rank == rank:
            if how == "exception":
                raise InternalError("out of paint", where="test")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        while True:
            connection.ranks.all_gather(out, part).wait()


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    times = GuardTimes(**json.loads(os.environ.get("TEST_GUARD_TIMES", "{}")))
    connection = connect(rank_environment(), "cpu", times)
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        result = command.pop("result")
        try:
            with torch.inference_mode():
                torch.save(globals()[command.pop("call")](connection, **command), result)
            answer: dict[str, object] = {"ok": True}
        except (WorkerError, AssertionError) as error:
            failure = connection.guard.report(str(error)) if connection.guard else error
            answer = {"error": str(failure)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if "error" in answer:
            break
    connection.close()


if __name__ == "__main__":
    main()
