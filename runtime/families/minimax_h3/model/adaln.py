"""AdaLN: from a timestep to modulation rows, and the prepared tables that replace the projections.

No AdaLN input depends on a request, so prepare evaluates every projection once per step schedule (`plan_timesteps`,
`adaln_input`, `project`, `block_rows`, `final_rows`) and a worker only looks rows up (`ModulationTables`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from loader.errors import InternalError
from runtime.families.minimax_h3.config import (
    CONDITION_TIMESTEP,
    TAG_AUDIO,
    TAG_TEXT,
    TAG_VIDEO,
    TransformerConfig,
)
from runtime.weights import WeightSource

# Term order of the six modulation vectors of a block.
SHIFT_ATTN, SCALE_ATTN, GATE_ATTN, SHIFT_MLP, SCALE_MLP, GATE_MLP = range(6)
# Streams of the final table, and its two vectors.
FINAL_VIDEO, FINAL_AUDIO = 0, 1
FINAL_SHIFT, FINAL_SCALE = 0, 1

_NUM_TAGS, _NUM_TERMS = 3, 6
# Output features per float64 product: 8192 x 2688 doubles are 176 MB.
_FEATURES_PER_PRODUCT = 8192

ProjectionMode = Literal["canonical", "match"]


@dataclass(frozen=True)
class TimestepPlan:
    """Timesteps of one evaluation.

    timesteps: sorted distinct values, each exactly representable in float32; M of them.
    video, audio, condition: index into `timesteps` for target video and text rows, target audio rows, keyframe
    rows (None without keyframes).
    """

    timesteps: tuple[float, ...]
    video: int
    audio: int
    condition: int | None


class StepModulation(NamedTuple):
    """Modulation rows of one evaluation. R = 3 row kinds (`packing.KIND_*`), or 4 with keyframes.

    blocks: [L, R, 6, D] stored dtype. final: [2, 2, D], (video, audio) x (shift, scale).
    """

    blocks: Tensor
    final: Tensor


def plan_timesteps(
    video_timesteps: Sequence[float], audio_timesteps: Sequence[float], *, has_condition: bool
) -> tuple[TimestepPlan, ...]:
    """One plan per evaluation. Values are compared as float32, never as decimals.

    Keyframe rows stay at max(video timestep, 0.999); when the two meet they are one entry.
    Source: diffusers 0.42.1, minimax_h3 before_denoise.
    """
    if len(video_timesteps) != len(audio_timesteps):
        raise InternalError(
            "video and audio timesteps differ in number",
            where="plan_timesteps",
            found=f"{len(video_timesteps)} and {len(audio_timesteps)}",
        )
    return tuple(
        _plan(_as_float32(video), _as_float32(audio), has_condition)
        for video, audio in zip(video_timesteps, audio_timesteps, strict=True)
    )


def _plan(video: float, audio: float, has_condition: bool) -> TimestepPlan:
    condition = max(video, _as_float32(CONDITION_TIMESTEP)) if has_condition else None
    values = sorted({video, audio} | ({condition} if condition is not None else set()))
    return TimestepPlan(
        timesteps=tuple(values),
        video=values.index(video),
        audio=values.index(audio),
        condition=None if condition is None else values.index(condition),
    )


def _as_float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def timestep_embedding(timesteps: Tensor, weights: Mapping[str, Tensor], config: TransformerConfig) -> Tensor:
    """Sinusoidal features of each timestep through the two-layer time embedder.

    Args:
        timesteps: [M] fp32 in [0, 1], not scaled by 1000.
        weights: holds `time_embedder.linear_1.*` and `time_embedder.linear_2.*`, fp32.
    Returns: [M, time_embed_dim] fp32.
    Source: diffusers 0.42.1, transformer_minimax_h3; cosine half first.
    """
    half = config.freq_dim // 2
    exponent = -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    angles = timesteps.float()[:, None] * torch.exp(exponent)  # [M, freq_dim / 2]
    features = torch.cat((angles.cos(), angles.sin()), dim=-1)
    hidden = functional.linear(
        features, weights["time_embedder.linear_1.weight"], weights["time_embedder.linear_1.bias"]
    )
    return functional.linear(
        functional.silu(hidden),
        weights["time_embedder.linear_2.weight"],
        weights["time_embedder.linear_2.bias"],
    )


def adaln_input(temb: Tensor, dtype: torch.dtype) -> Tensor:
    """What every AdaLN projection reads: silu in fp32, then one rounding to the projections' dtype.

    Rounding before the activation would bias all blocks at every step in the same direction.
    """
    return functional.silu(temb.float()).to(dtype)


def project(a: Tensor, weight: Tensor, bias: Tensor, mode: ProjectionMode) -> Tensor:
    """`a @ weight.T + bias` for the tables: [M, K] x [out, K] -> [M, out] in the dtype of `weight`.

    "canonical": the exact sum of products of the stored operands, rounded to float64 and then once to the stored
    dtype. The bytes depend on neither the machine, nor the BLAS, nor M; the weight's conversion to float64 dominates,
    so give all timesteps of a schedule at once.
    "match": one `linear`, bit-equal to the live projection with this M on this device.
    """
    if mode == "match":
        return functional.linear(a, weight, bias)
    out = torch.empty(a.shape[0], weight.shape[0], dtype=weight.dtype, device=weight.device)
    for start in range(0, weight.shape[0], _FEATURES_PER_PRODUCT):
        rows = slice(start, start + _FEATURES_PER_PRODUCT)
        out[:, rows] = _project_exactly(a.double(), weight[rows].double(), bias[rows].double(), weight.dtype)
    return out


def _project_exactly(a: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, K], [out, K], [out], all float64 -> [M, out] `dtype`.

    A float64 product's last bits depend on the order of summation. Where that could change the rounded value
    (roughly one in 10^10 for bf16) the sum is taken again exactly.
    """
    total = a @ weight.T + bias
    # |error| <= (K + 2) eps (|a| . |w| + |b|), and |a| . |w| <= the product of the norms.
    size = a.norm(dim=-1)[:, None] * weight.norm(dim=-1) + bias.abs()
    error = (a.shape[-1] + 2) * torch.finfo(torch.float64).eps * size
    out = round_once(total, dtype)
    is_doubtful = round_once(total - error, dtype) != round_once(total + error, dtype)
    for row, column in (is_doubtful & total.isfinite()).nonzero().tolist():
        # Products of bf16 or fp32 values are exact in float64, so fsum's result is the correctly rounded sum.
        terms = (a[row] * weight[column]).tolist()
        exact = torch.tensor(math.fsum([*terms, bias[column].item()]), dtype=torch.float64, device=out.device)
        out[row, column] = round_once(exact, dtype)
    return out


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 -> `dtype`, to nearest, ties to even.

    torch converts float64 to bf16 through float32, which rounds twice: a value just beside the middle of two bf16
    neighbours becomes the middle first. Those are moved one float32 step back to their side.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    single = x.float()
    is_middle = (single.view(torch.int32) & 0xFFFF) == 0x8000
    side = torch.where(single.double() < x, torch.inf, -torch.inf).float()
    is_moved = is_middle & (single.double() != x)
    return torch.where(is_moved, torch.nextafter(single, side), single).to(dtype)


def block_rows(projected: Tensor, plan: TimestepPlan) -> Tensor:
    """Rows that one evaluation uses of one block's projection: [M, 18 D] -> [3, 6, D], (video, text, audio)."""
    table = projected.reshape(len(projected), _NUM_TAGS, _NUM_TERMS, -1)
    return torch.stack(
        (table[plan.video, TAG_VIDEO], table[plan.video, TAG_TEXT], table[plan.audio, TAG_AUDIO])
    )


def condition_rows(projected: Tensor, plan: TimestepPlan) -> Tensor:
    """The keyframe row of one block's projection: [M, 18 D] -> [6, D]; `plan` has a condition timestep."""
    assert plan.condition is not None
    return projected.reshape(len(projected), _NUM_TAGS, _NUM_TERMS, -1)[plan.condition, TAG_VIDEO]


def final_rows(projected: Tensor, plan: TimestepPlan) -> Tensor:
    """Rows of the final projection: [M, 2 D] -> [2, 2, D], (video, audio) x (shift, scale)."""
    table = projected.reshape(len(projected), 2, -1)
    return torch.stack((table[plan.video], table[plan.audio]))


@dataclass(frozen=True)
class ModulationTables:
    """Prepared modulation tables of one schedule and task.

    key: `"<schedule>.<task>"`. condition_index: evaluation -> row of `condition.blocks`; None without keyframes.
    """

    weights: WeightSource
    key: str
    condition_index: tuple[int, ...] | None = None

    def step(self, evaluation: int) -> StepModulation:
        """Rows of one evaluation; waits for that evaluation's group (after the condition group) only."""
        name, rows = f"step.{evaluation:03d}", self.condition_index
        condition = None if rows is None else self._condition_row(rows[evaluation])
        step = self.weights.tensors(f"adaln/{self.key}/{name}")
        blocks, final = step[f"{name}.blocks"], step[f"{name}.final"]
        if condition is not None:
            blocks = torch.cat((blocks, condition), dim=1)  # [L, 4, 6, D]
        return StepModulation(blocks, final)

    def _condition_row(self, row: int) -> Tensor:
        """[L, 1, 6, D]"""
        condition = self.weights.tensors(f"adaln/{self.key}/condition")["condition.blocks"]
        return condition[:, row : row + 1]
