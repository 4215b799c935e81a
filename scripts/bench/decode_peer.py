"""The peer of `scripts.bench.decode`: diffusers 0.42.1's decode steps and its `encode_video`, with the same weights."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.families.minimax_h3.config import AudioVAEConfig, VideoVAEConfig
from scripts.bench.decode_weights import RandomDecoderWeights

# Modules that `from_pretrained(torch_dtype=…)` leaves in float32 (the class's own list).
_PINNED = ("norm1", "norm2", "norm_out", "scale1", "scale2")


def build_peer(weights: RandomDecoderWeights, dtype: torch.dtype) -> Any:
    """AutoencoderKLMiniMaxH3 on the device as a pipeline in `dtype` holds it; its encoder is as small as it goes."""
    from diffusers import AutoencoderKLMiniMaxH3

    config = _fields(weights.config.video_vae)
    levels = len(config["block_out_channels"])
    config |= {"block_out_channels": (4,) * levels, "norm_num_groups": 2, "layers_per_block": 1}
    with torch.device(weights.device), torch.no_grad():
        peer = AutoencoderKLMiniMaxH3(**config)  # type: ignore[no-untyped-call]
    state = _published_names(weights)
    for name, parameter in peer.named_parameters():
        if name in state:
            value = state[name]
            parameter.data = value if any(pin in name for pin in _PINNED) else value.to(dtype)
    _require_all(peer, state, ("decoder.",))
    return peer.requires_grad_(False).eval()


def build_audio_peer(weights: RandomDecoderWeights) -> Any:
    """AutoencoderKLMiniMaxH3Audio on the device, float32 as it always is; its encoder is as small as it goes."""
    from diffusers import AutoencoderKLMiniMaxH3Audio

    config = _fields(weights.config.audio_vae) | {"encoder_dim": 8}
    with torch.device(weights.device), torch.no_grad():
        peer = AutoencoderKLMiniMaxH3Audio(**config)  # type: ignore[no-untyped-call]
    state = weights.tensors("audio_vae/decoder")
    for name, tensor in (*peer.named_parameters(), *peer.named_buffers()):
        if name in state:
            tensor.data = state[name]
    _require_all(peer, state, ("decoder.", "dec_in_proj."))
    return peer.requires_grad_(False).eval()


def _fields(config: VideoVAEConfig | AudioVAEConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _require_all(peer: Any, state: Mapping[str, Tensor], prefixes: tuple[str, ...]) -> None:
    missing = [name for name, _ in peer.named_parameters() if name.startswith(prefixes) and name not in state]
    if missing:
        raise RuntimeError(f"weights without a value: {missing}")


class Peer:
    """Both autoencoders, and the steps from the last denoised latents to a complete file."""

    def __init__(self, weights: RandomDecoderWeights, dtype: torch.dtype) -> None:
        self.video = build_peer(weights, dtype)
        self.audio = build_audio_peer(weights)
        self.device = torch.device(weights.device)

    def run(self, video: Tensor, audio: Tensor, fps: int, sample_rate: int, output: Path) -> dict[str, float]:
        """As the pipeline's decode steps and the documented next line do it.

        Args: video: [C, T, h, w], audio: [2, C, T], both normalised.
        Returns: seconds: `decode` (device finished), `postprocess` (pictures on the host), `audio` (samples on the
            host), `encode`, `total`.
        """
        from diffusers.utils import encode_video
        from diffusers.video_processor import VideoProcessor

        marks = [self._now()]
        with torch.no_grad():
            pixels = self._pixels(video)
            marks.append(self._now())
            pictures = VideoProcessor(do_normalize=False).postprocess_video(pixels, output_type="pil")[0]
            marks.append(self._now())
            sound = self._sound(audio)
        marks.append(self._now())
        encode_video(pictures, fps, str(output), audio=sound, audio_sample_rate=sample_rate)
        marks.append(self._now())
        parts = ("decode", "postprocess", "audio", "encode")
        seconds = {name: end - start for name, start, end in zip(parts, marks, marks[1:], strict=False)}
        return {**seconds, "total": marks[-1] - marks[0]}

    def _pixels(self, latents: Tensor) -> Tensor:
        """[1, 3, F, H, W] float32 in [0, 1]"""
        config = self.video.config
        mean, std, pixel_mean, pixel_std = (
            torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1)
            for values in (
                config.latents_mean,
                config.latents_std,
                (0.485, 0.456, 0.406),
                (0.229, 0.224, 0.225),
            )
        )
        video = self.video.decode(latents[None] * std + mean, return_dict=False)[0]
        return (video.float() * pixel_std + pixel_mean).clamp(0, 1)

    def _sound(self, latents: Tensor) -> Tensor:
        """[2, samples] on the CPU"""
        config = self.audio.config
        mean, std = (
            torch.tensor(values, device=self.device).view(1, -1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        samples: Tensor = self.audio.decode(latents * std + mean, return_dict=False)[0]
        return samples.float()[:, 0].cpu()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def measure_peer(
    weights: RandomDecoderWeights, video: Tensor, audio: Tensor, fps: int, sample_rate: int
) -> dict[str, Any]:
    """bfloat16 as the published pipeline is loaded: one short run to warm up, then the clip."""
    if video.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    peer = Peer(weights, torch.bfloat16)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    peer.video.decoder.register_forward_pre_hook(count)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "peer.mp4"
        peer.run(video[:, :7], audio[..., :36], fps, sample_rate, output)
        calls = 0
        seconds = peer.run(video, audio, fps, sample_rate, output)
        size = os.stat(output).st_size  # noqa: PTH116 (one number)
    peak = torch.cuda.max_memory_allocated() if video.device.type == "cuda" else 0
    return {
        "dtype": "bfloat16",
        "decoder_calls": calls,
        "seconds": seconds,
        "file_bytes": size,
        "peak_gpu_gib": round(peak / 2**30, 2),
    }


def _published_names(weights: RandomDecoderWeights) -> Mapping[str, Tensor]:
    """The video decoder's tensors with q, k and v apart."""
    state: dict[str, Tensor] = {}
    for group in weights.names:
        if not group.startswith("vae/decoder"):
            continue
        for name, tensor in weights.tensors(group).items():
            if ".attn.to_qkv." in name:
                for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                    state[name.replace("to_qkv", f"to_{part}")] = piece
            else:
                state[name] = tensor
    return state
