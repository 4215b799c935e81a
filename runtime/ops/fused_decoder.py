"""The video decoder's operators as precompiled kernels, where they are loaded and fit; else the eager form."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import row_tiles
from kernels.cubin import Kernel, KernelSet
from runtime.ops.decoder import DecoderOperators


class FusedDecoderOperators(DecoderOperators):
    """See `DecoderOperators`; the same roundings, up to the order of a norm's sum and the last bits of exp.

    Args:
        kernels: bound kernels of this device.
    """

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels

    def rotated_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In place: q and k are views of `qkv`."""
        batch, tokens, width = qkv.shape
        head_dim = width // (3 * num_heads)
        kernel = self._find("decoder_qk_norm_rope", (head_dim, cos.shape[-1] // 2), qkv)
        if kernel is None or not qkv.is_contiguous():
            return super().rotated_qkv(qkv, cos, sin, num_heads, eps)
        cos, sin = cos.flatten(1), sin.flatten(1)
        tiles = row_tiles(2 * num_heads, kernel.block)
        kernel.launch(
            batch * tokens * tiles,
            _stream(qkv),
            qkv.data_ptr(),
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            width,
            width,
            cos.stride(0),
            tokens,
            2 * num_heads,
            tiles,
            eps,
        )
        q, k, v = qkv.view(batch, tokens, 3, num_heads, head_dim).unbind(2)
        return q, k, v

    def residual_norm(
        self, hidden: Tensor, update: Tensor, scale: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """In place: the sum is `hidden`'s memory."""
        width = hidden.shape[-1]
        kernel = self._find("decoder_residual_norm", (width,), update)
        if kernel is None or not (hidden.is_contiguous() and update.is_contiguous()):
            return super().residual_norm(hidden, update, scale, weight, eps)
        out = torch.empty_like(update)
        kernel.launch(
            hidden.numel() // width,
            _stream(hidden),
            hidden.data_ptr(),
            update.data_ptr(),
            scale.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            width,
            width,
            width,
            eps,
        )
        return hidden, out

    def swiglu(self, inner: Tensor) -> Tensor:
        width = inner.shape[-1] // 2
        kernel = self._find("decoder_swiglu", (), inner)
        if kernel is None or not inner.is_contiguous() or width % 16:
            return super().swiglu(inner)
        out = inner.new_empty(*inner.shape[:-1], width)
        tiles = row_tiles(width, kernel.block)
        kernel.launch(
            out.numel() // width * tiles,
            _stream(inner),
            inner.data_ptr(),
            out.data_ptr(),
            2 * width,
            width,
            width,
            tiles,
        )
        return out

    def _find(self, operator: str, constants: tuple[int, ...], operand: Tensor) -> Kernel | None:
        """A kernel for float16 operands on the kernels' device."""
        if operand.dtype != torch.float16 or operand.device.type != self._kernels.device_type:
            return None
        return self._kernels.find(operator, *constants)


def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0
