"""The video VAE's decoder network: a transformer that sees one unit of one tile, all latents against all.

Knows nothing of tiles beside it or units before it (`video_decoder.py` puts them together). Two precision recipes:

    fp32          everything float32; the reference
    fp16_linears  weights and inputs of the block linears and of `post_quant_conv`, and attention, float16; residual
                  stream, norms, rotation, scales, `proj_in` and `proj_out` float32

The residual stream reaches values that float16 cannot hold (C60), hence never a float16 residual. Source: diffusers
0.42.1, autoencoder_kl_minimax_h3. Symbols: B tiles, N tokens of a tile with the extra ones, D width, H heads, K head
dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.config import VideoVAEConfig
from runtime.families.minimax_h3.model.exact_convolution import exact_convolutions
from runtime.ops.decoder import EAGER, DecoderOperators
from runtime.ops.tile_attention import TileAttention
from runtime.weights import WeightSource

Precision = Literal["fp32", "fp16_linears"]
COMPUTE_DTYPES = {"fp32": torch.float32, "fp16_linears": torch.float16}

# Suffixes of a block's tensors that the compute dtype applies to; the others are float32 in both recipes.
_LINEARS = (".attn.to_qkv.", ".attn.to_out.0.", ".ff.net.0.proj.", ".ff.net.2.")


class DecoderNetwork:
    """Weights: groups `vae/decoder.prelude`, `vae/decoder.blocks.<i>`, `vae/decoder.heads`, each waited for when the
    first forward reaches it, so decoding may begin while later blocks still arrive."""

    def __init__(
        self,
        config: VideoVAEConfig,
        weights: WeightSource,
        device: torch.device,
        precision: Precision = "fp32",
        operators: DecoderOperators = EAGER,
    ) -> None:
        if precision not in COMPUTE_DTYPES:
            raise InternalError(
                "unknown precision recipe",
                where="video decoder",
                found=repr(precision),
                expected=list(COMPUTE_DTYPES),
            )
        self.config = config
        self.device = device
        self.compute_dtype = COMPUTE_DTYPES[precision]
        self._source = weights
        self._operators = operators
        self.attention = TileAttention(device, self.compute_dtype)
        self._groups: dict[str, dict[str, Tensor]] = {}
        self._rotations: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def forward(self, latents: Tensor) -> Tensor:
        """[B, C, T, h, w] float32, denormalised → [B, 3, 4T, 16h, 16w] float32, ImageNet-normalised."""
        rotation = self._rotation(latents.shape[2:])
        hidden, num_patches = self._embed(latents), latents.shape[2:].numel()
        weight = self._block_weights(0)[f"{_block_name(0)}.norm1.weight"]
        normed = F.rms_norm(hidden, hidden.shape[-1:], weight, self.config.decoder_norm_eps)
        normed = normed.to(self.compute_dtype)
        for index in range(self.config.decoder_num_layers):
            hidden, normed = self._block(hidden, normed, index, rotation)
        return self._project_out(hidden, num_patches, latents.shape[2:])

    def _embed(self, latents: Tensor) -> Tensor:
        """[B, C, T, h, w] → [B, N, D] float32: a token per latent, then the registers, then one zero token."""
        weights = self._weights("decoder.prelude", ("post_quant_conv.",))
        weight, bias = weights["post_quant_conv.weight"], weights["post_quant_conv.bias"]
        with exact_convolutions():
            tokens = F.conv3d(latents.to(self.compute_dtype), weight, bias).float()
        tokens = tokens.flatten(2).transpose(1, 2)
        tokens = F.linear(tokens, weights["decoder.proj_in.weight"], weights["decoder.proj_in.bias"])
        batch, _, width = tokens.shape
        registers = weights["decoder.register_tokens"].expand(batch, -1, -1)
        return torch.cat([tokens, registers, tokens.new_zeros(batch, 1, width)], dim=1)

    def _block(
        self, hidden: Tensor, normed: Tensor, index: int, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """[B, N, D] float32 and its first norm, compute dtype → the same for the next block; after the last block the
        norm is of no use."""
        weights, prefix, eps = self._block_weights(index), _block_name(index), self.config.decoder_norm_eps
        attended = self._attention(normed, weights, f"{prefix}.attn", rotation)
        scale, weight = weights[f"{prefix}.scale1"], weights[f"{prefix}.norm2.weight"]
        hidden, normed = self._operators.residual_norm(hidden, attended, scale, weight, eps)
        inner = self._operators.swiglu(_linear(normed, weights, f"{prefix}.ff.net.0.proj"))
        update, scale = _linear(inner, weights, f"{prefix}.ff.net.2"), weights[f"{prefix}.scale2"]
        if index + 1 == self.config.decoder_num_layers:
            return hidden + update * scale, normed
        weight = self._block_weights(index + 1)[f"{_block_name(index + 1)}.norm1.weight"]
        return self._operators.residual_norm(hidden, update, scale, weight, eps)

    def _attention(
        self, x: Tensor, weights: Mapping[str, Tensor], prefix: str, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[B, N, D] → [B, N, D], compute dtype. Queries and keys stay float32 through norm and rotation."""
        heads, eps = self.config.decoder_num_attention_heads, self.config.decoder_norm_eps
        qkv = _linear(x, weights, f"{prefix}.to_qkv")
        out = self.attention(*self._operators.rotated_qkv(qkv, *rotation, heads, eps))
        return _linear(out.flatten(2), weights, f"{prefix}.to_out.0")

    def _project_out(self, hidden: Tensor, num_patches: int, grid: torch.Size) -> Tensor:
        """[B, N, D] → [B, 3, 4T, 16h, 16w]: every latent's token is the pixels of its 4 x 16 x 16 block."""
        weights = self._weights("decoder.heads", ())
        norm = (weights["decoder.norm_out.weight"], weights["decoder.norm_out.bias"])
        hidden = F.layer_norm(hidden, hidden.shape[-1:], *norm, self.config.decoder_norm_eps)
        pixels = _linear(hidden, weights, "decoder.proj_out")[:, :num_patches]
        time, space = self.config.temporal_ratio, self.config.spatial_ratio
        pixels = pixels.view(-1, *grid, self.config.out_channels, time, space, space)
        pixels = pixels.permute(0, 4, 1, 5, 2, 6, 3, 7)  # [B, 3, T, 4, h, 16, w, 16]
        return pixels.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def _rotation(self, grid: torch.Size) -> tuple[Tensor, Tensor]:
        """Tables of a tile's token grid (T, h, w), computed once per shape."""
        key = (grid[0], grid[1], grid[2])
        if key not in self._rotations:
            cos, sin = rotation_tables(self.config, key)
            self._rotations[key] = (cos.to(self.device), sin.to(self.device))
        return self._rotations[key]

    def _block_weights(self, index: int) -> dict[str, Tensor]:
        return self._weights(f"decoder.blocks.{index}", _LINEARS)

    def _weights(self, group: str, computed: tuple[str, ...]) -> dict[str, Tensor]:
        """Tensors of `vae/<group>`; names containing one of `computed` in the compute dtype, all others float32.

        Where the stored dtype is already right nothing is copied.
        """
        if group not in self._groups:
            self._groups[group] = {
                name: tensor.to(
                    self.device,
                    self.compute_dtype if any(part in name for part in computed) else torch.float32,
                )
                for name, tensor in self._source.tensors(f"vae/{group}").items()
            }
        return self._groups[group]


def rotation_tables(config: VideoVAEConfig, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, 1, R] float32 of every token's angles; R = rotated channels of a head.

    Index i of an axis of length n sits at `2 (i + 0.5) / n - 1`, so positions are relative to the tile; registers and
    the zero token sit at the origin. Angle = 2 pi * position * frequency, per axis (t, y, x), all of it twice.
    """
    rotated = int(config.decoder_attention_head_dim * config.decoder_rope_dim_ratio)
    frequency = 1.0 / config.decoder_rope_theta ** torch.arange(0, 1, 6 / rotated, dtype=torch.float32)
    axes = [2.0 * (torch.arange(0.5, size, dtype=torch.float32) / size) - 1.0 for size in grid]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)  # [T*h*w, 3]
    extra = positions.new_zeros(config.decoder_num_register_tokens + 1, 3)
    angles = 2.0 * math.pi * torch.cat([positions, extra])[:, :, None] * frequency
    angles = angles.flatten(1).tile(2).unsqueeze(1)
    return angles.cos(), angles.sin()


def _block_name(index: int) -> str:
    return f"decoder.transformer_blocks.{index}"


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
