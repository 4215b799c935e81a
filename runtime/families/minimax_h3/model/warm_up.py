"""One short request on zeros: every library call of a start happens before the weights are there.

First use is expensive: on an H200 the first cuDNN attention of a process costs up to 1 s, a new length 0.06 s, the
first matrix product and norm 0.09 s, and every kernel is loaded to the device when it is first launched. The request's
own sizes are used, because attention plans belong to a length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from loader.manifest import Manifest
from loader.torch_api import torch_dtype
from runtime.compute import Compute
from runtime.families.minimax_h3.model.job import H3Job, JobInput
from runtime.schedules import Schedule
from runtime.weights import WeightSource


class ZeroWeights:
    """A WeightSource whose tensors have the manifest's names, shapes and types, and hold zeros."""

    def __init__(self, manifest: Manifest, device: str) -> None:
        self._manifest = manifest
        self._device = device
        self._groups: dict[str, dict[str, Tensor]] = {}

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        if group not in self._groups:
            records = [record for record in self._manifest.tensors.values() if record.group == group]
            self._groups[group] = {
                self._manifest.local_name(record.name): torch.zeros(
                    record.shape, dtype=torch_dtype(record.dtype), device=self._device
                )
                for record in records
            }
        return self._groups[group]

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        record = self._manifest.tensors[tensor]
        shape = (len(rows), *record.shape[1:])
        return torch.zeros(shape, dtype=torch_dtype(record.dtype), device=self._device)

    def is_ready(self, group: str) -> bool:
        return True


MakeJob = Callable[[JobInput, WeightSource], H3Job]


def run_on_zeros(given: JobInput, manifest: Manifest, compute: Compute, make_job: MakeJob) -> None:
    """Condition and take one step with one text layer and one block; nothing of it is kept.

    Needs the weights of one layer, one block and the prelude once more while it runs: 3.5 GB in the release.
    """
    job = _short_job(given, manifest, compute, make_job)
    job.condition()
    (stage,) = job.stages()
    latents = stage.start(None)
    stage.sampler(latents, stage.denoiser(latents, stage.steps[0]), stage.steps[0])
    if compute.device == "cuda":
        torch.cuda.synchronize()


def condition_on_zeros(given: JobInput, manifest: Manifest, compute: Compute, make_job: MakeJob) -> None:
    """The conditioning half of `run_on_zeros`, for a thread beside the one that builds the attention plan.

    On an H200 the first conditioner of a process took 0.5 s with all its weights there, the second 0.08 s. The device is
    not waited for: the request follows on the same stream, behind whatever else is being warmed on it.
    """
    _short_job(given, manifest, compute, make_job).condition()


def _short_job(given: JobInput, manifest: Manifest, compute: Compute, make_job: MakeJob) -> H3Job:
    config = given.config
    short = dataclasses.replace(
        config,
        transformer=dataclasses.replace(config.transformer, num_layers=1),
        text=dataclasses.replace(config.text, conditioning_layer=1),
        vision=dataclasses.replace(
            config.vision, deepstack_visual_indexes=config.vision.deepstack_visual_indexes[:1]
        ),
    )
    one_step = Schedule("warm-up", given.schedule.video_sigmas[-2:], given.schedule.audio_sigmas[-2:])
    return make_job(
        dataclasses.replace(given, config=short, schedule=one_step), ZeroWeights(manifest, compute.device)
    )
