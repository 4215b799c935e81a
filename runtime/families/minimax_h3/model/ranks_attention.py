"""Self-attention of DiT and refiner blocks whose rows lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kernels.ops import Operators
from runtime.families.minimax_h3.config import TransformerConfig
from runtime.families.minimax_h3.model.block import BlockWeights, norm_and_rotate
from runtime.ops.attention import Attention
from runtime.ops.linear import linear
from runtime.ops.rotary import RotaryTable
from runtime.parallel.ulysses import HeadExchange


@dataclass(frozen=True)
class ExchangedAttention:
    """The form of `block.self_attention`, over this rank's rows.

    exchange: `w.qkv` has the heads that it asks to be projected: this rank's, or all.
    operators: fused norm and rotation of q and k; None: the eager composition, as with `one_by_one`.
    one_by_one: project q, k and v one after the other, so that each travels while the next is projected.
    """

    exchange: HeadExchange
    operators: Operators | None = None
    one_by_one: bool = False

    def __call__(
        self,
        x: Tensor,
        w: BlockWeights,
        config: TransformerConfig,
        rope: RotaryTable | None,
        attention: Attention,
    ) -> Tensor:
        """[n, D] normed rows of this rank -> [n, D]; `rope` covers all S rows."""
        fused = None if self.one_by_one or rope is None else self.operators
        norms = (w.norm_q, w.norm_k, None)
        heads, width = len(w.qkv) // (3 * config.attention_head_dim), config.attention_head_dim
        matrices = w.qkv.chunk(3) if self.one_by_one else (w.qkv,)

        def project(hidden: Tensor, rows: range) -> Iterator[Tensor]:
            table = None if rope is None else RotaryTable(*(part[rows.start : rows.stop] for part in rope))
            if fused is not None and table is not None and len(hidden):
                yield from fused.qk_norm_rope(
                    linear(hidden, w.qkv), w.norm_q, w.norm_k, *table, heads, heads, config.qk_norm_eps
                )
                return
            products = (
                linear(hidden, matrix).view(len(hidden), 3 // len(matrices), heads, width)
                for matrix in matrices
            )
            parts = (part for product in products for part in product.unbind(1))  # each [n, heads, K]
            for part, norm in zip(parts, norms, strict=True):
                yield part if norm is None else norm_and_rotate(part, norm, config, table)

        q, k, v = (part.get() for part in self.exchange.attention_inputs(x, project))
        out = x.new_empty((len(x), w.out.shape[0]))
        for place, part in self.exchange.return_rows(attention(q, k, v).contiguous()):
            out[place] = linear(part, w.out)
        return out
