"""What DiT blocks and refiner blocks share: the same attention and feed-forward on a packed sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

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


class SelfAttention(Protocol):
    """The form of `self_attention`; replacements may keep rows or heads elsewhere."""

    def __call__(
        self,
        x: Tensor,
        w: BlockWeights,
        config: TransformerConfig,
        rope: RotaryTable | None,
        attention: Attention,
    ) -> Tensor: ...


def self_attention(
    x: Tensor, w: BlockWeights, config: TransformerConfig, rope: RotaryTable | None, attention: Attention
) -> Tensor:
    """Attention of every row to every row. [S, D] normed input -> [S, D]; `rope` in the dtype of `x`, None = none.

    q and k are normed per head before they are rotated.
    """
    # each [S, H, K]
    q, k, v = linear(x, w.qkv).view(len(x), 3, -1, config.attention_head_dim).unbind(1)
    q, k = norm_and_rotate(q, w.norm_q, config, rope), norm_and_rotate(k, w.norm_k, config, rope)
    return linear(attention(q, k, v).flatten(1), w.out)


def norm_and_rotate(
    heads: Tensor, norm: Tensor, config: TransformerConfig, rope: RotaryTable | None
) -> Tensor:
    """Queries or keys ready for attention: [S, H, K] -> [S, H, K]."""
    normed = rms_norm(heads, norm, config.qk_norm_eps)
    return normed if rope is None else rotate(normed, rope)


def feed_forward(x: Tensor, w: BlockWeights) -> Tensor:
    """[S, D] normed input -> [S, D]."""
    return swiglu(x, w.up_gate, w.down)
