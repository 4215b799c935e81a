"""A start that computes behind its load gives the bits of one that loaded everything first, and a warm run those of a
cold one.

The reference reads the prepared files with safetensors' own loader and never meets a stream. Chunks are 4 KiB, because
a tiny component would otherwise arrive in one piece.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from loader.load_plan import plan_load
from loader.manifest import Manifest, read_manifest
from loader.options import StreamOptions
from loader.stream import WeightStream, start
from runtime.compute import Compute, choose_compute
from runtime.family import Family, Prepared, family_for
from runtime.ops.attention import attention
from runtime.pipeline import Hooks, denoise
from runtime.timeline import Timeline
from runtime.weights import WeightSource
from tests.fakes.weights import DictWeights

PAGE = 4096
REQUEST = {"prompt": "rain on a tin roof", "width": 64, "height": 64, "num_frames": 22, "seed": 11}
# Where the load pauses until compute asks for more, by task.
HOLDS = {
    "t2va": (
        "text_encoder/layers.0",
        "text_encoder/layers.17",
        "transformer/prelude",
        "adaln/base-3.t2va/step.000",
        "transformer/blocks.0",
        "transformer/blocks.2",
        "transformer/heads",
        "adaln/base-3.t2va/step.001",
        "vae/decoder.blocks.1",
        "audio_vae/decoder",
    ),
    "fl2va": ("vae/encoder", "text_encoder/layers.3", "adaln/base-3.fl2va/condition", "transformer/blocks.1"),
}
PAUSES = [(task, hold) for task, holds in HOLDS.items() for hold in holds]

Result = dict[str, Tensor]


class Watched:
    """A stream as model code sees it, and what it was asked for.

    Attributes:
        asked: groups in order. waited: those of them that were not there yet.
    """

    def __init__(self, stream: WeightStream, on_ask: Callable[[str], None] = lambda group: None) -> None:
        self.asked: list[str] = []
        self.waited: list[str] = []
        self._stream = stream
        self._on_ask = on_ask

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        self.asked.append(group)
        if not self._stream.is_ready(group):
            self.waited.append(group)
        self._on_ask(group)
        return self._stream.tensors(group)

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        return self._stream.rows(tensor, rows)

    def is_ready(self, group: str) -> bool:
        return self._stream.is_ready(group)


class Worker:
    """One prepared directory on the CPU, without the processes around it."""

    def __init__(self, bundle: Path) -> None:
        self.bundle = bundle
        self.manifest: Manifest = read_manifest(bundle)
        self.family: Family = family_for(self.manifest, bundle, "t2va", "base-3")
        self.compute = choose_compute("cpu", bundle, self.manifest.kernels)

    def prepare(self, task: str) -> Prepared:
        pictures = {"first_frame": _png((200, 30, 90))} if task == "fl2va" else {}
        prepared = self.family.prepare(self.family.parse({**REQUEST, **pictures}))
        assert prepared.order == f"{task}/base-3"
        return prepared

    def stream(self, task: str, hold: str | None = None, **options: Any) -> WeightStream:
        order = self.manifest.orders[f"{task}/base-3"]
        plan = plan_load(self.manifest, order, chunk_bytes=PAGE, hold=hold)
        return start(plan, self.bundle, options=StreamOptions(**options))

    def run(self, task: str, weights: WeightSource) -> Result:
        """One request up to pixels and samples, as copies."""
        job = self.family.start(self.prepare(task), weights, self.compute)
        job.condition()
        latents = denoise(job, Hooks(Timeline(), threading.Event()))
        decoders: Mapping[str, Any] = job.decoders()
        (samples,) = decoders["audio"].units(latents)
        frames = torch.cat(list(decoders["video"].frames(latents)))
        media = {"frames": frames, "samples": torch.from_numpy(samples)}
        return {name: tensor.clone() for name, tensor in {**latents, **media}.items()}

    def loaded(self) -> DictWeights:
        """Everything in memory, read by another library."""
        groups: dict[str, dict[str, Tensor]] = {name: {} for name in self.manifest.groups}
        tables = {}
        files = {file.path: load_file(self.bundle / file.path) for file in self.manifest.files if file.chunks}
        for record in self.manifest.tensors.values():
            local = self.manifest.local_name(record.name)
            tensor = files[self.manifest.files[record.file].path][local]
            if record.group is None:
                tables[record.name] = tensor
            else:
                groups[record.group][local] = tensor
        return DictWeights(groups, tables)


def _png(colour: tuple[int, int, int]) -> bytes:
    import io

    data = io.BytesIO()
    Image.new("RGB", (80, 60), colour).save(data, "PNG")
    return data.getvalue()


@pytest.fixture(scope="module")
def worker(bundle: Path) -> Iterator[Worker]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Worker(bundle)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded_then_run(worker: Worker) -> dict[str, Result]:
    weights = worker.loaded()
    return {task: worker.run(task, weights) for task in HOLDS}


def assert_same(found: Result, expected: Result) -> None:
    assert found.keys() == expected.keys() == {"video", "audio", "frames", "samples"}
    for name, tensor in expected.items():
        assert tensor.float().std() > 0, f"a dead {name} would agree with anything"
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("task", "hold"), PAUSES, ids=[f"{task} {hold}" for task, hold in PAUSES])
def test_nothing_behind_the_pause_is_needed_before_it_is_asked_for(
    worker: Worker, loaded_then_run: dict[str, Result], task: str, hold: str
) -> None:
    """Deterministic: the bytes from `hold` on are not even read until compute asks for some of them."""
    order = worker.manifest.orders[f"{task}/base-3"]
    behind = set(order[order.index(hold) :])
    with worker.stream(task, hold) as stream:
        weights = Watched(stream, lambda group: stream.release() if group in behind else None)
        result = worker.run(task, weights)
    assert behind.intersection(weights.waited)
    assert_same(result, loaded_then_run[task])


@pytest.mark.parametrize("task", HOLDS)
def test_groups_are_asked_for_in_the_order_in_which_they_are_loaded(worker: Worker, task: str) -> None:
    with worker.stream(task) as stream:
        weights = Watched(stream)
        worker.run(task, weights)
    assert list(dict.fromkeys(weights.asked)) == list(worker.manifest.orders[f"{task}/base-3"])


@pytest.mark.parametrize("task", HOLDS)
def test_compute_behind_a_throttled_load_gives_the_same_bits_cold_and_warm(
    worker: Worker, loaded_then_run: dict[str, Result], task: str
) -> None:
    size = plan_load(worker.manifest, worker.manifest.orders[f"{task}/base-3"]).total_bytes
    with worker.stream(task, storage_gbps=size / 1.5e9) as stream:  # 1.5 s
        cold_weights = Watched(stream)
        cold = worker.run(task, cold_weights)
        warm_weights = Watched(stream)
        warm = worker.run(task, warm_weights)
    assert len(cold_weights.waited) > 1
    assert warm_weights.waited == []
    assert warm_weights.asked == cold_weights.asked
    assert_same(cold, loaded_then_run[task])
    assert_same(warm, loaded_then_run[task])


@pytest.mark.parametrize("task", HOLDS)
def test_the_conditioners_warm_up_meets_every_kind_of_attention_call(
    worker: Worker, loaded_then_run: dict[str, Result], task: str
) -> None:
    """Beside a real run, as at a start, and without a trace in it."""
    warm: set[tuple[object, ...]] = set()
    real: set[tuple[object, ...]] = set()

    def recorder(calls: set[tuple[object, ...]]) -> Compute:
        def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            calls.add((q.shape, k.shape, q.dtype, *sorted(options.items())))
            return attention(q, k, v, **options)

        return Compute("cpu", attention, recorded)

    prepared = worker.prepare(task)
    thread = threading.Thread(
        target=worker.family.warm_up_conditioner, args=(prepared, recorder(warm)), daemon=True
    )
    worker.compute = recorder(real)
    thread.start()
    try:
        result = worker.run(task, worker.loaded())
    finally:
        thread.join()
        worker.compute = choose_compute("cpu", worker.bundle, worker.manifest.kernels)
    assert warm == real != set()
    assert_same(result, loaded_then_run[task])


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 7}, {"reader": "threads"}], ids=str)
def test_order_of_arrival_does_not_change_a_bit(
    worker: Worker, loaded_then_run: dict[str, Result], options: dict[str, Any]
) -> None:
    with worker.stream("t2va", **options) as stream:
        result = worker.run("t2va", stream)
    assert_same(result, loaded_then_run["t2va"])
