"""The DiT block over fused operators: the same function as `transformer.block_forward`, in fewer passes over memory.

Where a kernel is loaded it rounds where the eager block rounds; only the order of a norm's sum differs, which moves
single bf16 results by one step. A block leaves its last gated residual to the next one (`pending`), which adds it in the
pass of its first norm: one read and one write of the rows less, and no weight of the next block is waited for early.
"""

from __future__ import annotations

from torch import Tensor

from kernels.ops import Operators
from runtime.families.minimax_h3.config import TransformerConfig
from runtime.families.minimax_h3.model.adaln import (
    GATE_ATTN,
    GATE_MLP,
    SCALE_ATTN,
    SCALE_MLP,
    SHIFT_ATTN,
    SHIFT_MLP,
)
from runtime.families.minimax_h3.model.block import BlockWeights, SelfAttention
from runtime.families.minimax_h3.model.pending import Hidden, PendingSum
from runtime.ops.attention import Attention
from runtime.ops.linear import linear
from runtime.ops.rotary import RotaryTable


class FusedBlock:
    """A `BlockForward` over one set of operators.

    attend: replacement of the attention part, of the form of `block.self_attention`; None: this file's.
    """

    def __init__(self, operators: Operators, attend: SelfAttention | None = None) -> None:
        self._operators = operators
        self._attend = attend or self._attend_fused

    def __call__(
        self,
        x: Hidden,
        w: BlockWeights,
        modulation: Tensor,
        index: Tensor,
        rope: RotaryTable,
        attention: Attention,
        config: TransformerConfig,
    ) -> PendingSum:
        """See `transformer.block_forward`: x [S, D], modulation [R, 6, D], index [S] int32 -> [S, D], not yet added."""
        fused = self._operators
        shift_attn, scale_attn = modulation[:, SHIFT_ATTN], modulation[:, SCALE_ATTN]
        shift_mlp, scale_mlp = modulation[:, SHIFT_MLP], modulation[:, SCALE_MLP]
        if isinstance(x, PendingSum):
            rows, n = fused.gate_norm_modulate(
                x.rows, x.update, x.gate, w.norm1, shift_attn, scale_attn, index, config.norm_eps
            )
        else:
            rows, n = x, fused.norm_modulate(x, w.norm1, shift_attn, scale_attn, index, config.norm_eps)
        update = self._attend(n, w, config, rope, attention)
        rows, n = fused.gate_norm_modulate(
            rows, update, modulation[:, GATE_ATTN], w.norm2, shift_mlp, scale_mlp, index, config.norm_eps
        )
        update = linear(fused.swiglu(linear(n, w.up_gate)), w.down)
        return PendingSum(rows, update, modulation[:, GATE_MLP], index, fused.gate_residual)

    def _attend_fused(
        self,
        x: Tensor,
        w: BlockWeights,
        config: TransformerConfig,
        rope: RotaryTable | None,
        attention: Attention,
    ) -> Tensor:
        heads = w.qkv.shape[0] // (3 * config.attention_head_dim)
        cos, sin = rope or (None, None)
        q, k, v = self._operators.qk_norm_rope(
            linear(x, w.qkv), w.norm_q, w.norm_k, cos, sin, heads, heads, config.qk_norm_eps
        )
        return linear(attention(q, k, v).flatten(1), w.out)
