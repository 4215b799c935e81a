"""Attention of the video decoder: in a batch of tiles, every tile's tokens against each other.

On Hopper and newer cuDNN is asked first: torch's own flash backend reaches half of its rate. FlashAttention-3, which the
DiT may run on (`kernels.attention`), is never taken: its packages leave out the decoder's float16. Elsewhere, and in float32,
whatever torch picks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention import backends, choose_backend
from loader.errors import CapabilityError

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
    Raises: CapabilityError: another backend was requested, or one that cannot run here.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, requested: str = "auto") -> None:
        if requested not in ("auto", *_ORDERS):
            raise CapabilityError(
                "attention inside tiles has no such backend",
                found=repr(requested),
                expected=["auto", *_ORDERS],
            )
        choice = choose_backend(device, dtype, requested).of_torch.backend
        self.backend = choice if choice in _ORDERS and device.type == "cuda" else "torch"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, N, H, K] each, strided views are read as they are -> [B, N, H, K]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.backend == "torch":
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)
        with backends(_ORDERS[self.backend]):
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)
