"""The DiT over several ranks: each holds a part of the packed rows and every rank returns the whole velocity."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from kernels.ops import Operators
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.adaln import ModulationTables
from runtime.families.minimax_h3.model.block import SelfAttention
from runtime.families.minimax_h3.model.fused_block import FusedBlock
from runtime.families.minimax_h3.model.ranks_attention import ExchangedAttention
from runtime.families.minimax_h3.model.refiner import refine_text
from runtime.families.minimax_h3.model.transformer import Transformer, Velocity, block_forward
from runtime.families.minimax_h3.packing import PackedSequence
from runtime.ops.attention import Attention, attention
from runtime.parallel.control import Control
from runtime.parallel.ranks import Ranks
from runtime.parallel.rows import gather_rows
from runtime.parallel.split import GATHER_CHUNK_ROWS, RowShards
from runtime.parallel.ulysses import GatheredHidden, ProjectedHeads
from runtime.weights import WeightSource


class RanksTransformer(Transformer):
    """See `Transformer`. Rows in, rows out are the same on all ranks; in between a rank has its part.

    Args:
        is_sharded: `to_qkv` of the blocks has this rank's heads only, so hidden rows are gathered; else projected
            heads are exchanged.
        operators: fused operators of the blocks; None: the eager composition.
        chunk_rows: rows of a rank that are gathered at once.
    """

    def __init__(
        self,
        config: H3Config,
        weights: WeightSource,
        tables: ModulationTables,
        ranks: Ranks,
        control: Control,
        is_sharded: bool,
        attention: Attention = attention,
        operators: Operators | None = None,
        chunk_rows: int = GATHER_CHUNK_ROWS,
    ) -> None:
        super().__init__(config, weights, tables, attention)
        self._ranks, self._control = ranks, control
        self._is_sharded, self._chunk_rows = is_sharded, chunk_rows
        self._operators = operators

    def begin(self, text: Tensor, sequence: PackedSequence, rows: range | None = None) -> None:
        """See `Transformer.begin`; `rows` is this rank's part by default."""
        shards = RowShards.of(sequence.num_rows, self._ranks.size)
        super().begin(text, sequence, rows or shards.ranges[self._ranks.rank])
        attend = self._attend(shards)
        self.block = (
            partial(block_forward, attend=attend)
            if self._operators is None
            else FusedBlock(self._operators, attend)
        )
        audio_start = sequence.num_rows - sequence.num_video - sequence.num_audio
        video_start = sequence.num_rows - sequence.num_video
        self._audio_counts = [_overlap(part, audio_start, video_start) for part in shards.ranges]
        self._video_counts = [_overlap(part, video_start, sequence.num_rows) for part in shards.ranges]

    def forward(self, video_rows: Tensor, audio_rows: Tensor, evaluation: int) -> Velocity:
        """See `Transformer.forward`; velocity of all target rows. Raises also: Cancelled."""
        with self._control.section(f"evaluation {evaluation}"):
            own = super().forward(video_rows, audio_rows, evaluation)
            return Velocity(
                gather_rows(self._ranks, own.video, self._video_counts),
                gather_rows(self._ranks, own.audio, self._audio_counts),
            )

    def _attend(self, shards: RowShards) -> SelfAttention:
        if self._is_sharded:
            exchange = GatheredHidden(self._ranks, shards, self._chunk_rows)
            return ExchangedAttention(exchange, operators=self._operators)
        return ExchangedAttention(ProjectedHeads(self._ranks, shards), one_by_one=True)


def refine_text_on_ranks(
    config: H3Config,
    weights: WeightSource,
    prompt_embeds: Tensor,
    ranks: Ranks,
    attention: Attention = attention,
) -> Tensor:
    """`refine_text` of this rank's rows, heads exchanged; all rows are returned on every rank. [N, text_dim] -> [N, D]."""
    shards = RowShards.of(len(prompt_embeds), ranks.size)
    own = shards.ranges[ranks.rank]
    attend = ExchangedAttention(ProjectedHeads(ranks, shards), one_by_one=True)
    rows = refine_text(config, weights, prompt_embeds[own.start : own.stop], attention, attend)
    return gather_rows(ranks, rows, [len(part) for part in shards.ranges])


def _overlap(rows: range, start: int, stop: int) -> int:
    return max(0, min(rows.stop, stop) - max(rows.start, start))
