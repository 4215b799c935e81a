"""The video VAE's encoder: a causal 3-D CNN, float32 throughout, tiled in space and cut into clips in time.

Causal: a convolution sees two frames back and none ahead, and the frames before a clip are zeros. Normalisation is
per frame, so frames meet only in convolutions. Source: diffusers 0.42.1, autoencoder_kl_minimax_h3.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from loader.errors import InternalError
from runtime.families.minimax_h3.config import VideoVAEConfig
from runtime.families.minimax_h3.model.exact_convolution import exact_convolutions
from runtime.families.minimax_h3.model.tiling import RELEASED_TILES, TileGeometry, TilePlan, stitch
from runtime.families.minimax_h3.model.video_vae_pixels import normalize
from runtime.weights import WeightSource

POSTERIOR_SEED = 42  # of every condition, whatever the request's seed
GROUP = "vae/encoder"


def encode_keyframe(
    pixels: Tensor, config: VideoVAEConfig, weights: WeightSource, device: torch.device | str
) -> Tensor:
    """Conditioning latents of one picture.

    Args:
        pixels: [H, W, 3] uint8, already at the canvas size.
    Returns: [C, 1, H/16, W/16] float32 on the CPU, normalised; see `encode_frames`.
    """
    return encode_frames(pixels.unsqueeze(0), config, weights, device)


@torch.inference_mode()
def encode_frames(
    pixels: Tensor, config: VideoVAEConfig, weights: WeightSource, device: torch.device | str
) -> Tensor:
    """Conditioning latents of a picture (one frame) or a reference video.

    The posterior is sampled, with noise from a fresh CPU generator, and the sample is rounded to float16 before it is
    normalised; the model was conditioned that way.

    Args:
        pixels: [F, H, W, 3] uint8, H and W multiples of 16.
    Returns: [C, T, H/16, W/16] float32 on the CPU; T = 1 for one frame, 5n + 2 for 17n + 5 frames.
    Raises: InternalError: another shape or dtype.
    """
    if pixels.ndim != 4 or pixels.shape[-1] != config.in_channels or pixels.dtype != torch.uint8:
        raise InternalError(
            "pixels do not fit the encoder",
            where="video encoder: pixels",
            found=(tuple(pixels.shape), pixels.dtype),
            expected=f"[F, H, W, {config.in_channels}] uint8",
        )
    moments = VideoEncoder(config, weights, device).moments(normalize(pixels.to(device)))
    mean, log_variance = moments.chunk(2)
    std = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(POSTERIOR_SEED))
    sample = mean + std * noise.to(mean.device)
    sample = sample.to(torch.float16).float().cpu()
    latents_mean, latents_std = (
        torch.tensor(v).view(-1, 1, 1, 1) for v in (config.latents_mean, config.latents_std)
    )
    return (sample - latents_mean) / latents_std


class VideoEncoder:
    """Encoder of one prepared directory. Weights: group `vae/encoder`, waited for when first needed.

    Args:
        tile_batch: tiles per forward. Larger batches change rounding only; 1 is the reference's order of work.
        tiles: tile geometry; leave the default except in tests.
    """

    def __init__(
        self,
        config: VideoVAEConfig,
        weights: WeightSource,
        device: torch.device | str,
        *,
        tile_batch: int = 1,
        tiles: TileGeometry = RELEASED_TILES,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.tile_batch = tile_batch
        self.tiles = tiles
        self._source = weights

    @torch.inference_mode()
    def moments(self, video: Tensor) -> Tensor:
        """Posterior of a video.

        One frame is encoded as it is. More are cut into clips of `clip_length` frames (the last one filled with copies
        of the last frame), each encoded on its own; the last `token_drop` latent frames are dropped.

        Args:
            video: [3, F, H, W] float32, ImageNet-normalised.
        Returns: [2C, T, H/16, W/16] float32: C means, then C log variances.
        """
        video = video.to(self.device, torch.float32)
        frames = video.shape[1]
        if frames == 1:
            return self._clip_moments(video)
        clip = self.config.clip_length
        missing = -frames % clip
        if missing:
            video = torch.cat([video, video[:, -1:].expand(-1, missing, -1, -1)], dim=1)
        moments = torch.cat([self._clip_moments(part) for part in torch.split(video, clip, dim=1)], dim=1)
        return moments[:, : moments.shape[1] - self.config.token_drop]

    def _clip_moments(self, clip: Tensor) -> Tensor:
        """[3, F, H, W] → [2C, T, H/16, W/16]; blended in latent space, before mean and log variance part."""
        ratio = self.config.spatial_ratio
        plan = TilePlan.of_canvas(clip.shape[-2], clip.shape[-1], ratio, self.tiles)
        weights = {name: tensor.to(self.device) for name, tensor in self._source.tensors(GROUP).items()}
        encoded: list[Tensor] = []
        with exact_convolutions():
            for batch in torch.split(torch.stack(plan.cut(clip)), self.tile_batch):
                encoded += encode_tiles(batch, self.config, weights)
        return stitch(encoded, plan.divided(ratio))


def encode_tiles(tiles: Tensor, config: VideoVAEConfig, weights: Mapping[str, Tensor]) -> Tensor:
    """The network: [B, 3, F, H, W] → moments [B, 2C, T, H/16, W/16], all float32."""
    hidden = _causal_conv(tiles, weights, "encoder.conv_in", config)
    factors = zip(config.temporal_downsample_factors, config.spatial_downsample_factors, strict=True)
    for level, (temporal, spatial) in enumerate(factors):
        prefix = f"encoder.down_blocks.{level}"
        for index in range(config.layers_per_block):
            hidden = _residual_block(hidden, weights, f"{prefix}.resnets.{index}", config)
        if temporal * spatial > 1:
            if spatial == 2:
                # Right and bottom only; the strided convolution itself pads nothing in space.
                hidden = F.pad(hidden, (0, 1, 0, 1, 0, 0), mode=config.spatial_padding_mode)
            conv = f"{prefix}.downsamplers.0.conv"
            hidden = _causal_conv(hidden, weights, conv, config, (temporal, spatial, spatial), pad=0)
    hidden = F.silu(_frame_group_norm(hidden, weights, "encoder.norm_out", config))
    hidden = _causal_conv(hidden, weights, "encoder.conv_out", config)
    return F.conv3d(hidden, weights["quant_conv.weight"], weights["quant_conv.bias"])


def _residual_block(x: Tensor, weights: Mapping[str, Tensor], prefix: str, config: VideoVAEConfig) -> Tensor:
    hidden = F.silu(_frame_group_norm(x, weights, f"{prefix}.norm1", config))
    hidden = _causal_conv(hidden, weights, f"{prefix}.conv1", config)
    hidden = F.silu(_frame_group_norm(hidden, weights, f"{prefix}.norm2", config))
    hidden = _causal_conv(hidden, weights, f"{prefix}.conv2", config)
    if f"{prefix}.conv_shortcut.weight" in weights:  # where the width changes
        x = F.conv3d(x, weights[f"{prefix}.conv_shortcut.weight"], weights[f"{prefix}.conv_shortcut.bias"])
    return x + hidden


def _causal_conv(
    x: Tensor,
    weights: Mapping[str, Tensor],
    name: str,
    config: VideoVAEConfig,
    stride: tuple[int, int, int] = (1, 1, 1),
    pad: int = 1,
) -> Tensor:
    """3x3x3 convolution with two zero frames in front and `pad` mirrored pixels around every frame."""
    if pad:
        x = F.pad(x, (pad, pad, pad, pad, 0, 0), mode=config.spatial_padding_mode)
    x = F.pad(x, (0, 0, 0, 0, 2, 0))
    return F.conv3d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride=stride)


def _frame_group_norm(x: Tensor, weights: Mapping[str, Tensor], name: str, config: VideoVAEConfig) -> Tensor:
    """GroupNorm of [B, C, F, H, W] with statistics of one frame each."""
    batch, _, frames, _, _ = x.shape
    folded = x.transpose(1, 2).flatten(0, 1)  # [B*F, C, H, W]
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    folded = F.group_norm(folded, config.norm_num_groups, weight, bias, config.norm_eps)
    return folded.view(batch, frames, *folded.shape[1:]).transpose(1, 2).contiguous()
