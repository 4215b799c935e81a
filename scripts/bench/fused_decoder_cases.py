"""Cases of the video decoder's operators, float16 beside float32, at one unit of 1344x768 (28 tiles of 1,797 tokens)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cubin import Kernel, KernelSet
from runtime.ops.decoder import EAGER
from runtime.ops.fused_decoder import FusedDecoderOperators
from scripts.bench.fused_cases import Case, Inputs

TOKENS, TILES = 1797, 28
WIDTH, HEADS, K, ROTATED, INNER = 2048, 32, 64, 48, 8192


class OnlyFused(FusedDecoderOperators):
    """Refuses to run eagerly instead of doing so silently."""

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__(kernels)
        self.fallbacks: dict[str, str] = {}  # stays empty

    def _find(self, operator: str, constants: tuple[int, ...], operand: Tensor) -> Kernel | None:
        kernel = super()._find(operator, constants, operand)
        assert kernel is not None, f"no kernel {operator} {constants} for {operand.dtype}"
        return kernel


@dataclass(frozen=True)
class DecoderCase(Case):
    """Rows are tokens of all tiles together; a row count that is no number of whole tiles is one tile."""

    check_rows: tuple[int, ...] = (1, 63, 2 * TOKENS)
    timed_rows: tuple[int, ...] = (TILES * TOKENS,)

    @property
    def eager(self) -> Any:
        return EAGER

    def fused(self, kernels: KernelSet) -> Any:
        return OnlyFused(kernels)


def _randn(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype)


def _grid(rows: int) -> tuple[int, int]:
    """Tiles, tokens of a tile."""
    return (rows // TOKENS, TOKENS) if rows % TOKENS == 0 else (1, rows)


def _rotation(rows: int, generator: torch.Generator) -> Inputs:
    tiles, tokens = _grid(rows)
    angles = torch.rand(tokens, 1, ROTATED // 2, generator=generator, device=generator.device) * 6.28
    angles = angles.tile(2)
    return {
        "qkv": _randn(generator, tiles, tokens, 3 * HEADS * K),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "num_heads": HEADS,
        "eps": 1e-5,
    }


def _residual(rows: int, generator: torch.Generator) -> Inputs:
    shape = (*_grid(rows), WIDTH)
    return {
        "hidden": _randn(generator, *shape, dtype=torch.float32),
        "update": _randn(generator, *shape),
        "scale": 0.2 * _randn(generator, WIDTH, dtype=torch.float32),
        "weight": 1 + 0.1 * _randn(generator, WIDTH, dtype=torch.float32),
        "eps": 1e-5,
    }


def _swiglu(rows: int, generator: torch.Generator) -> Inputs:
    return {"inner": 2 * _randn(generator, *_grid(rows), 2 * INNER)}


_CASES = (
    # Angles are read once for all tiles and stay in the cache.
    DecoderCase("decoder_rotation", "rotated_qkv", 4 * HEADS * K * 2, _rotation, kernel="decoder_qk_norm_rope"),
    DecoderCase("decoder_residual_norm", "residual_norm", WIDTH * (8 + 4), _residual, kernel="decoder_residual_norm"),
    DecoderCase("decoder_swiglu", "swiglu", 3 * INNER * 2, _swiglu, kernel="decoder_swiglu"),
)  # fmt: skip
DECODER_CASES: Mapping[str, Case] = {case.name: case for case in _CASES}
