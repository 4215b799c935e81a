"""How many tiles one forward of the video decoder may take, from the memory that is free when decoding starts."""

from __future__ import annotations

import torch

from runtime.families.minimax_h3.config import VideoVAEConfig

_MARGIN = (
    1 << 30
)  # the sound, decoded beside the first unit; the allocator's rounding and the workspaces of libraries
_UNIT_TENSORS = 6  # of one unit's stitched frames: head, tail before it, blends, bytes for the host


def tile_bytes(config: VideoVAEConfig, grid: tuple[int, int, int], compute_bytes: int) -> int:
    """Upper bound of what one tile adds to a forward's peak.

    The larger of two moments: the feed-forward (inner, its activation and their product, beside the residual stream,
    its norm and the update) and the rotation of queries and keys in float32 by the eager operators.

    Args:
        grid: latents of the tile, (T, h, w). compute_bytes: of one element of the compute dtype.
    """
    tokens = grid[0] * grid[1] * grid[2] + config.decoder_num_register_tokens + 1
    width = config.decoder_num_attention_heads * config.decoder_attention_head_dim
    inner = width * config.decoder_ffn_mult
    feed_forward = (4 * inner + 2 * width) * compute_bytes + 3 * width * 4
    attention = 6 * width * compute_bytes + 8 * width * 4
    time, space = config.temporal_ratio, config.spatial_ratio
    pixels = config.out_channels * grid[0] * time * grid[1] * grid[2] * space * space * 4
    return tokens * max(feed_forward, attention) + 3 * pixels


def fitting_tiles(
    config: VideoVAEConfig,
    grid: tuple[int, int, int],
    compute_bytes: int,
    tiles: int,
    canvas: tuple[int, int],
    free_bytes: int,
) -> int:
    """Tiles per forward, at least 1, in equal batches where one does not take all.

    Args:
        tiles: of one unit. canvas: height and width in pixels. free_bytes: see `free_memory`.
    """
    frames = grid[0] * config.temporal_ratio
    # all tiles' pixels wait for the stitching, whatever the batch
    kept = 4 * config.out_channels * frames * (tiles * grid[1] * grid[2] * config.spatial_ratio**2)
    kept += _UNIT_TENSORS * 4 * config.out_channels * frames * canvas[0] * canvas[1]
    most = (free_bytes - _MARGIN - kept) // tile_bytes(config, grid, compute_bytes)
    batches = -(-tiles // max(1, min(most, tiles)))
    return -(-tiles // batches)


def free_memory(device: torch.device) -> int | None:
    """Bytes that tensors can still get on a CUDA device: the driver's and what torch keeps unused; None elsewhere."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
