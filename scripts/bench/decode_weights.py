"""Random weights of released size for both decoders, made on the device group by group when they are asked for.

Nothing is read from a file. The video decoder's last layer paints smooth patterns, so that pictures have the statistics
of pictures: noise would make the encoder the bottleneck of any bench.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from prepare.families.minimax_h3.recipe import build_recipe
from prepare.recipe import OutputTensor
from runtime.families.minimax_h3.config import H3Config

_HALF = (".attn.to_qkv.", ".attn.to_out.0.", ".ff.net.0.proj.", ".ff.net.2.", "post_quant_conv.")


class RandomDecoderWeights:
    """A `runtime.weights.WeightSource` of `vae/decoder.*` and `audio_vae/decoder`. The same seed gives the same values
    in both dtypes, rounded.

    Args:
        linears: dtype of the tensors that the fast path multiplies in float16; all others are float32.
    """

    def __init__(self, config: H3Config, device: str, linears: torch.dtype, seed: int = 0) -> None:
        self.config, self.device, self.linears, self.seed = config, device, linears, seed
        recipe = build_recipe(config, "diffusers", ("t2va",), "F32")
        self._groups = {
            group.name: group.tensors for group in recipe.groups if group.name and "vae/" in group.name
        }
        self._made: dict[str, dict[str, Tensor]] = {}

    @property
    def names(self) -> Sequence[str]:
        return list(self._groups)

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        if group not in self._made:
            self._made[group] = {output.name: self._tensor(output) for output in self._groups[group]}
        return self._made[group]

    def rows(self, tensor: str, rows: Sequence[int]) -> Tensor:
        raise KeyError(tensor)

    def is_ready(self, group: str) -> bool:
        return group in self._groups

    def _tensor(self, output: OutputTensor) -> Tensor:
        name, shape = output.name, output.spec.shape
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:6], "big"))
        values = self._values(name, shape, generator)
        return values.to(self.linears) if any(part in name for part in _HALF) else values

    def _values(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        def normal(deviation: float) -> Tensor:
            return torch.empty(shape, device=self.device).normal_(0, deviation, generator=generator)

        if name == "decoder.proj_out.weight":
            return self._smooth_patches(shape, generator)
        if name.endswith(".filter"):
            window = torch.hann_window(shape[-1], periodic=False, device=self.device) + 0.01
            return (window / window.sum()).expand(shape).contiguous()
        if "norm" in name and name.endswith(".weight"):
            return torch.ones(shape, device=self.device)
        if name.endswith("weight_g"):
            return torch.full(shape, 0.5, device=self.device)
        if name.endswith(("alpha", "beta")):
            return torch.zeros(shape, device=self.device)
        if ".scale" in name:
            return normal(0.2)
        if name.endswith(".bias"):
            return normal(0.01)
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else shape[0]
        return normal(1 / math.sqrt(max(fan_in, 1)))

    def _smooth_patches(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """[3 * 4 * 16 * 16, D]: every channel of the width paints one mixture of four low frequencies."""
        vae = self.config.video_vae
        time, space = vae.temporal_ratio, vae.spatial_ratio
        axis = torch.linspace(0, math.pi, space, device=self.device)
        waves = torch.stack([torch.ones_like(axis), axis.cos()])
        patterns = torch.einsum("ay,bx->abyx", waves, waves).flatten(0, 1)  # [4, y, x]
        mixture = torch.empty(vae.out_channels, time, 4, shape[1], device=self.device)
        mixture.normal_(0, 0.3 / math.sqrt(shape[1]), generator=generator)
        return torch.einsum("ctpd,pyx->ctyxd", mixture, patterns).reshape(shape)
