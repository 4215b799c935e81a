"""Both implementations of one evaluation on one device: the same random weights, rows and timesteps.

Every weight is made on the device and exists once: where names differ, the peer's matrices are views of the fused ones.
The modulation tables are the peer's own projections, evaluated at the two timesteps of the evaluation, so the two
velocities can be compared at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loader.torch_api import torch_dtype
from prepare.families.minimax_h3.published import TRANSFORMER, published_tensors
from prepare.families.minimax_h3.recipe import build_recipe
from runtime.families.minimax_h3.canvas import audio_latents, latent_frames
from runtime.families.minimax_h3.config import TAG_TEXT, H3Config
from runtime.families.minimax_h3.model.adaln import (
    ModulationTables,
    adaln_input,
    block_rows,
    final_rows,
    plan_timesteps,
    project,
    timestep_embedding,
)
from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.families.minimax_h3.model.transformer import BlockForward, Transformer, Velocity
from runtime.families.minimax_h3.packing import KIND_AUDIO, PackedSequence, pack
from runtime.ops.attention import Attention

_KEY, _STEP = "bench.t2va", "step.000"
_VIDEO, _AUDIO = 0.3, 0.55  # timesteps of the evaluation


class RandomWeights:
    """A `runtime.weights.WeightSource` of the whole transformer, and `published`: the same by Diffusers names.

    Args:
        dtype: `"BF16"` or `"F32"`, type of the matrices. with_projections: also those that the tables replace (26 GB at
            the released size); without, tables are random.
    """

    def __init__(self, config: H3Config, device: str, dtype: str, with_projections: bool) -> None:
        self._device = device
        self.published: dict[str, Tensor] = {}
        self._groups: dict[str, dict[str, Tensor]] = {}
        for group in build_recipe(config, "diffusers", ("t2va",), dtype).groups:
            if group.component == TRANSFORMER and group.name is not None:
                self._groups[group.name] = {
                    tensor.name: self._split(self._random(tensor.spec.dtype, tensor.spec.shape), tensor.parts)
                    for tensor in group.tensors
                }
        if with_projections:
            specs = published_tensors(config)[TRANSFORMER]
            for name in specs.keys() - self.published.keys():
                stored = dtype if specs[name].dtype == "BF16" else "F32"
                self.published[name] = self._random(stored, specs[name].shape)
            self._groups[f"adaln/{_KEY}/{_STEP}"] = self._tables(config)
        else:
            c = config.transformer
            shapes = {"blocks": (c.num_layers, 3, 6, c.hidden_size), "final": (2, 2, c.hidden_size)}
            self._groups[f"adaln/{_KEY}/{_STEP}"] = {
                f"{_STEP}.{name}": self._random(dtype, shape) for name, shape in shapes.items()
            }

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        return self._groups[group]

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        raise KeyError(tensor)

    def is_ready(self, group: str) -> bool:
        return True

    def _random(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        empty = torch.empty(shape, dtype=torch_dtype(dtype), device=self._device)
        return empty.fill_(1.0) if len(shape) == 1 else empty.normal_(0, 0.02)

    def _split(self, tensor: Tensor, parts: Sequence[Any]) -> Tensor:
        start = 0
        for part in parts:
            self.published[part.tensor] = tensor[start : start + part.stop - part.start]
            start += part.stop - part.start
        return tensor

    def _tables(self, config: H3Config) -> dict[str, Tensor]:
        """What prepare computes in mode `match`, on this device."""
        (plan,) = plan_timesteps([_VIDEO], [_AUDIO], has_condition=False)
        steps = torch.tensor(plan.timesteps, dtype=torch.float32, device=self._device)
        embedding = timestep_embedding(steps, self.published, config.transformer)

        def projected(linear: str) -> Tensor:
            weight, bias = self.published[f"{linear}.weight"], self.published[f"{linear}.bias"]
            return project(adaln_input(embedding, weight.dtype), weight, bias, "match")

        layers = range(config.transformer.num_layers)
        blocks = [block_rows(projected(f"transformer_blocks.{i}.adaln_proj.linear"), plan) for i in layers]
        return {
            f"{_STEP}.blocks": torch.stack(blocks),
            f"{_STEP}.final": final_rows(projected("norm_out.linear"), plan),
        }


class Evaluation(NamedTuple):
    """Inputs of one evaluation, for both. prompt_embeds: [N, text_dim]; video, audio: float32 rows."""

    sequence: PackedSequence
    prompt_embeds: Tensor
    video: Tensor
    audio: Tensor


def make_evaluation(
    config: H3Config, device: str, dtype: torch.dtype, tokens: int, size: str, num_frames: int
) -> Evaluation:
    """A text-to-video request of `tokens` prompt tokens at `size` (WIDTHxHEIGHT)."""
    width, height = (int(side) // 16 for side in size.split("x"))
    shape = (latent_frames(num_frames), height, width)
    sequence = pack(config, [TAG_TEXT] * tokens, shape, audio_latents(num_frames))
    c = config.transformer
    generator = torch.Generator(device).manual_seed(0)

    def normal(count: int, channels: int) -> Tensor:
        return torch.randn(count, channels, generator=generator, device=device)

    return Evaluation(
        sequence,
        normal(tokens, c.text_dim).to(dtype),
        normal(sequence.num_video, c.video_row_dim),
        normal(sequence.num_audio, c.audio_in_channels),
    )


def own_step(
    config: H3Config, weights: RandomWeights, given: Evaluation, attention: Attention, block: BlockForward
) -> Callable[[], Velocity]:
    """One evaluation of this project's transformer; its text is refined once, as in a request."""
    transformer = Transformer(config, weights, ModulationTables(weights, _KEY), attention, block)
    transformer.begin(refine_text(config, weights, given.prompt_embeds), given.sequence)
    return lambda: transformer.forward(given.video, given.audio, 0)


def peer_model(config: H3Config, weights: RandomWeights, device: str) -> Any:
    """diffusers' transformer over the same memory, as `from_pretrained` in bf16 leaves it."""
    from diffusers import MiniMaxH3Transformer3DModel

    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**asdict(config.transformer))
    model.load_state_dict(weights.published, strict=True, assign=True)
    c = config.transformer
    exponents = torch.arange(0, 2 * c.rope_freq_dim, 2, dtype=torch.float32) / (2 * c.rope_freq_dim)
    model.rope.inv_freq = (1.0 / c.rope_theta**exponents).to(device)
    unplaced = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not unplaced, unplaced
    return model.eval()


def peer_step(model: Any, given: Evaluation) -> Callable[[], Velocity]:
    """One forward of diffusers' transformer with the same inputs."""
    (plan,) = plan_timesteps([_VIDEO], [_AUDIO], has_condition=False)
    rows, device = given.sequence, given.video.device
    every = torch.arange(rows.num_rows, device=device)
    is_audio = torch.from_numpy(rows.modulation_index == KIND_AUDIO)
    inputs = {
        "hidden_states": given.video[None],
        "audio_hidden_states": given.audio[None],
        "encoder_hidden_states": given.prompt_embeds[None],
        "timestep": torch.tensor(plan.timesteps, device=device),
        "timestep_indices": torch.where(is_audio, plan.audio, plan.video).to(device),
        "token_tags": torch.from_numpy(rows.token_tags).to(device),
        "position_ids": torch.from_numpy(rows.position_ids).to(device),
        "video_indices": every[rows.video],
        "audio_indices": every[rows.audio],
        "text_indices": every[rows.text],
    }

    def step() -> Velocity:
        video, audio = model(**inputs, return_dict=False)
        return Velocity(video[0], audio[0])

    return step
