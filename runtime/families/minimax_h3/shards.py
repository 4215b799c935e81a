"""Which tensors of MiniMax-H3 ranks hold in parts, and which part. No torch: prepare writes what this says.

- DiT blocks, below eight ranks: `to_qkv` by heads. From there on projected heads travel and
  every rank needs whole projections.
- Conditioner layers, up to as many ranks as key heads: by heads (each key head with its query heads) and by
  feed-forward columns. With more ranks every rank runs it whole.

Everything else is shared: norms, output projections, the DiT's feed-forward and refiner, decoders, tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loader.errors import CapabilityError
from runtime.families.minimax_h3.config import H3Config
from runtime.parallel.split import Cut, split_evenly

GATHERED_BELOW = 8
"""Ranks from which gathering hidden rows moves more than exchanging projected heads."""


def check_ranks(config: H3Config, size: int) -> None:
    """Raises: CapabilityError: the heads do not divide by that many ranks (lists the numbers that work)."""
    heads = config.transformer.num_attention_heads
    if size < 1 or heads % size:
        allowed = [ranks for ranks in range(1, heads + 1) if heads % ranks == 0]
        raise CapabilityError(
            f"{heads} heads do not divide over the ranks", where="ranks", found=size, expected=allowed
        )


def gathers_hidden(size: int) -> bool:
    """Whether DiT blocks are sharded by heads for this number of ranks."""
    return size < GATHERED_BELOW


def cuts_conditioner(config: H3Config, size: int) -> bool:
    """Whether conditioner layers are sharded for this number of ranks."""
    return size <= config.text.num_key_value_heads


@dataclass(frozen=True)
class Share:
    """Over how many ranks a part of a request is spread.

    rows: packed rows, and heads inside an attention. conditioner: its heads and feed-forward columns. projection: the heads
    of `to_qkv` of a DiT block.
    """

    rows: int = 1
    conditioner: int = 1
    projection: int = 1

    def part(self, rows: int) -> int:
        """Rows of the largest part."""
        return -(-rows // self.rows)


WHOLE = Share()
"""That of one rank."""


def share_of(config: H3Config, size: int, is_sharded: bool) -> Share:
    """That of each of `size` ranks. is_sharded: they hold shards, not whole weights."""
    return Share(
        rows=size,
        conditioner=size if is_sharded and cuts_conditioner(config, size) else 1,
        projection=size if is_sharded and gathers_hidden(size) else 1,
    )


def cut_of(config: H3Config, tensor: str, rank: int, size: int) -> Cut | None:
    """This rank's part of a prepared tensor, by its name inside its file; None: every rank has all of it."""
    if size == 1:
        return None
    if tensor.startswith("transformer_blocks.") and tensor.endswith(".attn.to_qkv.weight"):
        dit = config.transformer
        own = split_evenly(dit.num_attention_heads, size)[rank] if gathers_hidden(size) else None
        heads = (dit.num_attention_heads,) * 3
        return None if own is None else Cut(rows=_head_rows((own,) * 3, heads, dit.attention_head_dim))
    if tensor.startswith("model.language_model.layers.") and cuts_conditioner(config, size):
        return _conditioner_cut(config, tensor, rank, size)
    return None


def _conditioner_cut(config: H3Config, tensor: str, rank: int, size: int) -> Cut | None:
    text = config.text
    group = text.num_attention_heads // text.num_key_value_heads
    keys = split_evenly(text.num_key_value_heads, size)[rank]
    queries = range(keys.start * group, keys.stop * group)
    columns = split_evenly(text.intermediate_size, size)[rank]
    if tensor.endswith(".self_attn.qkv_proj.weight"):
        heads = (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
        return Cut(rows=_head_rows((queries, keys, keys), heads, text.head_dim))
    if tensor.endswith(".self_attn.o_proj.weight"):
        return Cut(columns=range(queries.start * text.head_dim, queries.stop * text.head_dim))
    if tensor.endswith(".mlp.gate_up_proj.weight"):
        width = text.intermediate_size
        return Cut(rows=(columns, range(width + columns.start, width + columns.stop)))
    if tensor.endswith(".mlp.down_proj.weight"):
        return Cut(columns=columns)
    return None


def _head_rows(own: Sequence[range], heads: Sequence[int], width: int) -> tuple[range, ...]:
    """Rows of some heads in a matrix that holds all heads of one part after all heads of the part before it."""
    starts = [sum(heads[:part]) for part in range(len(heads))]
    return tuple(
        range((start + part.start) * width, (start + part.stop) * width)
        for start, part in zip(starts, own, strict=True)
    )
