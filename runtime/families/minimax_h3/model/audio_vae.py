"""The audio VAE's decoder: latents to a 32 kHz waveform by seven upsampling stages. Float32 only.

Every activation works at twice its input's rate, between a Kaiser-windowed upsampler and downsampler whose filters
are stored with the weights. Source: diffusers 0.42.1, autoencoder_kl_minimax_h3_audio.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.config import AudioVAEConfig
from runtime.families.minimax_h3.model.exact_convolution import exact_convolutions
from runtime.weights import WeightSource

GROUP = "audio_vae/decoder"


class AudioDecoder:
    """Decoder of one prepared directory. Weights: group `audio_vae/decoder`, waited for at the first decode."""

    def __init__(self, config: AudioVAEConfig, weights: WeightSource, device: torch.device | str) -> None:
        self.config = config
        self.device = torch.device(device)
        self._source = weights
        self._folded: dict[str, Tensor] | None = None

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Waveform of both channels, which are decoded as two mono items.

        Args:
            latents: [2, C, T] float32, normalised, on any device.
        Returns: [2, hop_length * T] float32 in [-1, 1] on the decoder's device.
        Raises: InternalError: another rank or channel count, or T = 0.
        """
        channels = self.config.latent_channels
        if latents.ndim != 3 or latents.shape[1] != channels or latents.shape[2] == 0:
            raise InternalError(
                "latents do not fit the decoder",
                where="audio decoder: latents",
                found=tuple(latents.shape),
                expected=f"[2, {channels}, T], T >= 1",
            )
        if self._folded is None:
            tensors = self._source.tensors(GROUP)
            self._folded = fold_weight_norm({k: v.to(self.device, torch.float32) for k, v in tensors.items()})
        mean, std = (
            torch.tensor(values, device=self.device).view(-1, 1)
            for values in (self.config.latents_mean, self.config.latents_std)
        )
        with exact_convolutions():
            return self._waveform(latents.to(self.device, torch.float32) * std + mean, self._folded)

    def _waveform(self, latents: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """[2, C, T] denormalised → [2, samples]."""
        hidden = F.conv1d(latents, weights["dec_in_proj.weight"], weights["dec_in_proj.bias"])
        hidden = _conv(hidden, weights, "decoder.conv_pre")
        kernels = len(self.config.resblock_kernel_sizes)
        for stage, (rate, kernel) in enumerate(
            zip(self.config.decoder_rates, self.config.decoder_kernel_sizes, strict=True)
        ):
            name = f"decoder.ups.{stage}.0"
            weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            hidden = F.conv_transpose1d(hidden, weight, bias, stride=rate, padding=(kernel - rate) // 2)
            blocks = [
                _periodic_block(hidden, weights, f"decoder.resblocks.{stage * kernels + j}", dilations)
                for j, dilations in enumerate(self.config.resblock_dilation_sizes)
            ]
            hidden = sum(blocks[1:], start=blocks[0]) / kernels
        hidden = _activation(hidden, weights, "decoder.activation_post")
        return _conv(hidden, weights, "decoder.conv_post").clamp_(-1.0, 1.0).squeeze(1)


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace every pair `x.weight_g`, `x.weight_v` by `x.weight` = g * v / ||v||, norms over all dims but the first.

    Done with torch's own operator, the one its weight norm runs before every forward, so the result has the same bits.
    """
    folded = {
        name: tensor for name, tensor in tensors.items() if not name.endswith((".weight_g", ".weight_v"))
    }
    for name, direction in tensors.items():
        if name.endswith(".weight_v"):
            module = name.removesuffix(".weight_v")
            folded[f"{module}.weight"] = torch._weight_norm(direction, tensors[f"{module}.weight_g"], 0)
    return folded


def _periodic_block(
    x: Tensor, weights: Mapping[str, Tensor], prefix: str, dilations: tuple[int, ...]
) -> Tensor:
    """Residual pairs of convolutions, the first of each pair dilated, every one behind its own activation."""
    for index, dilation in enumerate(dilations):
        hidden = _activation(x, weights, f"{prefix}.activations.{2 * index}")
        hidden = _conv(hidden, weights, f"{prefix}.convs1.{index}", dilation)
        hidden = _activation(hidden, weights, f"{prefix}.activations.{2 * index + 1}")
        x = _conv(hidden, weights, f"{prefix}.convs2.{index}") + x
    return x


def _conv(x: Tensor, weights: Mapping[str, Tensor], name: str, dilation: int = 1) -> Tensor:
    """Convolution that keeps the length, zeros outside; `conv_post` has no bias."""
    weight = weights[f"{name}.weight"]
    padding = (weight.shape[-1] - 1) * dilation // 2
    return F.conv1d(x, weight, weights.get(f"{name}.bias"), padding=padding, dilation=dilation)


def _activation(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """x + sin²(e^alpha x) / (e^beta + 1e-9) at twice the sampling rate; [B, C, L] → [B, C, L]."""
    channels = x.shape[1]
    up = weights[f"{name}.upsample.filter"]  # [1, 1, taps]
    taps = up.shape[-1]
    pad = taps // 2 - 1
    x = F.pad(x, (pad, pad), mode="replicate")
    x = 2 * F.conv_transpose1d(x, up.expand(channels, -1, -1), stride=2, groups=channels)
    x = x[..., 2 * pad + (taps - 2) // 2 : -(2 * pad + (taps - 1) // 2)]
    alpha, beta = (weights[f"{name}.act.{part}"].exp().unsqueeze(-1) for part in ("alpha", "beta"))
    x = x + (beta + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)
    down = weights[f"{name}.downsample.lowpass.filter"]
    taps = down.shape[-1]
    x = F.pad(x, ((taps - 1) // 2, taps // 2), mode="replicate")
    return F.conv1d(x, down.expand(channels, -1, -1), stride=2, groups=channels)
