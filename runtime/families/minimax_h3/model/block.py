"""What DiT blocks and refiner blocks share: the same attention and feed-forward on a packed sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from runtime.families.minimax_h3.config import TransformerConfig
from runtime.families.minimax_h3.model.weight_views import take
from runtime.ops.attention import Attention
from runtime.ops.feed_forward import swiglu
from runtime.ops.linear import linear
from runtime.ops.norms import rms_norm
from runtime.ops.rotary import RotaryTable, rotate


@dataclass(frozen=True)
class BlockWeights:
    """Views of one block's tensors. D hidden, A = heads x head dim, K head dim, F feed-forward width."""

    norm1: Tensor  # [D]
    qkv: Tensor  # [3 A, D], all q rows, all k rows, all v rows
    norm_q: Tensor  # [K]
    norm_k: Tensor  # [K]
    out: Tensor  # [D, A]
    norm2: Tensor  # [D]
    up_gate: Tensor  # [2 F, D]
    down: Tensor  # [D, F]

    @classmethod
    def view(cls, tensors: Mapping[str, Tensor], prefix: str) -> BlockWeights:
        """The block whose names start with `prefix` (`"transformer_blocks.3."`)."""
        names = (
            "norm1.weight",
            "attn.to_qkv.weight",
            "attn.norm_q.weight",
            "attn.norm_k.weight",
            "attn.to_out.0.weight",
            "norm2.weight",
            "ff.net.0.proj.weight",
            "ff.net.2.weight",
        )
        return cls(*take(tensors, prefix, names))


def self_attention(
    x: Tensor, w: BlockWeights, config: TransformerConfig, rope: RotaryTable | None, attention: Attention
) -> Tensor:
    """Attention of every row to every row. [S, D] normed input -> [S, D]; `rope` in the dtype of `x`, None = none.

    q and k are normed per head before they are rotated.
    """
    heads, eps = config.num_attention_heads, config.qk_norm_eps
    q, k, v = linear(x, w.qkv).view(len(x), 3, heads, -1).unbind(1)  # each [S, H, K]
    q, k = rms_norm(q, w.norm_q, eps), rms_norm(k, w.norm_k, eps)
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    return linear(attention(q, k, v).flatten(1), w.out)


def feed_forward(x: Tensor, w: BlockWeights) -> Tensor:
    """[S, D] normed input -> [S, D]."""
    return swiglu(x, w.up_gate, w.down)
