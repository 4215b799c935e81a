"""Random values for the tensors of a tiny checkpoint, lively enough that picture and sound are not flat.

Matrices keep the variance of what they multiply (deviation about 1 / sqrt(fan-in): 0.05 to 0.15 at tiny widths), norms
are near one, and whatever the released model initialises to zero is not zero here.
"""

from __future__ import annotations

import hashlib
import math
import re

import numpy as np

from prepare.recipe import TensorSpec

# First match wins: (pattern of the name, mean, deviation); None as deviation means 1 / sqrt(fan-in).
_RULES: tuple[tuple[re.Pattern[str], float, float | None], ...] = tuple(
    (re.compile(pattern), mean, deviation)
    for pattern, mean, deviation in (
        (r"zero_k_bias$|mask_token$", 0.0, 0.0),
        (r"adaln_proj\.linear\.bias$|norm_out\.linear\.bias$", 0.0, 0.2),
        (r"scale[12]$", 0.5, 0.1),
        (r"register_tokens$", 0.0, 0.5),
        (r"embed_tokens\.weight$", 0.0, 0.5),
        (r"pos_embed\.weight$", 0.0, 0.2),
        (r"decoder\.conv_post\.weight_g$", 0.05, 0.0),
        (r"decoder\.ups\..*weight_g$", 1.6, 0.1),
        (r"resblocks\..*weight_g$", 0.6, 0.05),
        (r"weight_g$", 1.0, 0.1),
        (r"weight_v$", 0.0, None),
        (r"\.act\.(alpha|beta)$", 0.0, 0.1),
        (r"\.alpha$", 1.0, 0.1),
        (r"bias$", 0.0, 0.05),
    )
)


def random_bits(component: str, name: str, spec: TensorSpec, seed: int) -> np.ndarray:
    """Stored form of one tensor: float32, or uint16 with the bit patterns of bfloat16."""
    values = _values(component, name, spec.shape, seed)
    return _bfloat16_bits(values) if spec.dtype == "BF16" else values


def _values(component: str, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith(".filter"):
        return kaiser_filter(shape[-1]).reshape(shape)
    if name == "rope.inv_freq":
        exponent = np.arange(0, 2 * shape[0], 2, dtype=np.float32) / np.float32(2 * shape[0])
        return (np.float32(1.0) / np.float32(10000.0) ** exponent).astype(np.float32)
    mean, deviation = _distribution(name, shape)
    digest = hashlib.sha256(f"{seed}/{component}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16])))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(deviation)
    values += np.float32(mean)
    return values


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    fan_in = math.prod(shape[1:])
    for pattern, mean, deviation in _RULES:
        if pattern.search(name):
            return mean, 1 / math.sqrt(fan_in) if deviation is None else deviation
    if len(shape) == 1:  # what is left of the vectors are norm weights
        return 1.0, 0.1
    return 0.0, 1 / math.sqrt(fan_in)


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even. The values are finite."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def kaiser_filter(num_taps: int) -> np.ndarray:
    """[num_taps] float32: the low-pass filter that the audio VAE stores at every resampler.

    Sinc with cutoff 0.25 under a Kaiser window of half width 0.3, normalised to sum 1. torch computes it because the
    stored bits are torch's. Source: diffusers 0.42.1, autoencoder_kl_minimax_h3_audio.
    """
    import torch

    cutoff, half_width = 0.25, 0.3
    attenuation = 2.285 * (num_taps // 2 - 1) * math.pi * 4 * half_width + 7.95
    window = torch.kaiser_window(num_taps, periodic=False, beta=0.1102 * (attenuation - 8.7))
    time = torch.arange(-(num_taps // 2), num_taps // 2) + 0.5
    taps = 2 * cutoff * window * torch.sinc(2 * cutoff * time)
    return (taps / taps.sum()).numpy()
