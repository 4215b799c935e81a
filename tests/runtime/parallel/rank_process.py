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
from runtime.parallel.early import early_communicator
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


def fail(connection: Connection, rank: int, how: str, device: str = "cpu") -> Any:
    """All ranks gather again and again; `rank` fails after the first time."""
    part = torch.zeros(1000, device=device)
    out = torch.empty(connection.ranks.size, 1000, device=device)
    assert connection.guard is not None
    with connection.guard.job():
        connection.ranks.all_gather(out, part).wait()
        if connection.ranks.rank == rank:
            if how == "exception":
                raise InternalError("out of paint", where="test")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        while True:
            connection.ranks.all_gather(out, part).wait()
            out[:, :1].tolist()  # waits for the device


def exchange_everything(connection: Connection, device: str, seed: int) -> Any:
    """Every collective in three types and sizes, several under way at once; what arrived, and the bytes that did."""
    ranks, generator = connection.ranks, torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    before = ranks.received_bytes
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for width in (1, 5376, 300_000):
            data = torch.randint(0, 250, (ranks.size, ranks.size, 3, width), generator=generator)
            mine = data[ranks.rank].to(dtype).to(device)
            gathered = torch.empty((ranks.size, *mine.shape), dtype=dtype, device=device)
            exchanged = torch.empty((2 * ranks.size, width), dtype=dtype, device=device)
            cast = mine.clone()
            message = torch.empty_like(mine)
            works = [
                ranks.all_gather(gathered, mine),
                ranks.all_to_all(
                    exchanged,
                    mine[:, :2].reshape(-1, width),
                    [2] * ranks.size,
                    [2] * ranks.size,
                ),
                ranks.broadcast(cast, ranks.size - 1),
            ]
            target, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
            if ranks.rank % 2:  # a message may wait for its receiver
                works += [ranks.receive(message, source), ranks.send(mine, target)]
            else:
                works += [ranks.send(mine, target), ranks.receive(message, source)]
            for work in works:
                work.wait()
            expected = [
                data.to(dtype),
                data[:, ranks.rank, :2].to(dtype).reshape(-1, width),
                data[-1].to(dtype),
                data[source].to(dtype),
            ]
            for tensor, right in zip((gathered, exchanged, cast, message), expected, strict=True):
                assert torch.equal(tensor.cpu(), right), f"{dtype}, {width}: {tuple(right.shape)}"
                found.append(tensor.cpu().float().sum())
    return torch.stack(found), ranks.received_bytes - before


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    times = GuardTimes(**json.loads(os.environ.get("TEST_GUARD_TIMES", "{}")))
    environment, device = rank_environment(), os.environ.get("TEST_DEVICE", "cpu")
    early = None
    if os.environ.get("TEST_NCCL") == "early":
        maker = early_communicator(environment, Timeline(), lambda: None)
        early = maker.make()
        assert early is not None, maker.problem
    if os.environ.get("TEST_DIES") == "before the control group":
        dist.new_group = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    connection = connect(environment, device, times, early=early)
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
            if (
                connection.guard is not None and environment.rank == 0
            ):  # it keeps the store, where others read the cause
                connection.guard.close()
                sys.stdin.read()
            break
    connection.close()


if __name__ == "__main__":
    main()
