"""Inputs and byte counts of the fused operators at MiniMax-H3's sizes, for `fused_operators`.

A case's inputs are keyword arguments of a method of `kernels.ops.Operators`; the same call on `kernels.reference` is
the eager form, and with every bf16 tensor in float64 it is the exact value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.catalog import OPERATORS, Operator
from kernels.cubin import KernelSet
from kernels.ops import Operators

H, HEADS, K, F, PAIRS = 5376, 56, 128, 14336, 48  # DiT: hidden, heads, head dim, feed-forward, rotated pairs
ENCODER_H, ENCODER_HEADS, ENCODER_KV, ENCODER_F = 5120, 64, 8, 25600
KINDS = 4
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """name: of the bench's figures. method: of Operators. row_bytes: least bytes moved per row, read and written.

    make: (rows, generator) → inputs. goal_us: at the first of `timed_rows`, None where none is set. kernel: of the
    catalog; "": named as the method.
    """

    name: str
    method: str
    row_bytes: int
    make: Callable[[int, torch.Generator], Inputs]
    goal_us: float | None = None
    kernel: str = ""
    check_rows: tuple[int, ...] = (1, 63, 4722)
    timed_rows: tuple[int, ...] = (4722, 22519)

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.kernel or self.method]

    @property
    def eager(self) -> Any:
        """What has the method in plain torch."""
        return reference

    def fused(self, kernels: KernelSet) -> Any:
        """What has the method with these kernels; `fallbacks` names calls that ran eagerly."""
        return Operators(kernels)

    def run(self, operators: Any, inputs: Inputs) -> tuple[Tensor, ...]:
        result = getattr(operators, self.method)(**inputs)
        return result if isinstance(result, tuple) else (result,)

    def exact(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """float64 results; where the norm rounds is without meaning there."""
        wide = {name: _widen(value) for name, value in inputs.items()}
        if wide.get("round_before_weight"):
            wide["round_before_weight"] = False
        return self.run(self.eager, wide)


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def clone(inputs: Inputs) -> Inputs:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.bfloat16)


def _kinds(generator: torch.Generator, rows: int, kinds: int = KINDS) -> Tensor:
    """Runs of equal kinds, as in a packed sequence, in random lengths."""
    drawn = torch.randint(0, kinds, (rows,), generator=generator, device=generator.device, dtype=torch.int32)
    return drawn.sort().values.to(torch.int32)


def _modulated(rows: int, generator: torch.Generator) -> Inputs:
    table = _randn(generator, KINDS, 6, H)
    return {
        "weight": 1 + 0.1 * _randn(generator, H),
        "shift": table[:, 0],
        "scale": table[:, 1],
        "index": _kinds(generator, rows),
        "eps": 1e-5,
    }


def _norm_modulate(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": _randn(generator, rows, H), **_modulated(rows, generator)}


def _gate_residual(rows: int, generator: torch.Generator) -> Inputs:
    return {
        "residual": _randn(generator, rows, H),
        "update": _randn(generator, rows, H),
        "gate": _randn(generator, KINDS, 6, H)[:, 2],
        "index": _kinds(generator, rows),
    }


def _gate_norm_modulate(rows: int, generator: torch.Generator) -> Inputs:
    return _gate_residual(rows, generator) | _modulated(rows, generator)


def _final_norm(rows: int, generator: torch.Generator) -> Inputs:
    table = _randn(generator, 2, 2, H)
    order = torch.randperm(rows, generator=generator, device=generator.device).to(torch.int32)
    return _norm_modulate(rows, generator) | {
        "shift": table[:, 0],
        "scale": table[:, 1],
        "rows": order,
        "index": _kinds(generator, rows, 2),
    }


def _rms_norm(width: int, round_first: bool) -> Callable[[int, torch.Generator], Inputs]:
    def make(rows: int, generator: torch.Generator) -> Inputs:
        return {
            "x": _randn(generator, rows, width),
            "weight": 1 + 0.1 * _randn(generator, width),
            "eps": 1e-6 if round_first else 1e-5,
            "round_before_weight": round_first,
        }

    return make


def _qk(heads: int, kv_heads: int, pairs: int, round_first: bool) -> Callable[[int, torch.Generator], Inputs]:
    def make(rows: int, generator: torch.Generator) -> Inputs:
        angles = torch.rand(rows, pairs, generator=generator, device=generator.device) * 6.28
        return {
            "qkv": _randn(generator, rows, (heads + 2 * kv_heads) * K),
            "q_weight": 1 + 0.1 * _randn(generator, K),
            "k_weight": 1 + 0.1 * _randn(generator, K),
            "cos": angles.cos().bfloat16(),
            "sin": angles.sin().bfloat16(),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "eps": 1e-6 if round_first else 1e-5,
            "round_before_weight": round_first,
        }

    return make


def _swiglu(width: int, gate_first: bool) -> Callable[[int, torch.Generator], Inputs]:
    def make(rows: int, generator: torch.Generator) -> Inputs:
        return {"buffer": 2 * _randn(generator, rows, 2 * width), "gate_first": gate_first}

    return make


# What FlashInfer 0.7.2.post1 has for each operator; read in its sources, named with the file.
LIBRARIES: Mapping[str, str] = {
    "norm_modulate": "10.0 and 10.3 only, inside minimax_h3_bf16_pre_attention (diffusion_ops/minimax_h3.py)",
    "gate_residual": "10.0 and 10.3 only, inside minimax_h3_out_proj (jit/minimax_h3_out_proj.py)",
    "gate_norm_modulate": "none; its gated residuals are LayerNorm (norm/__init__.py)",
    "qk_norm_rope": "10.0 and 10.3 only, inside minimax_h3_bf16_pre_attention; fused_qk_rmsnorm_rope norms across heads",
    "swiglu": "silu_and_mul on every architecture: gate first, one rounding; fused with the product on 10.0 and 10.3",
    "rms_norm": "norm.rmsnorm on every architecture",
    "final_norm_modulate": "none",
    "attention": "minimax_h3_dense_attention on 9, 10 and 12 through warp-level mma (jit/cake_minimax_h3_dense_attention.py)",
    "ahead of time": "no bf16 operator of the model is in its ahead-of-time list (aot.py); all are compiled on first use",
}

_CASES = (
    Case("norm_modulate", "norm_modulate", 2 * H * 2, _norm_modulate, 30),
    Case("gate_residual", "gate_residual", 3 * H * 2, _gate_residual, 45),
    Case("gate_norm_modulate", "gate_norm_modulate", 4 * H * 2, _gate_norm_modulate, 60),
    Case(
        "qk_norm_rope",
        "qk_norm_rope",
        4 * HEADS * K * 2 + 4 * PAIRS,
        _qk(HEADS, HEADS, PAIRS, round_first=False),
        80,
    ),
    Case("swiglu", "swiglu", 3 * F * 2, _swiglu(F, gate_first=False), 120),
    Case("final_norm_modulate", "final_norm_modulate", H * (2 + 4), _final_norm),
    Case("rms_norm", "rms_norm", 2 * H * 2, _rms_norm(H, round_first=False)),
    Case("encoder_rms_norm", "rms_norm", 2 * ENCODER_H * 2, _rms_norm(ENCODER_H, round_first=True)),
    Case(
        "encoder_qk_norm_rope",
        "qk_norm_rope",
        2 * (ENCODER_HEADS + ENCODER_KV) * K * 2 + 4 * (K // 2),
        _qk(ENCODER_HEADS, ENCODER_KV, K // 2, round_first=True),
    ),
    Case("encoder_swiglu", "swiglu", 3 * ENCODER_F * 2, _swiglu(ENCODER_F, gate_first=True)),
)
CASES: Mapping[str, Case] = {case.name: case for case in _CASES}
