"""A worker of two ranks as a service runs it: loading, a cancelled job, two equal jobs, the end. Real processes.

Also what a request on two ranks makes, against the same worker on one: the same noise and a picture of the same kind.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest

from loader.manifest import read_manifest
from loader.options import StreamOptions
from prepare.cli import prepare_main
from runtime.compute import Compute
from runtime.families.minimax_h3.native_operations import operations
from runtime.families.minimax_h3.shards import Share, share_of
from runtime.family import family_for
from runtime.native_torch import NativeTorch
from runtime.ops.attention import attention
from runtime.parallel.environment import RankEnvironment
from runtime.parallel.family import FamilyOnRanks
from runtime.parallel.prepared import rank_manifest
from runtime.parallel.start import RankStart
from runtime.settings import Settings
from runtime.timeline import Timeline
from runtime.torch_preload import find_torch
from scripts.tiny_checkpoint import write_tiny_checkpoint
from tests.fakes.driver import FakeDriver
from tests.fakes.products import Products

ROOT = Path(__file__).parents[3]
GRACE_S = 20.0
REQUEST = {"prompt": "a lamp in the rain", "size": "64x64", "num_frames": 56, "seed": 3}


def prepared_for_two(folder: Path) -> Path:
    """A tiny prepared directory in `folder`, with shards for two ranks."""
    write_tiny_checkpoint(folder / "checkpoint", "test", "diffusers", seed=4)
    options = ["--schedule", "base-30", "--dtype", "float32", "--task", "t2va", "--ranks", "2", "--json"]
    assert prepare_main([str(folder / "checkpoint"), str(folder / "bundle"), *options]) == 0
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_for_two(tmp_path_factory.mktemp("prepared"))


class TwoRanks:
    """`coldframe worker` on two ranks; speaks the worker protocol with rank 0."""

    def __init__(
        self, bundle: Path, device: str = "cpu", flags: Sequence[str] = (), **environment: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "runtime.parallel.launch",
                    "worker",
                    "--bundle",
                    str(bundle),
                    "--device",
                    device,
                    *flags,
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    **environment,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        self.seen: list[dict[str, Any]] = []
        threading.Thread(target=self._end_together, daemon=True).start()

    def _end_together(self) -> None:
        """A launcher ends the other ranks when one has ended; here they have a while, and a test does not hang."""
        while all(process.poll() is None for process in self.processes):
            time.sleep(0.1)
        for process in self.processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def send(self, **command: object) -> None:
        stdin = self._stream(self.processes[0].stdin)
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()

    def until(self, event: str, job: str | None = None) -> dict[str, Any]:
        """Read rank 0's events up to this one."""
        for line in self._stream(self.processes[0].stdout):
            self.seen.append(json.loads(line))
            if self.seen[-1]["event"] == event and self.seen[-1].get("job") == job:
                return self.seen[-1]
        said = [(process.wait(), self._stream(process.stderr).read()) for process in self.processes]
        raise AssertionError(f"no {event}: {self.seen[-5:]}, ranks ended with {said}")

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, remaining standard output and error of both ranks."""
        self._stream(self.processes[0].stdin).close()
        results = []
        for process in self.processes:
            code = process.wait(timeout=60)
            results.append((code, self._stream(process.stdout).read(), self._stream(process.stderr).read()))
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                self._stream(stream).close()

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@pytest.fixture
def ranks(bundle: Path) -> Iterator[TwoRanks]:
    ranks = TwoRanks(bundle)
    yield ranks
    ranks.close()


class RecordedCompute(Compute):
    """plans: (rows, heads, head dim) of the attention plans that were asked for."""

    plans: ClassVar[list[tuple[int, int, int]]] = []

    def warm_attention(self, rows: int, heads: int, head_dim: int) -> None:
        self.plans.append((rows, heads, head_dim))


def test_warm_up_covers_a_rank_s_share_of_attention(bundle: Path) -> None:
    """With a request its plan and its conditioner; without one a whole typical request."""
    manifest = rank_manifest(read_manifest(bundle), 1, 2)
    family = FamilyOnRanks(
        family_for(manifest, bundle), manifest, True, 1, 2, lambda: pytest.fail("no ranks")
    )
    prepared = family.prepare(family.parse(REQUEST))
    config = family.capabilities.config.transformer
    heads, head_dim = config.num_attention_heads // 2, config.attention_head_dim
    long: list[tuple[int, ...]] = []
    short: list[tuple[int, ...]] = []

    def recorder(shapes: list[tuple[int, ...]]) -> Any:
        def recorded(q: Any, k: Any, v: Any, **options: Any) -> Any:
            shapes.append(tuple(q.shape))
            return attention(q, k, v, **options)

        return recorded

    compute = RecordedCompute("cpu", recorder(long), recorder(short))
    family.warm_up(prepared, compute)
    assert compute.plans == [(prepared.parts["sequence"].num_rows, heads, head_dim)]
    assert long == short == []
    family.warm_up_conditioner(prepared, compute)
    assert long == []
    assert {shape[0] for shape in short} == {len(prepared.parts["tokens"].ids)}
    family.warm_up(None, compute)
    assert [shape[1:] for shape in long] == [(heads, head_dim)]


def test_what_is_warmed_natively_has_the_shapes_of_a_rank_s_share(bundle: Path) -> None:
    """Against the products that the share runs on zeros, in the conditioner and in one evaluation."""
    manifest = rank_manifest(read_manifest(bundle), 0, 2)
    inner = family_for(manifest, bundle)
    family = FamilyOnRanks(inner, manifest, True, 0, 2, lambda: pytest.fail("no ranks"))
    config, prepared = inner.capabilities.config, family.prepare(family.parse(REQUEST))
    with Products() as run:
        family.warm_up(None, Compute("cpu", attention, attention))
    native = NativeTorch(find_torch(), "cpu")
    share = share_of(config, 2, is_sharded=True)
    done = [*operations(native, ("operators", "step"), config, prepared.parts["sequence"], share)]
    native.close()
    D, T = config.transformer.hidden_size, config.transformer.text_dim
    named = {name.partition("product ")[2] for name in done if "product" in name} | {f"{D} x {T}"}
    assert named == {f"{width} x {columns}" for width, columns, _ in run.seen}
    assert share == Share(rows=2, conditioner=2, projection=2)
    assert share_of(config, 8, is_sharded=False) == Share(rows=8)


class StartOnFakeDevice(RankStart):
    """A rank's start whose device is a fake one of this process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.device, self.fake = "cuda", FakeDriver()

    def stream_options(self) -> StreamOptions:
        return replace(super().stream_options(), driver=self.fake)


def load_as(rank: int, bundle: Path, run: str, settings: Settings) -> tuple[list[str], set[str]]:
    """Names of a load's marks, and the groups that this rank loaded."""
    environment = RankEnvironment(rank, 2, rank, 2, run_id=run)
    start = StartOnFakeDevice(environment, settings, Timeline(), None, None, None)
    results: Any = {}
    start.spawn(results)
    results["manifest"] = start.manifest(results)
    (stream,) = start.load(results).streams
    stream.wait_all()
    found = [mark.name for mark in stream.marks()], {group.name for group in stream.plan.groups}
    start.stop_loading()
    start.fake.finish()
    return found


@pytest.mark.parametrize("host_reader", ["shared", "own"])
def test_ranks_of_a_host_load_through_one_reader_or_one_each(
    bundle: Path, host_reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # what both starts choose, in this process
    settings = Settings(bundle=str(bundle), device="cpu", host_reader=host_reader)
    run = uuid.uuid4().hex
    with ThreadPoolExecutor(2) as pool:
        loads = list(pool.map(lambda rank: load_as(rank, bundle, run, settings), (1, 0)))
    for rank, (marks, groups) in zip((1, 0), loads, strict=True):
        kind = "shared" if host_reader == "shared" else "child"
        assert f"path A, {kind}: first choice" in marks
        assert f"transformer/rank-{rank}-of-2/blocks.0" in groups
        assert f"transformer/rank-{1 - rank}-of-2/blocks.0" not in groups


@pytest.mark.parametrize("seed", [3, None], ids=["seed", "drawn"])
def test_a_request_that_follows_is_prepared_in_the_start_of_both_ranks(
    bundle: Path, ranks: TwoRanks, tmp_path: Path, seed: int | None
) -> None:
    """The same file as from ranks that were ready before. Without a seed rank 1 prepares it again, with the one of rank 0."""
    request = (
        {**REQUEST, "seed": seed} if seed else {name: REQUEST[name] for name in REQUEST if name != "seed"}
    )
    timeline = tmp_path / "start.json"
    flags = ("--request-follows", "--timeline", str(timeline))
    one_gpu = {"CUDA_VISIBLE_DEVICES": "1"}  # no matter on CPUs
    starting = TwoRanks(bundle, flags=flags, COLDFRAME_LOG_LEVEL="DEBUG", **one_gpu)
    try:
        starting.send(op="generate", job="first", request=request, output=str(tmp_path / "first.mp4"))
        accepted = starting.until("accepted", "first")["request"]
        starting.until("done", "first")
        starting.send(op="shutdown")
        ended = starting.end()
        assert [code for code, _, _ in ended] == [0, 0], ended
    finally:
        starting.close()
    start = json.loads(timeline.read_text())
    spans = {event["name"]: event for event in start["traceEvents"] if event["ph"] == "X"}
    assert spans["request"]["ts"] / 1e6 < start["headline"]["torch_ready"]
    said = f"the request was {'' if seed else 'not '}prepared in the start"
    assert said in ended[1][2], "of rank 1"
    ranks.until("ready")
    again = {**request, "seed": accepted["seed"]}
    ranks.send(op="generate", job="again", request=again, output=str(tmp_path / "again.mp4"))
    ranks.until("done", "again")
    assert (tmp_path / "first.mp4").read_bytes() == (tmp_path / "again.mp4").read_bytes()


def test_a_cancelled_job_leaves_both_ranks_ready_and_the_next_is_bit_identical(
    ranks: TwoRanks, tmp_path: Path
) -> None:
    # C80, with two ranks
    outputs = {name: tmp_path / f"{name}.mp4" for name in ("first", "cancelled", "again")}
    for name, output in outputs.items():
        ranks.send(op="generate", job=name, request=REQUEST, output=str(output))
    done = ranks.until("done", "first")
    assert done["result"]["noise_sha256"]
    ranks.until("phase", "cancelled")
    ranks.send(op="cancel", job="cancelled")
    ended = {event["event"] for event in [ranks.until("cancelled", "cancelled")]}
    assert ended == {"cancelled"}
    ranks.until("done", "again")
    assert not outputs["cancelled"].exists()
    assert outputs["first"].read_bytes() == outputs["again"].read_bytes()
    ranks.send(op="shutdown")
    for code, _, errors in ranks.end():
        assert code == 0, errors
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"


def test_a_killed_rank_ends_the_worker_with_an_error(ranks: TwoRanks, tmp_path: Path) -> None:
    ranks.until("ready")
    ranks.processes[1].kill()
    ranks.send(op="generate", job="lost", request=REQUEST, output=str(tmp_path / "lost.mp4"))
    event = ranks.until("error", "lost")
    assert "rank 1 of 2 failed" in event["error"]["message"]
    (code, _, errors), (killed, _, _) = ranks.end()
    assert code == 1, errors
    assert killed == -9
    assert not (tmp_path / "lost.mp4").exists()


def test_weights_that_one_rank_lacks_end_both_before_anybody_asks(bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    (shard,) = (damaged / "weights").glob("transformer.rank-1-of-2-*.safetensors")
    shard.unlink()
    ranks = TwoRanks(damaged)
    try:
        error = ranks.until("error")["error"]
        assert error["kind"] == "bad_artifact"
        assert "rank 1 of 2 failed" in error["message"]
        assert shard.name in error["message"]
        assert "ready" not in [event["event"] for event in ranks.seen]
        assert [code for code, _, _ in ranks.end()] == [3, 3]
    finally:
        ranks.close()
