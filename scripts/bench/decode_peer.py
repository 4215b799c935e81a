"""The peer of `scripts.bench.decode`: diffusers 0.42.1's tiled decode and its `encode_video`, with the same weights."""

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

from runtime.families.minimax_h3.config import VideoVAEConfig
from scripts.bench.decode_weights import RandomDecoderWeights

# Modules that `from_pretrained(torch_dtype=…)` leaves in float32 (the class's own list).
_PINNED = ("norm1", "norm2", "norm_out", "scale1", "scale2")


def build_peer(weights: RandomDecoderWeights, dtype: torch.dtype) -> Any:
    """AutoencoderKLMiniMaxH3 on the device as a pipeline in `dtype` holds it; its encoder is as small as it goes."""
    from diffusers import AutoencoderKLMiniMaxH3

    config = {
        field.name: getattr(weights.config.video_vae, field.name)
        for field in dataclasses.fields(VideoVAEConfig)
    }
    levels = len(config["block_out_channels"])
    config |= {"block_out_channels": (4,) * levels, "norm_num_groups": 2, "layers_per_block": 1}
    with torch.device(weights.device), torch.no_grad():
        peer = AutoencoderKLMiniMaxH3(**config)  # type: ignore[no-untyped-call]
    state = _published_names(weights)
    for name, parameter in peer.named_parameters():
        if name in state:
            value = state[name]
            parameter.data = value if any(pin in name for pin in _PINNED) else value.to(dtype)
    missing = [
        name for name, _ in peer.named_parameters() if name.startswith("decoder.") and name not in state
    ]
    if missing:
        raise RuntimeError(f"weights without a value: {missing}")
    return peer.requires_grad_(False).eval()


def run_peer(
    peer: Any, latents: Tensor, audio: Tensor, fps: int, sample_rate: int, output: Path
) -> dict[str, float]:
    """From latents to a complete file as the pipeline's decode step and the documented next line do it.

    Args: latents: [C, T, h, w] normalised. audio: [2, samples] on the CPU.
    Returns: seconds: `decode` (device finished), `postprocess` (pictures on the host), `encode`, `total`.
    """
    from diffusers.utils import encode_video
    from diffusers.video_processor import VideoProcessor

    device = latents.device
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    mean, std, pixel_mean, pixel_std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
        for values in (
            peer.config.latents_mean,
            peer.config.latents_std,
            (0.485, 0.456, 0.406),
            (0.229, 0.224, 0.225),
        )
    )
    with torch.no_grad():
        video = peer.decode(latents[None] * std + mean, return_dict=False)[0]
        video = (video.float() * pixel_std + pixel_mean).clamp(0, 1)
    synchronize()
    decoded = time.perf_counter()
    pictures = VideoProcessor(do_normalize=False).postprocess_video(video, output_type="pil")[0]
    posted = time.perf_counter()
    encode_video(pictures, fps, str(output), audio=audio, audio_sample_rate=sample_rate)
    end = time.perf_counter()
    return {
        "decode": decoded - start,
        "postprocess": posted - decoded,
        "encode": end - posted,
        "total": end - start,
    }


def measure_peer(
    weights: RandomDecoderWeights, latents: Tensor, audio: Tensor, fps: int, sample_rate: int
) -> dict[str, Any]:
    """bfloat16 as the published pipeline is loaded: one short run to warm up, then the clip."""
    if latents.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    peer = build_peer(weights, torch.bfloat16)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    peer.decoder.register_forward_pre_hook(count)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "peer.mp4"
        run_peer(peer, latents[:, :7], audio, fps, sample_rate, output)
        calls = 0
        seconds = run_peer(peer, latents, audio, fps, sample_rate, output)
        size = os.stat(output).st_size  # noqa: PTH116 (one number)
    peak = torch.cuda.max_memory_allocated() if latents.device.type == "cuda" else 0
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
