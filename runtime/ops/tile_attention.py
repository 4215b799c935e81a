"""Attention of the video decoder: in a batch of tiles, every tile's tokens against each other.

On Hopper and newer cuDNN is asked first, as for the DiT (`kernels.attention`): torch's own flash backend reaches half
of its rate. Elsewhere, and in float32, whatever torch picks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import backends, choose_backend

# In this order: a backend that refuses a call leaves it to the next.
_ORDERS = {
    "cudnn": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


class TileAttention:
    """softmax(q k^T / sqrt(K)) v on one device.

    Args:
        requested: `auto`, `cudnn` or `flash`.
    Attributes:
        backend: what is asked first; `torch` where torch picks.
    Raises: CapabilityError: a backend was requested that cannot run.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, requested: str = "auto") -> None:
        choice = choose_backend(device, dtype, requested).backend
        self.backend = choice if choice in _ORDERS and device.type == "cuda" else "torch"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, N, H, K] each, strided views are read as they are -> [B, N, H, K]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.backend == "torch":
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)
        with backends(_ORDERS[self.backend]):
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)
