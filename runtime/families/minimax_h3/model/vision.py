"""Pictures for the conditioner: pixels -> patches, and the vision tower with its DeepStack outputs.

Everything inside the tower is in merge-block order: the 2 x 2 patches that become one token are neighbours.
Callers run it under `torch.inference_mode()`. Source: transformers 5.24, qwen3_vl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from loader.errors import InternalError
from runtime.families.minimax_h3.config import H3Config, VisionConfig
from runtime.families.minimax_h3.model.weight_views import take
from runtime.families.minimax_h3.tokens import ImageSpan, resized_size
from runtime.ops.attention import Attention, attention
from runtime.ops.linear import linear
from runtime.ops.norms import layer_norm
from runtime.ops.rotary import RotaryTable, inverse_frequencies, rotary_table, rotate_wide
from runtime.weights import WeightSource

_NORM_EPS = 1e-6
_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class VisionFeatures:
    """Tokens of all pictures, one picture after the other; V merged patches in all.

    tokens: [V, text_dim], in place of the `<|image_pad|>` embeddings.
    deepstack: one [V, text_dim] per DeepStack layer, added after language layers 0, 1, ….
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]


@dataclass(frozen=True)
class VisionBlockWeights:
    """Views of one vision block. D hidden, F feed-forward width."""

    norm1: Tensor  # [D]
    norm1_bias: Tensor
    qkv: Tensor  # [3 D, D], all q rows, all k rows, all v rows
    qkv_bias: Tensor
    proj: Tensor  # [D, D]
    proj_bias: Tensor
    norm2: Tensor  # [D]
    norm2_bias: Tensor
    fc1: Tensor  # [F, D]
    fc1_bias: Tensor
    fc2: Tensor  # [D, F]
    fc2_bias: Tensor

    @classmethod
    def view(cls, tensors: Mapping[str, Tensor], prefix: str) -> VisionBlockWeights:
        modules = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")
        return cls(
            *take(tensors, prefix, [f"{name}.{part}" for name in modules for part in ("weight", "bias")])
        )


def image_patches(rgb: NDArray[np.uint8], config: H3Config) -> Tensor:
    """Patches of one picture as the tower reads them.

    Args:
        rgb: [H, W, 3] uint8. Resampled (bicubic) only if `resized_size` asks for another size.
    Returns: [gh * gw, C * T * patch * patch] fp32 in merge-block order, C = 3 channels, T = 2 equal temporal
        copies, values (x - 127.5) / 127.5 in fp32.
    Raises: InternalError: not [H, W, 3] uint8. RequestError: aspect ratio above 200.
    """
    if rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.dtype != np.uint8:
        raise InternalError(
            "not an RGB picture", where="rgb", found=f"{rgb.shape} {rgb.dtype}", expected="[H, W, 3] uint8"
        )
    height, width = resized_size(rgb.shape[1], rgb.shape[0], config)
    if (height, width) != rgb.shape[:2]:
        rgb = _resize(rgb, height, width)
    patch, merge = config.vision.patch_size, config.vision.spatial_merge_size
    # A copy on purpose: torch refuses negative strides and warns about read-only arrays.
    pixels = (torch.from_numpy(np.array(rgb, order="C")).float() - 127.5) / 127.5  # [H, W, C]
    cells = pixels.view(height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3)
    cells = cells.permute(0, 3, 1, 4, 6, 2, 5)  # [gh/m, gw/m, m, m, C, patch, patch]
    copies = cells.unsqueeze(5).expand(*cells.shape[:5], config.vision.temporal_patch_size, patch, patch)
    return copies.reshape((height // patch) * (width // patch), -1)


def _resize(rgb: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    from PIL import Image  # only pictures off the canvas grid need it

    picture: Any = Image.fromarray(rgb).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(picture, dtype=np.uint8)


def encode_images(
    config: H3Config,
    weights: WeightSource,
    patches: Sequence[Tensor],
    spans: Sequence[ImageSpan],
    device: torch.device | str,
    attention: Attention = attention,
) -> VisionFeatures:
    """Run the vision tower over all pictures; attention stays inside a picture.

    Args:
        patches: per picture [grid_h * grid_w, C * T * patch * patch] fp32 from `image_patches`.
        spans: the pictures' grids, in the same order.
    Raises: InternalError: pictures and spans disagree.
    """
    _check_patches(patches, spans)
    vision, tensors = config.vision, weights.tensors("text_encoder/visual")
    grids = [(span.grid_h, span.grid_w) for span in spans]
    weight, bias, positions = take(
        tensors, "model.visual.", ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight")
    )
    # The patch convolution has no overlap: it is a matrix over (channel, time, y, x).
    x = linear(torch.cat(list(patches)).to(device), weight.flatten(1), bias)  # [P, D]
    x = x + torch.cat([position_embedding(positions, h, w, vision) for h, w in grids]).to(x.dtype)
    angles = torch.cat([_rotary_angles(h, w, vision) for h, w in grids])
    rope = rotary_table(angles.to(x.device))
    lengths = [h * w for h, w in grids]
    deepstack = []
    for i in range(vision.depth):
        block = VisionBlockWeights.view(tensors, f"model.visual.blocks.{i}.")
        x = vision_block_forward(x, block, vision, rope, lengths, attention)
        if i in vision.deepstack_visual_indexes:
            merger = f"model.visual.deepstack_merger_list.{vision.deepstack_visual_indexes.index(i)}."
            deepstack.append(_merge(x, tensors, merger, vision, norm_after_merge=True))
    return VisionFeatures(
        _merge(x, tensors, "model.visual.merger.", vision, norm_after_merge=False), tuple(deepstack)
    )


def vision_block_forward(
    x: Tensor,
    w: VisionBlockWeights,
    config: VisionConfig,
    rope: RotaryTable,
    lengths: Sequence[int],
    attention: Attention,
) -> Tensor:
    """One pre-norm block. [P, D] -> [P, D]; `rope` fp32, applied in fp32 with one rounding."""
    n = layer_norm(x, w.norm1, w.norm1_bias, _NORM_EPS)
    q, k, v = linear(n, w.qkv, w.qkv_bias).view(len(x), 3, config.num_heads, -1).unbind(1)  # [P, H, K]
    q, k = rotate_wide(q, rope), rotate_wide(k, rope)
    pictures = zip(*(torch.split(rows, list(lengths)) for rows in (q, k, v)), strict=True)
    attended = torch.cat([attention(*picture) for picture in pictures])
    x = x + linear(attended.flatten(1), w.proj, w.proj_bias)
    n = layer_norm(x, w.norm2, w.norm2_bias, _NORM_EPS)
    hidden = functional.gelu(linear(n, w.fc1, w.fc1_bias), approximate="tanh")
    return x + linear(hidden, w.fc2, w.fc2_bias)


def position_embedding(table: Tensor, grid_h: int, grid_w: int, config: VisionConfig) -> Tensor:
    """The learned square position grid, interpolated to one picture with aligned corners.

    Args:
        table: [side * side, D].
    Returns: [grid_h * grid_w, D] fp32 in merge-block order.
    """
    side = round(config.num_position_embeddings**0.5)
    (rows, row_weights), (columns, column_weights) = (_taps(size, side) for size in (grid_h, grid_w))
    index = rows[:, None, :, None] * side + columns[None, :, None, :]  # [gh, gw, 2, 2]
    factor = row_weights[:, None, :, None] * column_weights[None, :, None, :]
    index, factor = (_merge_order(x.flatten(2), config).to(table.device) for x in (index, factor))  # [P, 4]
    return (table[index] * factor[:, :, None]).sum(1)


def _taps(size: int, side: int) -> tuple[Tensor, Tensor]:
    """The two neighbours in a `side`-long axis of each of `size` points, and their weights: [size, 2] each."""
    place = torch.arange(size, dtype=torch.float32) * (side - 1) / max(size - 1, 1)
    low = place.floor()
    offsets = torch.tensor([0.0, 1.0])
    weights = (1 - (place[:, None] - low[:, None] - offsets).abs()).clamp(min=0)
    return (low.long()[:, None] + offsets.long()).clamp(max=side - 1), weights


def _rotary_angles(grid_h: int, grid_w: int, config: VisionConfig) -> Tensor:
    """[grid_h * grid_w, K/2] fp32 in merge-block order: K/4 angles of the row, then K/4 of the column."""
    frequencies = inverse_frequencies(config.hidden_size // config.num_heads // 4, _ROPE_THETA)
    rows, columns = torch.meshgrid(torch.arange(grid_h), torch.arange(grid_w), indexing="ij")
    places = _merge_order(torch.stack((rows, columns), dim=-1), config)  # [P, 2]
    return (places.float()[:, :, None] * frequencies).flatten(1)


def _merge_order(grid: Tensor, config: VisionConfig) -> Tensor:
    """[gh, gw, X] raster -> [gh * gw, X] in merge-block order."""
    merge = config.spatial_merge_size
    height, width, last = grid.shape
    cells = grid.reshape(height // merge, merge, width // merge, merge, last)
    return cells.transpose(1, 2).reshape(height * width, last)


def _merge(
    x: Tensor, tensors: Mapping[str, Tensor], prefix: str, config: VisionConfig, *, norm_after_merge: bool
) -> Tensor:
    """Merge 2 x 2 patches into one token of the language model. [P, D] -> [P / 4, text_dim]."""
    modules = ("norm", "linear_fc1", "linear_fc2")
    norm, norm_bias, fc1, fc1_bias, fc2, fc2_bias = take(
        tensors, prefix, [f"{name}.{part}" for name in modules for part in ("weight", "bias")]
    )
    width = x.shape[-1] * config.spatial_merge_size**2
    if norm_after_merge:
        x = layer_norm(x.reshape(-1, width), norm, norm_bias, _NORM_EPS)
    else:
        x = layer_norm(x, norm, norm_bias, _NORM_EPS).reshape(-1, width)
    return linear(functional.gelu(linear(x, fc1, fc1_bias)), fc2, fc2_bias)


def _check_patches(patches: Sequence[Tensor], spans: Sequence[ImageSpan]) -> None:
    found = [len(rows) for rows in patches]
    expected = [span.grid_h * span.grid_w for span in spans]
    if found != expected:
        raise InternalError(
            "pictures disagree with the token stream", where="patches", found=found, expected=expected
        )
