"""What the first evaluation of a process pays once, paid while weights stream; nothing here reads a weight.

    memory      the device memory of one evaluation, taken in one piece and left to torch's allocator
    products    the matrix products of a block at the request's rows: handles, workspaces, heuristics, kernels
    step        one evaluation of one block on zeros: all of the above, and every other kernel of a step

Each can be left out, so that its worth can be measured. Measured starts: `scripts.bench.first_step`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch.nn import functional

from loader.errors import RequestError
from loader.manifest import Manifest
from loader.torch_api import torch_dtype
from runtime.compute import Compute
from runtime.families.minimax_h3.model.adaln import ModulationTables
from runtime.families.minimax_h3.model.job import JobInput
from runtime.families.minimax_h3.model.parts import one_rank
from runtime.families.minimax_h3.model.warm_up import ZeroWeights
from runtime.families.minimax_h3.products import activation_bytes, block_products
from runtime.parallel.prepared import whole_weights
from runtime.samplers import euler_step

ITEMS = ("memory", "products", "step")


def check_items(items: Collection[str]) -> None:
    """Raises: RequestError: an item that does not exist; names it."""
    unknown = sorted(set(items) - set(ITEMS))
    if unknown:
        raise RequestError("unknown warm-up", where="warm_up", found=unknown, expected=ITEMS)


@torch.inference_mode()
def warm_denoiser(given: JobInput, manifest: Manifest, compute: Compute, items: Collection[str]) -> None:
    """Queue the items that are asked for; the device is not waited for, since the request follows on the same stream.

    Needs, until the device is done, the memory of one evaluation and of the weights of one block and the prelude.
    """
    check_items(items)
    rows, config = given.sequence.num_rows, given.config.transformer
    dtype, device = torch_dtype(str(manifest.model["dtype"])), torch.device(compute.device)
    if "memory" in items:
        torch.empty(activation_bytes(config, rows, dtype.itemsize), dtype=torch.uint8, device=device)
    if "products" in items:
        for width, inner in block_products(config):
            weight = torch.zeros(width, inner, dtype=dtype, device=device)
            functional.linear(torch.zeros(rows, inner, dtype=dtype, device=device), weight)
    if "step" in items:
        _step_on_zeros(given, manifest, compute, dtype)


def _step_on_zeros(given: JobInput, manifest: Manifest, compute: Compute, dtype: torch.dtype) -> None:
    """The first evaluation of a transformer of one layer, and the sampler's update."""
    config, sequence, device = given.config, given.sequence, compute.device
    short = dataclasses.replace(config, transformer=dataclasses.replace(config.transformer, num_layers=1))
    weights = whole_weights(ZeroWeights(manifest, device), manifest)
    tables = ModulationTables(weights, given.table_key, given.condition_index)
    transformer = one_rank(compute).transformer(short, weights, tables)
    transformer.begin(
        torch.zeros(sequence.num_text, config.transformer.hidden_size, dtype=dtype, device=device), sequence
    )

    def zeros(count: int, width: int) -> torch.Tensor:
        return torch.zeros(count, width, device=device)

    video = zeros(sequence.num_condition + sequence.num_video, config.transformer.video_row_dim)
    audio = zeros(sequence.num_audio, config.transformer.audio_in_channels)
    velocity = transformer.forward(video, audio, 0)
    sigma, after = given.schedule.video_sigmas[:2]
    for latents, change in ((video[sequence.num_condition :], velocity.video), (audio, velocity.audio)):
        euler_step(latents, change, given.schedule.video_timesteps[0], sigma, after)
